#ifdef LONGKV_WITH_CUDA

#include "cuda/card_host_session.h"

#include <cstring>
#include <vector>

#include "base/checked.h"
#include "base/error.h"
#include "cuda/card_runner.h"
#include "cuda/card_sparse.h"
#include "cuda/prompt_landing.h"

namespace longkv {

Status card_supports_host_kv(const LoadedModel& model, const Recipe& recipe) {
  const ModelConfig& c = model.config();
  if (c.head_dim_k != c.head_dim_v || !card::card_kv_supports(KvType::kF16, c.head_dim_k))
    return fail(Code::kUnsupported, "heads of {} channels; the card has kernels for 64, 96, 128 and 256", c.head_dim_k);
  if (recipe.keep.evicts() ||
      (recipe.prefill.kind != PrefillKind::kDense && !CardSparse::supports(recipe.prefill.kind))) {
    return fail(
        Code::kUnsupported,
        "the recipe {}; on the card prompts are read with full attention or by any pattern but flex, and all of "
        "their rows stay",
        recipe.canonical());
  }
  return {};
}

namespace {

// Prompts are read on the card over one layer's rows in f16; every chunk's rows travel to memory while the next chunk
// is computed. Decoding goes back and forth once a layer: products on the card, the recipe on the CPU. Layers that lie
// in memory are decoded by the CPU alone.
class CardHostSession final : public CardRunner {
 public:
  CardHostSession(std::shared_ptr<CardModel> model, const CardSessionOptions& o, ThreadPool& pool)
      : CardRunner(std::move(model), o, pool), kv_(*o.kv) {}
  ~CardHostSession() override {
    (void)cudaStreamSynchronize(stream_.get());
    for (cudaGraphExec_t g : steps_) {
      if (g != nullptr) (void)cudaGraphExecDestroy(g);
    }
  }

  Status allocate();
  Status decode(int32_t id, std::span<float> logits) override;
  int64_t tokens() const override { return kv_.tokens().v; }
  Status truncate(int64_t n) override { return kv_.truncate(TokenCount{n}); }
  Status fill_random(int64_t n, uint64_t seed) override { return kv_.fill_random(n, seed); }
  const KvStats& stats() const override { return kv_.stats(); }
  void reset_stats() override { kv_.reset_stats(); }
  int64_t kv_bytes() const override { return kv_.cache().bytes_used(); }

 private:
  Status begin_layer(int layer, int64_t start) override {
    LONGKV_TRY(landing_->begin_layer(layer, start, work_, stream_.get()));
    return graph_->begin_rows(layer, work_, start, stream_.get());
  }
  Status chunk_layer(int layer, float* hidden, int64_t first, int64_t n, int64_t end) override {
    return landing_->chunk_layer(*graph_, layer, work_, hidden, first, n, end, stream_.get());
  }
  Status end_layer(int layer, int64_t, int64_t, bool last) override { return landing_->end_layer(layer, last); }
  Status commit(int64_t) override { return {}; }  // the cache counts its rows itself
  Status abandon(int64_t held) override { return landing_->abandon(held, stream_.get()); }
  Status capture_steps();
  Status segment(int layer);

  KvSession& kv_;
  CardBuffer work_memory_;
  card::CardKv work_;  // the present layer's rows in f16
  std::unique_ptr<PromptLanding> landing_;
  PinnedBuffer exchange_;  // of a decoded token
  float *qkv_ = nullptr, *out_ = nullptr;
  std::vector<cudaGraphExec_t> steps_;  // [layers on the card + 1], between two attentions
};

Status CardHostSession::allocate() {
  LONGKV_TRY(open());
  const ModelConfig& c = config();
  const int64_t capacity = round_up(options_.context, 16);
  LONGKV_ASSIGN(work_memory_,
                CardBuffer::create(memory(), card::card_kv_bytes(KvType::kF16, c.kv_heads, c.head_dim_k, capacity),
                                   fmt::format("one layer's rows of {} tokens", options_.context)));
  work_ = card::place_kv(KvType::kF16, c.kv_heads, c.head_dim_k, capacity, work_memory_.data());
  LONGKV_TRY(allocate_scratch());
  const int64_t q = int64_t(c.heads) * c.head_dim_k, kv = int64_t(c.kv_heads) * c.head_dim_k;
  LONGKV_ASSIGN(landing_, PromptLanding::create(c, kv_, chunk_, pool_));
  LONGKV_ASSIGN(exchange_, PinnedBuffer::create((2 * q + 2 * kv) * 4, "a token's queries, keys and values"));
  qkv_ = exchange_.as<float>();
  out_ = qkv_ + q + 2 * kv;
  return {};
}

// What lies between the attention of layer - 1 and that of `layer`.
Status CardHostSession::segment(int layer) {
  const ModelConfig& c = config();
  cudaStream_t stream = stream_.get();
  const int64_t q = int64_t(c.heads) * c.head_dim_k, kv = int64_t(c.kv_heads) * c.head_dim_k;
  if (layer == host_layers()) {
    LONGKV_TRY(
        cuda_status(cudaMemcpyAsync(graph_->hidden(), host_.hidden, size_t(c.dim) * 4, cudaMemcpyHostToDevice, stream),
                    "embedding"));
    LONGKV_TRY(cuda_status(
        cudaMemcpyAsync(graph_->position(), host_.position, sizeof(int64_t), cudaMemcpyHostToDevice, stream),
        "position"));
    LONGKV_TRY(graph_->begin_token(stream));
  } else {
    LONGKV_TRY(graph_->take_attention(out_, stream));
    LONGKV_TRY(graph_->finish_token(layer - 1, stream));
  }
  if (layer == c.layers) {
    LONGKV_TRY(graph_->output(graph_->hidden(), stream));
    return cuda_status(
        cudaMemcpyAsync(host_.logits, graph_->logits(), size_t(c.vocab) * 4, cudaMemcpyDeviceToHost, stream), "logits");
  }
  card::CardKv none;
  none.kv_heads = c.kv_heads;
  none.dim = c.head_dim_k;
  LONGKV_TRY(graph_->qkv_token(layer, none, stream));
  return cuda_status(cudaMemcpyAsync(qkv_, graph_->token_qkv(), size_t(q + 2 * kv) * 4, cudaMemcpyDeviceToHost, stream),
                     "queries, keys and values");
}

Status CardHostSession::capture_steps() {
  for (int layer = host_layers(); layer <= config().layers; ++layer) {
    LONGKV_ASSIGN(cudaGraphExec_t step, capture([&] { return segment(layer); }));
    steps_.push_back(step);
  }
  return {};
}

Status CardHostSession::decode(int32_t id, std::span<float> logits) {
  const ModelConfig& c = config();
  if (steps_.empty()) LONGKV_TRY(capture_steps());
  embed({&id, 1}, host_.hidden);
  *host_.position = tokens();
  const int64_t q = int64_t(c.heads) * c.head_dim_k, kv = int64_t(c.kv_heads) * c.head_dim_k;
  LONGKV_TRY(decode_host_layers(host_.hidden, *host_.position));
  for (int layer = host_layers(); layer <= c.layers; ++layer) {
    LONGKV_TRY(cuda_status(cudaGraphLaunch(steps_[size_t(layer - host_layers())], stream_.get()), "decoding a token"));
    LONGKV_TRY(stream_.wait("decoding a token"));
    if (layer < c.layers) LONGKV_TRY(kv_.decode(layer, qkv_, qkv_ + q, qkv_ + q + kv, out_));
  }
  std::memcpy(logits.data(), host_.logits, logits.size() * sizeof(float));
  return {};
}

}  // namespace

Result<std::unique_ptr<DeviceRunner>> make_card_host_session(std::shared_ptr<CardModel> model,
                                                             const CardSessionOptions& options, ThreadPool& pool) {
  LONGKV_TRY(card_supports_host_kv(model->model(), options.recipe));
  auto session = std::make_unique<CardHostSession>(std::move(model), options, pool);
  LONGKV_TRY(session->allocate());
  return std::unique_ptr<DeviceRunner>(std::move(session));
}

}  // namespace longkv

#endif
