#include "cuda/card_session.h"

#include "base/error.h"

#ifdef LONGKV_WITH_CUDA

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/checked.h"
#include "cuda/card_host_session.h"
#include "cuda/card_runner.h"
#include "cuda/select.h"

namespace longkv {

Status card_supports(const LoadedModel& model, const Recipe& recipe) {
  const ModelConfig& c = model.config();
  if (recipe.store.k != recipe.store.v || !card::card_kv_supports(recipe.store.k, c.head_dim_k)) {
    return fail(Code::kUnsupported,
                "rows of types {} and {} with {} channels; on the card K and V are both f16, bf16 or "
                "q8_0, with 64, 96, 128 or 256 channels",
                kv_type_name(recipe.store.k), kv_type_name(recipe.store.v), c.head_dim_k);
  }
  // What the card does, with the values of this recipe; anything else in it makes a difference.
  Recipe can;
  can.store.k = recipe.store.k;
  can.store.v = recipe.store.v;
  const bool summaries = recipe.index.kind == IndexKind::kMinMax || recipe.index.kind == IndexKind::kMean;
  if (summaries && recipe.select.heads != SelectHeads::kPerQueryHead &&
      recipe.select.aggregate != Aggregate::kSoftmaxSum && recipe.index.block % 16 == 0 && c.head_dim_k != 96 &&
      c.heads / c.kv_heads <= 16) {
    can.index.kind = recipe.index.kind;
    can.index.block = recipe.index.block;
    can.index.coarse = recipe.index.coarse;  // the card scores every block
    can.select.all = recipe.select.all;
    can.select.budget = recipe.select.budget;
    can.select.sink = recipe.select.sink;
    can.select.local = recipe.select.local;
    can.select.heads = recipe.select.heads;
    can.select.aggregate = recipe.select.aggregate;
    can.select.dense_layers = recipe.select.dense_layers;
  }
  if (recipe == can) return {};
  return fail(Code::kUnsupported,
              "the recipe {}; with its KV on the card, longkv has full attention and select=topk over index=minmax or "
              "mean in blocks of a multiple of 16 (aggregate sum or max), as in quest",
              recipe.canonical());
}

namespace {

// The whole KV cache on the card; a decoded token is one recorded graph.
class CardSession final : public CardRunner {
 public:
  CardSession(std::shared_ptr<CardModel> model, const CardSessionOptions& o, ThreadPool& pool)
      : CardRunner(std::move(model), o, pool), type_(o.recipe.store.k) {}
  ~CardSession() override {
    (void)cudaStreamSynchronize(stream_.get());
    if (step_ != nullptr) (void)cudaGraphExecDestroy(step_);
  }

  Status allocate();
  Status decode(int32_t id, std::span<float> logits) override;
  int64_t tokens() const override { return tokens_; }
  Status truncate(int64_t n) override {
    tokens_ = n;
    return {};
  }
  Status fill_random(int64_t n, uint64_t seed) override;
  const KvStats& stats() const override { return stats_; }
  void reset_stats() override { stats_ = KvStats{}; }
  int64_t kv_bytes() const override {
    const ModelConfig& c = config();
    return c.layers * card::card_kv_bytes(type_, c.kv_heads, c.head_dim_k, tokens_);
  }

 private:
  Status begin_layer(int layer, int64_t start) override {
    if (work_.k == nullptr || start == 0) return {};
    return card::decode_rows(kv_[size_t(layer)], 0, start, work_, stream_.get());
  }
  Status chunk_layer(int layer, float* hidden, int64_t first, int64_t n, int64_t) override {
    return graph_->prefill_layer(layer, kv_[size_t(layer)], work_.k != nullptr ? &work_ : nullptr, hidden, first, n,
                                 stream_.get());
  }
  Status end_layer(int layer, int64_t start, int64_t n, bool) override {
    return summarize_rows(layer, start, start + n);
  }
  Status commit(int64_t n) override {
    tokens_ += n;
    return {};
  }
  Status abandon(int64_t) override { return {}; }  // rows past tokens_ are never read

  Status allocate_selection(int64_t capacity);
  bool selects(int layer) const { return !choice_.empty() && choice_[size_t(layer)].data != nullptr; }
  Status summarize_rows(int layer, int64_t begin, int64_t end);
  Status capture_step();
  void count_step();

  KvType type_;
  CardBuffer kv_memory_, work_memory_;
  std::vector<card::CardKv> kv_;             // [layers]
  card::CardKv work_;                        // rows of the present layer in f16, where the cache holds another type
  std::vector<card::CardSummaries> choice_;  // [layers], no data: the layer attends all; empty: all layers do
  card::ChoiceRules rules_;
  card::TileList list_;
  CardBuffer summaries_, scores_, tiles_;
  cudaGraphExec_t step_ = nullptr;
  int64_t tokens_ = 0;
  KvStats stats_;
};

Status CardSession::allocate() {
  LONGKV_TRY(open());
  const ModelConfig& c = config();
  const int64_t capacity = round_up(options_.context, 16);
  const int64_t per_layer = card::card_kv_bytes(type_, c.kv_heads, c.head_dim_k, capacity);
  LONGKV_ASSIGN(kv_memory_, CardBuffer::create(memory(), c.layers * per_layer,
                                               fmt::format("the KV cache of {} tokens", options_.context)));
  for (int l = 0; l < c.layers; ++l)
    kv_.push_back(card::place_kv(type_, c.kv_heads, c.head_dim_k, capacity, kv_memory_.data() + l * per_layer));
  if (type_ == KvType::kQ8_0) {
    LONGKV_ASSIGN(work_memory_,
                  CardBuffer::create(memory(), card::card_kv_bytes(KvType::kF16, c.kv_heads, c.head_dim_k, capacity),
                                     "one layer's rows in f16"));
    work_ = card::place_kv(KvType::kF16, c.kv_heads, c.head_dim_k, capacity, work_memory_.data());
  }
  if (!options_.recipe.select.all) LONGKV_TRY(allocate_selection(capacity));
  return allocate_scratch(type_);
}

Status CardSession::allocate_selection(int64_t capacity) {
  const ModelConfig& c = config();
  const Recipe& r = options_.recipe;
  const auto kind = r.index.kind == IndexKind::kMean ? card::SummaryKind::kMean : card::SummaryKind::kBox;
  const int64_t blocks = ceil_div(capacity, r.index.block);
  const int64_t per_layer = card::summary_bytes(kind, c.kv_heads, c.head_dim_k, blocks);
  rules_ = {r.select.budget, r.select.sink, r.select.local, r.select.heads == SelectHeads::kShared,
            r.select.aggregate == Aggregate::kMax};
  int64_t choosing = 0;
  for (int l = 0; l < c.layers; ++l) {
    const bool dense = l < r.select.dense_layers || (!c.window.empty() && c.window[size_t(l)] > 0);
    choice_.push_back({kind, int(r.index.block), blocks, nullptr});
    if (!dense) choice_.back().data = reinterpret_cast<card::half_t*>(uintptr_t(++choosing));  // placed below
  }
  LONGKV_ASSIGN(summaries_, CardBuffer::create(memory(), choosing * per_layer, "summaries of the KV blocks"));
  for (card::CardSummaries& s : choice_) {
    if (s.data == nullptr) continue;
    s.data = reinterpret_cast<card::half_t*>(summaries_.data() + (int64_t(uintptr_t(s.data)) - 1) * per_layer);
  }
  list_.stride = rules_.tiles(int(r.index.block));
  LONGKV_ASSIGN(scores_, CardBuffer::create(memory(), c.kv_heads * blocks * 4, "scores of the KV blocks"));
  LONGKV_ASSIGN(tiles_, CardBuffer::create(memory(), c.kv_heads * (list_.stride * 8 + 4), "chosen rows"));
  list_.tiles = tiles_.as<int32_t>();
  list_.count = list_.tiles + c.kv_heads * list_.stride * 2;
  return {};
}

// After rows [begin, end) of a layer were written.
Status CardSession::summarize_rows(int layer, int64_t begin, int64_t end) {
  if (!selects(layer)) return {};
  const card::CardSummaries& s = choice_[size_t(layer)];
  return card::summarize(kv_[size_t(layer)], s, begin / s.block, end / s.block - begin / s.block, stream_.get());
}

// The whole step as one graph: what changes between steps (embedding, position) lies in pinned memory.
Status CardSession::capture_step() {
  const ModelConfig& c = config();
  cudaStream_t stream = stream_.get();
  const auto work = [&]() -> Status {
    LONGKV_TRY(
        cuda_status(cudaMemcpyAsync(graph_->hidden(), host_.hidden, size_t(c.dim) * 4, cudaMemcpyHostToDevice, stream),
                    "embedding"));
    LONGKV_TRY(cuda_status(
        cudaMemcpyAsync(graph_->position(), host_.position, sizeof(int64_t), cudaMemcpyHostToDevice, stream),
        "position"));
    LONGKV_TRY(graph_->begin_token(stream));
    for (int layer = 0; layer < c.layers; ++layer) {
      const card::CardKv& kv = kv_[size_t(layer)];
      LONGKV_TRY(graph_->qkv_token(layer, kv, stream));
      if (selects(layer)) {
        const card::CardSummaries& s = choice_[size_t(layer)];
        LONGKV_TRY(card::summarize_last(kv, s, graph_->position(), stream));
        LONGKV_TRY(card::score_blocks(graph_->query(), c.heads, kv, s, rules_, graph_->position(), scores_.as<float>(),
                                      stream));
        LONGKV_TRY(card::choose_blocks(scores_.as<float>(), c.kv_heads, s, rules_, graph_->position(),
                                       tiles_.as<int32_t>(), const_cast<int32_t*>(list_.count), list_.stride, stream));
      }
      LONGKV_TRY(graph_->attend_token(layer, kv, selects(layer) ? list_ : card::TileList{}, stream));
      LONGKV_TRY(graph_->finish_token(layer, stream));
    }
    LONGKV_TRY(graph_->output(graph_->hidden(), stream));
    return cuda_status(
        cudaMemcpyAsync(host_.logits, graph_->logits(), size_t(c.vocab) * 4, cudaMemcpyDeviceToHost, stream), "logits");
  };
  LONGKV_TRY(cuda_status(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "recording a step"));
  const Status recorded = work();
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
  LONGKV_TRY(recorded);
  LONGKV_TRY(cuda_status(ended, "recording a step"));
  const cudaError_t made = cudaGraphInstantiate(&step_, graph, 0);
  (void)cudaGraphDestroy(graph);
  return cuda_status(made, "recording a step");
}

Status CardSession::decode(int32_t id, std::span<float> logits) {
  if (step_ == nullptr) LONGKV_TRY(capture_step());
  embed({&id, 1}, host_.hidden);
  *host_.position = tokens_;
  LONGKV_TRY(cuda_status(cudaGraphLaunch(step_, stream_.get()), "decoding a token"));
  LONGKV_TRY(stream_.wait("decoding a token"));
  std::memcpy(logits.data(), host_.logits, logits.size() * sizeof(float));
  ++tokens_;
  count_step();
  return {};
}

void CardSession::count_step() {
  const ModelConfig& c = config();
  ++stats_.steps;
  for (int l = 0; l < c.layers; ++l) {
    const int64_t window = c.window.empty() ? 0 : c.window[size_t(l)];
    int64_t rows = window > 0 ? std::min(tokens_, window) : tokens_;
    if (selects(l) && rows > rules_.budget) {
      const card::CardSummaries& s = choice_[size_t(l)];
      rows = rules_.budget;
      stats_.index_bytes += card::summary_bytes(s.kind, c.kv_heads, c.head_dim_k, tokens_ / s.block);
      ++stats_.selections;
    }
    stats_.rows_attended += rows * c.kv_heads;
    stats_.kv_bytes += card::card_kv_bytes(type_, c.kv_heads, c.head_dim_k, rows);
  }
}

Status CardSession::fill_random(int64_t n, uint64_t seed) {
  for (size_t l = 0; l < kv_.size(); ++l) {
    LONGKV_TRY(card::fill_rows(kv_[l], n, seed * 8191 + l, stream_.get()));
    LONGKV_TRY(summarize_rows(int(l), 0, n));
  }
  LONGKV_TRY(stream_.wait("random rows"));
  tokens_ = n;
  return {};
}

}  // namespace

Result<std::unique_ptr<DeviceRunner>> make_card_session(std::shared_ptr<CardModel> model,
                                                        const CardSessionOptions& options, ThreadPool& pool) {
  if (options.kv != nullptr) return make_card_host_session(std::move(model), options, pool);
  LONGKV_TRY(card_supports(model->model(), options.recipe));
  auto session = std::make_unique<CardSession>(std::move(model), options, pool);
  LONGKV_TRY(session->allocate());
  return std::unique_ptr<DeviceRunner>(std::move(session));
}

}  // namespace longkv

#else

namespace longkv {

Status card_supports(const LoadedModel&, const Recipe&) { return cuda_cards().status(); }
Status card_supports_host_kv(const LoadedModel&, const Recipe&) { return cuda_cards().status(); }
Result<std::unique_ptr<DeviceRunner>> make_card_session(std::shared_ptr<CardModel>, const CardSessionOptions&,
                                                        ThreadPool&) {
  return cuda_cards().status();
}

}  // namespace longkv

#endif
