// Rows of a prompt that a card reads, on their way to a KV cache in memory. Only for sources built with CUDA.
#pragma once

#include <cstdint>
#include <memory>

#include "base/threads.h"
#include "cuda/card_graph.h"
#include "kv/session.h"

namespace longkv {

// A layer's prompt is attended on the card over `work`, its rows in f16; every chunk's rows travel to memory while the
// next chunk is computed, and enter the cache under its recipe.
class PromptLanding {
 public:
  // `chunk`: prompt tokens at a time. kv and pool must outlive this.
  static Result<std::unique_ptr<PromptLanding>> create(const ModelConfig& config, KvSession& kv, int64_t chunk,
                                                       ThreadPool& pool);
  ~PromptLanding();

  // Rows of tokens [0, start), those that the cache holds, come to work as they read back; all heads hold as many.
  Status begin_layer(int layer, int64_t start, const card::CardKv& work, cudaStream_t stream);
  // One chunk: the layer, and its rows on their way.
  Status chunk_layer(CardGraph& graph, int layer, const card::CardKv& work, float* hidden, int64_t first, int64_t n,
                     int64_t end, cudaStream_t stream);
  // All rows have arrived; `last`: the prompt ends with them.
  Status end_layer(int layer, bool last);
  // The prompt was not read: the cache holds `held` tokens again, or none where rows that these need are gone.
  Status abandon(int64_t held, cudaStream_t stream);

 private:
  struct Piece {
    PinnedBuffer memory;
    float *q = nullptr, *k = nullptr, *v = nullptr;
    cudaEvent_t done = nullptr;
    int layer = -1;  // -1: nothing is on its way
    int64_t n = 0, end = 0;
  };
  PromptLanding(const ModelConfig& config, KvSession& kv, ThreadPool& pool) : config_(config), kv_(kv), pool_(pool) {}
  Status land(Piece& p);

  const ModelConfig& config_;
  KvSession& kv_;
  ThreadPool& pool_;
  Piece pieces_[2];
  int next_ = 0;
  int64_t dropped_ = 0;  // of the present layer, tokens before this prompt's that have no rows
};

}  // namespace longkv
