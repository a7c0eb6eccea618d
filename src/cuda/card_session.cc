#include "cuda/card_session.h"

#include "base/error.h"

#ifdef LONGKV_WITH_CUDA

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/checked.h"
#include "base/log.h"
#include "cuda/card_host_session.h"
#include "cuda/card_index.h"
#include "cuda/card_kept_session.h"
#include "cuda/card_old.h"
#include "cuda/card_runner.h"
#include "cuda/hybrid_rows.h"
#include "cuda/prompt_landing.h"
#include "kv/store_spec.h"

namespace longkv {

namespace {

// The cache under recipes that the card decodes itself; a decoded token is one recorded graph. Rows lie on the card,
// or, of layers that choose blocks, in memory (HybridRows). Layers whose weights lie in memory have their cache there
// too, under the same recipe, and the CPU decodes them first.
class CardSession final : public CardRunner {
 public:
  CardSession(std::shared_ptr<CardModel> model, const CardSessionOptions& o, ThreadPool& pool)
      : CardRunner(std::move(model), o, pool), type_(store_regions(o.recipe.store, o.recipe.mask).raw.k) {}
  ~CardSession() override {
    (void)cudaStreamSynchronize(stream_.get());
    for (cudaGraphExec_t g : graphs_)
      if (g != nullptr) (void)cudaGraphExecDestroy(g);
  }

  Status allocate();
  Status decode(int32_t id, std::span<float> logits) override;
  int64_t tokens() const override { return tokens_; }
  Status truncate(int64_t n) override {
    if (host_kv_ != nullptr) LONGKV_TRY(host_kv_->truncate(TokenCount{n}));  // may refuse
    if (old_) LONGKV_TRY(old_->truncate(n, stream_.get()));
    tokens_ = n;
    return {};
  }
  Status fill_random(int64_t n, uint64_t seed) override;
  const KvStats& stats() const override;
  void reset_stats() override;
  int64_t kv_bytes() const override {
    const ModelConfig& c = config();
    const auto whole = std::count_if(kv_.begin(), kv_.end(), [](const card::CardKv& kv) { return kv.k != nullptr; });
    const int64_t layers = hybrid_ ? c.layers - host_layers() : whole;
    return layers * card::card_kv_bytes(type_, c.kv_heads, c.head_dim_k, tokens_) + (old_ ? old_->bytes(tokens_) : 0) +
           (host_kv_ != nullptr ? host_kv_->cache().bytes_used() : 0);
  }

 private:
  bool on_host(int layer) const { return layer < host_layers(); }
  bool in_memory(int layer) const { return hybrid_ && hybrid_->holds(layer); }
  bool encodes(int layer) const { return old_ && old_->holds(layer); }
  Status begin_layer(int layer, int64_t start) override;
  Status chunk_layer(int layer, float* hidden, int64_t first, int64_t n, int64_t end) override;
  Status end_layer(int layer, int64_t start, int64_t n, bool last) override;
  Status commit(int64_t n) override {
    tokens_ += n;
    if (old_) old_->count(tokens_);
    return finish_rows();
  }
  Status abandon(int64_t held) override;
  Status finish_rows() { return hybrid_ ? hybrid_->finish(stream_.get()) : Status(); }

  Status allocate_rows(int64_t capacity, const std::vector<bool>& hybrid);
  Status allocate_blocks(const std::vector<bool>& hybrid);
  Status allocate_hybrid(const HybridRows::Shape& shape);
  bool selects(int layer) const { return index_ && index_->selects(layer); }
  // After rows [begin, end) of a layer were written.
  Status index_rows(int layer, int64_t begin, int64_t end) {
    if (!selects(layer)) return {};
    return index_->update(layer, in_memory(layer) || encodes(layer) ? work_ : kv_[size_t(layer)], begin, end,
                          stream_.get());
  }
  Status record_layer(int layer, const CardChoiceStep& step);
  Status record_step(const CardChoiceStep& step);
  // The recorded step of a token that sees so many, itself included.
  Result<cudaGraphExec_t> step_of(int64_t tokens);
  Status run_step(cudaGraphExec_t step);
  void count_step();

  KvType type_;
  CardBuffer kv_memory_, work_memory_;
  std::vector<card::CardKv> kv_;      // [layers]
  card::CardKv work_;                 // rows of the present layer in f16, where they are not attended in place
  std::unique_ptr<CardOldRows> old_;  // of layers whose older rows are encoded
  std::unique_ptr<HybridRows> hybrid_;
  std::unique_ptr<CardIndex> index_;                     // none: every layer attends all
  std::unique_ptr<PromptLanding> landing_;               // of layers in memory
  cudaGraphExec_t graphs_[CardChoiceStep::kKinds] = {};  // of a step
  int64_t tokens_ = 0, steps_ = 0;
  KvStats stats_;        // of layers on the card
  mutable KvStats all_;  // of all
  PinnedBuffer totals_;  // of HybridRows, after the last step
  unsigned long long seen_[2] = {};
};

Status CardSession::allocate() {
  LONGKV_TRY(open());
  const ModelConfig& c = config();
  const int64_t capacity = round_up(options_.context, 16);
  if (!options_.recipe.select.all) {
    LONGKV_ASSIGN(index_, CardIndex::create(memory(), c, options_.recipe, capacity, host_layers()));
    if (index_->by_mass()) {
      LONGKV_ASSIGN(totals_, PinnedBuffer::create(16, "counters"));
    }
  }
  std::vector<bool> hybrid(size_t(c.layers), false);
  for (int l = 0; l < c.layers; ++l) hybrid[size_t(l)] = options_.hybrid && selects(l);
  LONGKV_TRY(allocate_rows(capacity, hybrid));
  LONGKV_TRY(options_.hybrid ? allocate_blocks(hybrid) : allocate_scratch());
  if (old_) LONGKV_TRY(old_->place_end(graph_->position() + 2));
  if (host_layers() == 0) return {};
  LONGKV_ASSIGN(landing_, PromptLanding::create(c, *host_kv_, chunk_, pool_));
  return {};
}

Status CardSession::allocate_blocks(const std::vector<bool>& hybrid) {
  const ModelConfig& c = config();
  HybridRows::Shape shape{type_, c.kv_heads, c.head_dim_k, int(options_.recipe.index.block), options_.context,
                          0,     0,          hybrid};
  shape.list_blocks = index_->list_tiles() * 16 / shape.block + 1;
  return allocate_hybrid(shape);
}

// Rows that stay on the card.
Status CardSession::allocate_rows(int64_t capacity, const std::vector<bool>& hybrid) {
  const ModelConfig& c = config();
  const int64_t per_layer = card::card_kv_bytes(type_, c.kv_heads, c.head_dim_k, capacity);
  if (store_regions(options_.recipe.store, options_.recipe.mask).on) {
    LONGKV_ASSIGN(old_, CardOldRows::create(memory(), c, options_.recipe, capacity, host_layers()));
  }
  int64_t here = 0;
  for (int l = host_layers(); l < c.layers; ++l) here += !hybrid[size_t(l)] && !encodes(l);
  LONGKV_ASSIGN(kv_memory_, CardBuffer::create(
                                memory(), std::max<int64_t>(16, here * per_layer),
                                options_.hybrid ? fmt::format("the KV rows of {} layers that attend all of {} tokens",
                                                              here, options_.context)
                                                : fmt::format("the KV cache of {} tokens", options_.context)));
  int64_t next = 0;
  for (int l = 0; l < c.layers; ++l) {
    kv_.push_back(card::CardKv{type_, c.kv_heads, c.head_dim_k});
    if (hybrid[size_t(l)] || on_host(l) || encodes(l)) continue;
    kv_.back() = card::place_kv(type_, c.kv_heads, c.head_dim_k, capacity, kv_memory_.data() + next++ * per_layer);
  }
  if ((card::attended_in_place(type_) && host_layers() == 0 && !old_) || options_.hybrid) return {};
  LONGKV_ASSIGN(work_memory_,
                CardBuffer::create(memory(), card::card_kv_bytes(KvType::kF16, c.kv_heads, c.head_dim_k, capacity),
                                   "one layer's rows in f16"));
  work_ = card::place_kv(KvType::kF16, c.kv_heads, c.head_dim_k, capacity, work_memory_.data());
  return {};
}

Status CardSession::allocate_hybrid(const HybridRows::Shape& wanted) {
  HybridRows::Shape shape = wanted;
  const ModelConfig& c = config();
  // The least that does: the smallest chunk of a prompt, one layer's rows or a step's blocks.
  shape.chunk = 64;
  const int64_t before = memory().used();
  const int64_t least = before + CardGraph::fixed_bytes(*model_, options_.context) + CardGraph::chunk_bytes(c, 64) +
                        sparse_bytes(64) + 64 * c.dim * 4 + shape.fixed_bytes() + shape.least_bytes() +
                        (int64_t(1) << 20);
  const auto make = [&]() -> Status {
    if (memory().cap() > 0 && memory().cap() < least)
      return fail(Code::kOutOfMemory, "{} MiB of VRAM are too few", memory().cap() >> 20);
    LONGKV_TRY(allocate_scratch(shape.fixed_bytes() + shape.least_bytes()));
    shape.chunk = chunk_;
    LONGKV_ASSIGN(hybrid_, HybridRows::create(memory(), shape, pool_));
    return {};
  };
  if (const Status made = make(); !made.ok()) {
    if (made.code() != Code::kOutOfMemory) return made;
    return fail(Code::kOutOfMemory, "{}; the smallest --vram for {} tokens under this recipe is {}M", made.message(),
                options_.context, ceil_div(least, int64_t(1) << 20));
  }
  work_ = hybrid_->work();
  LONGKV_ASSIGN(totals_, PinnedBuffer::create(16, "counters"));
  log_verbose("rows of {} layers in memory ({} MiB), {} of {} blocks of each KV head on the card ({} MiB)",
              shape.count(), shape.host_bytes() >> 20, hybrid_->slots(), shape.blocks(), hybrid_->hot_bytes() >> 20);
  return {};
}

Status CardSession::begin_layer(int layer, int64_t start) {
  const bool decoded =
      in_memory(layer) || on_host(layer) || encodes(layer) || !card::attended_in_place(type_);  // prompts attend work_
  if (on_host(layer)) {
    LONGKV_TRY(landing_->begin_layer(layer, start, work_, stream_.get()));
  } else if (in_memory(layer)) {
    LONGKV_TRY(hybrid_->begin_layer(layer, start, stream_.get()));
  } else if (encodes(layer)) {
    LONGKV_TRY(old_->read(layer, start, work_, stream_.get()));
  } else if (decoded && start > 0) {
    LONGKV_TRY(card::decode_rows(kv_[size_t(layer)], 0, start, work_, stream_.get()));
  }
  return graph_->begin_rows(layer, decoded ? work_ : kv_[size_t(layer)], start, stream_.get());
}

Status CardSession::chunk_layer(int layer, float* hidden, int64_t first, int64_t n, int64_t end) {
  if (on_host(layer)) return landing_->chunk_layer(*graph_, layer, work_, hidden, first, n, end, stream_.get());
  if (encodes(layer)) return graph_->prefill_layer(layer, work_, nullptr, hidden, first, n, end, stream_.get());
  if (!in_memory(layer)) {
    return graph_->prefill_layer(layer, kv_[size_t(layer)], card::attended_in_place(type_) ? nullptr : &work_, hidden,
                                 first, n, end, stream_.get());
  }
  LONGKV_ASSIGN(const card::CardKv stage, hybrid_->stage(first, stream_.get()));
  LONGKV_TRY(graph_->prefill_layer(layer, stage, &work_, hidden, first, n, end, stream_.get()));
  return hybrid_->spill(layer, first, n, stream_.get());
}

Status CardSession::end_layer(int layer, int64_t start, int64_t n, bool last) {
  if (on_host(layer)) return landing_->end_layer(layer, last);
  if (encodes(layer)) {
    if (!last) {
      return fail(Code::kUnsupported,
                  "a prompt attends its own rows as they came, and encoded ones have room for {} tokens of a prompt "
                  "beside the weights: raise --vram or -ub, shorten it, or use a store without kivi and masks",
                  n);
    }
    LONGKV_TRY(old_->take(layer, start + n, work_, stream_.get()));
  }
  return index_rows(layer, start, start + n);
}

// Rows past tokens_ are never read.
Status CardSession::abandon(int64_t held) {
  if (landing_) {
    LONGKV_TRY(landing_->abandon(held, stream_.get()));
    tokens_ = host_kv_->tokens().v;  // none where windows have let rows go
  }
  if (old_) LONGKV_TRY(old_->truncate(tokens_, stream_.get()));
  return finish_rows();
}

Status CardSession::record_layer(int layer, const CardChoiceStep& step) {
  cudaStream_t stream = stream_.get();
  const bool far = in_memory(layer);
  card::BlockStore store;
  card::HotBlocks hot;
  if (far) store = hybrid_->store(layer), hot = hybrid_->hot(layer);
  const card::CardKv kv = far ? hot.pool : encodes(layer) ? old_->rows(layer) : kv_[size_t(layer)];
  LONGKV_TRY(graph_->qkv_token(layer, kv, stream, store, hot.slot_of));
  card::TileList list;
  if (selects(layer)) {
    LONGKV_ASSIGN(list, index_->choose(layer, step, graph_->query(), kv, store, graph_->position(), stream));
    list.placed = far;
  }
  if (far) {
    LONGKV_TRY(
        card::place_blocks(store, hot, index_->tiles(), list.count, list.stride, graph_->position() + 1, stream));
    LONGKV_TRY(card::fetch_blocks(store, hot, stream));
  }
  LONGKV_TRY(encodes(layer) ? graph_->attend_token(layer, *old_, list, stream)
                            : graph_->attend_token(layer, kv, list, stream));
  return graph_->finish_token(layer, stream);
}

// The whole step as one graph: what changes between steps (embedding, position) lies in pinned memory.
Status CardSession::record_step(const CardChoiceStep& step) {
  const ModelConfig& c = config();
  cudaStream_t stream = stream_.get();
  LONGKV_TRY(cuda_status(
      cudaMemcpyAsync(graph_->hidden(), host_.hidden, size_t(c.dim) * 4, cudaMemcpyHostToDevice, stream), "embedding"));
  LONGKV_TRY(cuda_status(
      cudaMemcpyAsync(graph_->position(), host_.position, 3 * sizeof(int64_t), cudaMemcpyHostToDevice, stream),
      "position"));
  LONGKV_TRY(graph_->begin_token(stream));
  for (int layer = host_layers(); layer < c.layers; ++layer) LONGKV_TRY(record_layer(layer, step));
  LONGKV_TRY(graph_->output(graph_->hidden(), stream));
  if (old_) LONGKV_TRY(old_->encode_last(graph_->position(), stream));
  if (index_ && index_->by_mass()) {
    LONGKV_TRY(cuda_status(
        cudaMemcpyAsync(totals_.as<void>(), index_->counters(), sizeof(seen_), cudaMemcpyDeviceToHost, stream),
        "counters"));
  }
  if (hybrid_) {
    LONGKV_TRY(cuda_status(
        cudaMemcpyAsync(totals_.as<void>(), hybrid_->totals(), sizeof(seen_), cudaMemcpyDeviceToHost, stream),
        "counters"));
  }
  return cuda_status(
      cudaMemcpyAsync(host_.logits, graph_->logits(), size_t(c.vocab) * 4, cudaMemcpyDeviceToHost, stream), "logits");
}

Status CardSession::decode(int32_t id, std::span<float> logits) {
  LONGKV_ASSIGN(cudaGraphExec_t step, step_of(tokens_ + 1));
  embed({&id, 1}, host_.hidden);
  host_.position[0] = tokens_;
  host_.position[1] = steps_++;
  host_.position[2] = old_ ? old_->end() : 0;
  const Status done = run_step(step);
  if (!done.ok()) {
    if (host_kv_ != nullptr && host_kv_->tokens().v > tokens_) LONGKV_TRY(host_kv_->truncate(TokenCount{tokens_}));
    return done;
  }
  std::memcpy(logits.data(), host_.logits, logits.size() * sizeof(float));
  ++tokens_;
  count_step();
  if (old_) old_->count(tokens_);
  return {};
}

// With it those of the tokens up to the next block's end, so that none of them waits for a recording.
Result<cudaGraphExec_t> CardSession::step_of(int64_t tokens) {
  const auto kind_at = [&](int64_t n) {
    CardChoiceStep step = index_ ? index_->step_at(n) : CardChoiceStep();
    if (hybrid_) step.all = false;  // blocks are fetched by the list
    return step;
  };
  cudaGraphExec_t& wanted = graphs_[kind_at(tokens).kind()];
  if (wanted != nullptr) return wanted;
  for (int64_t n = tokens; n < tokens + (index_ ? index_->block() : 1); ++n) {
    const CardChoiceStep step = kind_at(n);
    cudaGraphExec_t& made = graphs_[step.kind()];
    if (made == nullptr) {
      LONGKV_ASSIGN(made, capture([&] { return record_step(step); }));
    }
  }
  return wanted;
}

Status CardSession::run_step(cudaGraphExec_t step) {
  LONGKV_TRY(decode_host_layers(host_.hidden, tokens_));
  if (hybrid_) LONGKV_TRY(hybrid_->prepare(stream_.get()));
  LONGKV_TRY(cuda_status(cudaGraphLaunch(step, stream_.get()), "decoding a token"));
  return stream_.wait("decoding a token");
}

void CardSession::count_step() {
  const ModelConfig& c = config();
  ++stats_.steps;
  for (int l = host_layers(); l < c.layers; ++l) {
    const int64_t window = c.window.empty() ? 0 : c.window[size_t(l)];
    int64_t rows = window > 0 ? std::min(tokens_, window) : tokens_;
    if (selects(l) && (rows > index_->rules().budget || index_->by_mass())) {
      rows = index_->rows_attended(tokens_);
      stats_.index_bytes += index_->scan_bytes(tokens_);
      ++stats_.selections;
    }
    stats_.rows_attended += rows * c.kv_heads;
    stats_.kv_bytes += encodes(l) ? old_->attended_bytes(l, tokens_, rows)
                                  : card::card_kv_bytes(type_, c.kv_heads, c.head_dim_k, rows);
  }
  if (index_ && index_->by_mass()) {
    const auto* counted = totals_.as<unsigned long long>();
    const int64_t row = 2 * (card::value_bytes(type_, c.head_dim_k) + 2 * card::scale_count(type_, c.head_dim_k));
    stats_.rows_attended += int64_t(counted[0] - seen_[0]);
    stats_.kv_bytes += int64_t(counted[1] - seen_[1]) * 16 * row;
    const int64_t choosing =
        std::count_if(kv_.begin(), kv_.end(), [&](const card::CardKv& kv) { return selects(int(&kv - kv_.data())); });
    stats_.index_bytes += choosing * c.kv_heads * row / 2 *
                          std::min(tokens_, index_->rules().blocks * index_->block());  // keys that were weighed
    std::copy(counted, counted + 2, seen_);
  }
  if (!hybrid_) return;
  const auto* totals = totals_.as<unsigned long long>();
  stats_.blocks_found += int64_t(totals[0] - seen_[0]);
  stats_.blocks_fetched += int64_t(totals[1] - seen_[1]);
  stats_.bus_bytes += int64_t(totals[1] - seen_[1]) * hybrid_->record_bytes();
  std::copy(totals, totals + 2, seen_);
}

void CardSession::reset_stats() {
  stats_ = KvStats{};
  if (host_kv_ != nullptr) host_kv_->reset_stats();
}

const KvStats& CardSession::stats() const {
  if (host_kv_ == nullptr) return stats_;
  const KvStats& host = host_kv_->stats();
  all_ = stats_;
  all_.kv_bytes += host.kv_bytes;
  all_.index_bytes += host.index_bytes;
  all_.rows_attended += host.rows_attended;
  all_.selections += host.selections;
  all_.seconds_select = host.seconds_select;
  all_.seconds_attend = host.seconds_attend;
  return all_;
}

Status CardSession::fill_random(int64_t n, uint64_t seed) {
  cudaStream_t stream = stream_.get();
  if (host_kv_ != nullptr) LONGKV_TRY(host_kv_->fill_random(n, seed));
  if (old_) LONGKV_TRY(old_->truncate(0, stream));
  for (int l = host_layers(); l < config().layers; ++l) {
    const uint64_t own = seed * 8191 + uint64_t(l);
    if (encodes(l)) {
      LONGKV_TRY(card::fill_rows(work_, n, own, stream));
      LONGKV_TRY(old_->take(l, n, work_, stream));
    } else if (!in_memory(l)) {
      LONGKV_TRY(card::fill_rows(kv_[size_t(l)], n, own, stream));
    } else {
      for (int64_t first = 0; first < n; first += chunk_) {
        const int64_t count = std::min(chunk_, n - first);
        LONGKV_ASSIGN(const card::CardKv stage, hybrid_->stage(0, stream));
        LONGKV_TRY(card::fill_rows(stage, count, own + uint64_t(first) * 524287, stream));
        LONGKV_TRY(hybrid_->spill(l, first, count, stream));
      }
      LONGKV_TRY(hybrid_->begin_layer(l, n, stream));
    }
    LONGKV_TRY(index_rows(l, 0, n));
  }
  LONGKV_TRY(finish_rows());
  LONGKV_TRY(stream_.wait("random rows"));
  tokens_ = n;
  if (old_) old_->count(n);
  return {};
}

}  // namespace

Result<std::unique_ptr<DeviceRunner>> make_card_session(std::shared_ptr<CardModel> model,
                                                        const CardSessionOptions& options, ThreadPool& pool) {
  if (options.kv != nullptr) return make_card_host_session(std::move(model), options, pool);
  if (options.kept != nullptr) return make_card_kept_session(std::move(model), options, pool);
  LONGKV_TRY(options.hybrid ? card_supports_hybrid(model->model(), options.recipe)
                            : card_supports(model->model(), options.recipe));
  auto session = std::make_unique<CardSession>(std::move(model), options, pool);
  LONGKV_TRY(session->allocate());
  return std::unique_ptr<DeviceRunner>(std::move(session));
}

}  // namespace longkv

#else

namespace longkv {

Status card_supports_host_kv(const LoadedModel&, const Recipe&) { return cuda_cards().status(); }
// NOLINTNEXTLINE(performance-unnecessary-value-param): kept by the build with a card
Result<std::unique_ptr<DeviceRunner>> make_card_session(std::shared_ptr<CardModel>, const CardSessionOptions&,
                                                        ThreadPool&) {
  return cuda_cards().status();
}

}  // namespace longkv

#endif
