// What sequences on a card share, wherever their KV cache lies: spans and chunks of a prompt, embeddings, logits. Only
// for sources built with CUDA.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "cuda/card_graph.h"
#include "cuda/card_session.h"

namespace longkv {

class CardRunner : public DeviceRunner {
 public:
  ~CardRunner() override;

  Status prefill(std::span<const int32_t> ids, const PrefillProgress& progress, const std::atomic<bool>* cancel,
                 const LogitsSink& sink, int64_t sink_from, std::span<float> logits) final;

 protected:
  CardRunner(std::shared_ptr<CardModel> model, const CardSessionOptions& o, ThreadPool& pool)
      : model_(std::move(model)), options_(o), host_kv_(o.kv != nullptr ? o.kv : o.host_kv.get()), pool_(pool) {}
  const ModelConfig& config() const { return model_->model().config(); }
  CardMemory& memory() const { return *model_->impl().memory; }

  // Stream and events; first of all.
  Status open();
  // Graph and buffers out of the memory that is left, but for `reserve` bytes: a smaller chunk rather than none.
  Status allocate_scratch(int64_t reserve = 0);
  bool reads_sparsely() const { return options_.recipe.prefill.kind != PrefillKind::kDense; }
  int64_t sparse_bytes(int64_t chunk) const {
    return reads_sparsely() ? CardSparse::bytes(config(), options_.recipe.prefill, options_.context, chunk) : 0;
  }
  void embed(std::span<const int32_t> ids, float* out);
  // What `work` queues on the stream, as a graph; whoever calls destroys it.
  Result<cudaGraphExec_t> capture(const std::function<Status()>& work) { return capture_work(stream_.get(), work); }
  // Layers [0, host_layers()) lie in memory; rows of theirs are in host_kv_.
  int host_layers() const { return model_->host_layers(); }
  // These layers of a decoded token, on the CPU.
  Status decode_host_layers(float* hidden, int64_t position);

  // A layer's part of a prompt: begin_layer, chunk_layer for every chunk, end_layer. `end` is the position after the
  // prompt's last token, `last` says whether these tokens are its last.
  virtual Status begin_layer(int layer, int64_t start) = 0;
  virtual Status chunk_layer(int layer, float* hidden, int64_t first, int64_t n, int64_t end) = 0;
  virtual Status end_layer(int layer, int64_t start, int64_t n, bool last) = 0;
  // The prompt was read: its n tokens count from now on. Or it was not: what was held before holds.
  virtual Status commit(int64_t n) = 0;
  virtual Status abandon(int64_t held) = 0;

  std::shared_ptr<CardModel> model_;
  CardSessionOptions options_;
  KvSession* host_kv_;  // rows of layers in memory, or of all layers; nullptr: there are none
  ThreadPool& pool_;
  CardStream stream_;
  std::unique_ptr<CardGraph> graph_;
  int64_t chunk_ = 0, span_ = 0;
  struct Step {
    float* hidden;
    float* logits;
    int64_t* position;  // and what CardGraph::position() has beside it
  } host_{};            // pinned: what changes between decoded tokens

 private:
  Status span(std::span<const int32_t> ids, int64_t start, int64_t done, int64_t total, int64_t end,
              const PrefillProgress& progress, const std::atomic<bool>* cancel);
  Status host_span(int64_t n, int64_t start, int64_t end, const std::atomic<bool>* cancel);
  Status deliver(int64_t first, int64_t n, int64_t at, const LogitsSink& sink);
  Status read(std::span<const int32_t> ids, const PrefillProgress& progress, const std::atomic<bool>* cancel,
              const LogitsSink& sink, int64_t sink_from, std::span<float> logits);

  cudaEvent_t done_[2] = {};
  CardBuffer hidden_;
  PinnedBuffer staging_;  // embeddings of a chunk
  PinnedBuffer host_memory_;
};

}  // namespace longkv
