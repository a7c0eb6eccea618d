#ifdef LONGKV_WITH_CUDA

#include "cuda/card_kept_session.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "base/checked.h"
#include "base/error.h"
#include "base/float16.h"
#include "cuda/card_index.h"
#include "cuda/card_runner.h"
#include "cuda/prompt_landing.h"
#include "kv/codec/codec.h"

namespace longkv {

namespace {

constexpr int64_t kRoom = 2048;       // rows of decoded tokens that fit beside those of prompts until all move
constexpr int64_t kPieceRows = 1024;  // rows of a layer that are brought to the card at a time

// The cache in memory takes in the rows of prompts, evicts and merges. What it then holds comes to the card, with the
// rows' biases, and tokens are decoded there over it and over their own rows; those go to the cache in memory before
// the next prompt. Prompts are read by the card where the keep stage leaves their reading alone and heads of a layer
// hold as many rows; else by the CPU (reads_prompts()).
//
// Rows of a head lie side by side whatever their positions. Heads that hold fewer rows than others of their layer are
// filled up with rows whose bias is minus infinity.
class CardKeptSession final : public CardRunner {
 public:
  CardKeptSession(std::shared_ptr<CardModel> model, const CardSessionOptions& o, ThreadPool& pool)
      : CardRunner(std::move(model), o, pool), kv_(*o.kept), type_(o.recipe.store.k) {}
  ~CardKeptSession() override {
    (void)cudaStreamSynchronize(stream_.get());
    forget_step();
  }

  Status allocate();
  bool reads_prompts() const override;
  Status settle() override;
  Status decode(int32_t id, std::span<float> logits) override;
  int64_t tokens() const override { return kv_.tokens().v + decoded_; }
  Status truncate(int64_t n) override;
  Status fill_random(int64_t n, uint64_t seed) override {
    LONGKV_TRY(kv_.fill_random(n, seed));
    stale_ = true;
    return {};
  }
  const KvStats& stats() const override { return stats_; }
  void reset_stats() override { stats_ = KvStats{}; }
  int64_t kv_bytes() const override {
    const ModelConfig& c = config();
    return kv_.cache().bytes_used() + c.layers * card::card_kv_bytes(type_, c.kv_heads, c.head_dim_k, decoded_);
  }

 private:
  // Of a prompt that the card reads.
  Status begin_layer(int layer, int64_t start) override {
    return landing_->begin_layer(layer, start, work_, stream_.get());
  }
  Status chunk_layer(int layer, float* hidden, int64_t first, int64_t n, int64_t end) override {
    return landing_->chunk_layer(*graph_, layer, work_, hidden, first, n, end, stream_.get());
  }
  Status end_layer(int layer, int64_t, int64_t, bool last) override { return landing_->end_layer(layer, last); }
  Status commit(int64_t) override {
    stale_ = true;
    return {};
  }
  Status abandon(int64_t held) override {
    stale_ = true;
    return landing_->abandon(held, stream_.get());
  }

  bool selects(int layer) const { return index_ && index_->selects(layer); }
  const int64_t* row_at(int layer) const { return positions_.as<int64_t>() + layer; }
  void forget_step() {
    if (step_ != nullptr) (void)cudaGraphExecDestroy(step_);
    step_ = nullptr;
  }
  Status load();
  Status place_rows(const std::vector<bool>& biased);
  Status load_rows(int layer);
  Status load_bias(int layer);
  Status bring_back();
  Status record_step();
  void count_step();

  KvSession& kv_;
  const KvType type_;
  CardBuffer work_memory_, kv_memory_, positions_, rows_in_;
  PinnedBuffer staging_, row_positions_;
  card::CardKv work_;  // one layer's rows in f16
  std::unique_ptr<PromptLanding> landing_;
  std::unique_ptr<CardIndex> index_;   // none: every layer attends all
  std::vector<card::CardKv> kv_rows_;  // [layers]
  std::vector<int64_t> rows_;          // [layers], of prompts
  int64_t room_ = 0;                   // for rows of decoded tokens
  int64_t decoded_ = 0;                // tokens whose rows are on the card alone
  int64_t steps_ = 0;
  bool stale_ = true;  // the cache in memory holds other rows than the card
  cudaGraphExec_t step_ = nullptr;
  KvStats stats_;
};

Status CardKeptSession::allocate() {
  const ModelConfig& c = config();
  if (host_layers() > 0) {
    return fail(Code::kUnsupported,
                "the recipe {} drops or merges rows; a card decodes it with all layers there: -ngl all, or -ngl 0",
                options_.recipe.canonical());
  }
  LONGKV_TRY(open());
  const int64_t capacity = round_up(options_.context, 16);
  if (!options_.recipe.select.all) {
    LONGKV_ASSIGN(index_, CardIndex::create(memory(), c, options_.recipe, capacity, 0));
  }
  LONGKV_ASSIGN(work_memory_,
                CardBuffer::create(memory(), card::card_kv_bytes(KvType::kF16, c.kv_heads, c.head_dim_k, capacity),
                                   fmt::format("one layer's rows of {} tokens", options_.context)));
  work_ = card::place_kv(KvType::kF16, c.kv_heads, c.head_dim_k, capacity, work_memory_.data());
  LONGKV_TRY(allocate_scratch());
  LONGKV_ASSIGN(landing_, PromptLanding::create(c, kv_, chunk_, pool_));
  const int64_t width = 2 * int64_t(c.kv_heads) * c.head_dim_k;
  LONGKV_ASSIGN(positions_, CardBuffer::create(memory(), (c.layers + 1) * 8, "places of a token's rows"));
  LONGKV_ASSIGN(row_positions_, PinnedBuffer::create((c.layers + 1) * 8, "places of a token's rows"));
  LONGKV_ASSIGN(rows_in_, CardBuffer::create(memory(), kPieceRows * width * 4, "rows on their way to the card"));
  LONGKV_ASSIGN(staging_, PinnedBuffer::create(kPieceRows * width * 4, "rows on their way to the card"));
  kv_rows_.resize(size_t(c.layers));
  rows_.assign(size_t(c.layers), 0);
  return {};
}

// Memory for the rows held and as many as room_ of each layer.
Status CardKeptSession::place_rows(const std::vector<bool>& biased) {
  const ModelConfig& c = config();
  const auto capacity = [&](int l) { return round_up(rows_[size_t(l)] + room_, 16); };
  const auto row_bytes = [&](int l) {
    return round_up(card::card_kv_bytes(type_, c.kv_heads, c.head_dim_k, capacity(l)), 256);
  };
  const auto bias_bytes = [&](int l) { return biased[size_t(l)] ? round_up(c.kv_heads * capacity(l) * 4, 256) : 0; };
  int64_t bytes = 0;
  for (int l = 0; l < c.layers; ++l) bytes += row_bytes(l) + bias_bytes(l);
  if (kv_memory_.bytes() < bytes) {
    kv_memory_.reset();
    LONGKV_ASSIGN(kv_memory_,
                  CardBuffer::create(memory(), bytes, fmt::format("the KV rows kept of {} tokens", kv_.tokens().v)));
  }
  uint8_t* at = kv_memory_.data();
  for (int l = 0; l < c.layers; ++l) {
    card::CardKv& kv = kv_rows_[size_t(l)];
    kv = card::place_kv(type_, c.kv_heads, c.head_dim_k, capacity(l), at);
    at += row_bytes(l);
    if (biased[size_t(l)]) kv.bias = reinterpret_cast<float*>(at);
    at += bias_bytes(l);
  }
  return {};
}

// What the cache in memory holds, to the card.
Status CardKeptSession::load() {
  const ModelConfig& c = config();
  LONGKV_TRY(stream_.wait("rows of the cache"));
  forget_step();
  room_ = std::clamp<int64_t>(options_.context - kv_.tokens().v, 1, kRoom);
  std::vector<bool> biased(size_t(c.layers), false);
  for (int l = 0; l < c.layers; ++l) {
    const KvHeadView first = kv_.cache().view(l, 0);
    int64_t most = 0;
    for (int h = 0; h < c.kv_heads; ++h) {
      const KvHeadView view = kv_.cache().view(l, h);
      most = std::max(most, view.rows - view.first_row);
      if (view.bias != nullptr || view.rows != first.rows) biased[size_t(l)] = true;
    }
    rows_[size_t(l)] = most;
  }
  LONGKV_TRY(place_rows(biased));
  for (int l = 0; l < c.layers; ++l) {
    LONGKV_TRY(load_rows(l));
    if (biased[size_t(l)]) LONGKV_TRY(load_bias(l));
    if (selects(l)) LONGKV_TRY(index_->update(l, kv_rows_[size_t(l)], 0, rows_[size_t(l)], stream_.get()));
  }
  LONGKV_TRY(stream_.wait("rows of the cache"));
  stale_ = false;
  return {};
}

Status CardKeptSession::load_rows(int layer) {
  const ModelConfig& c = config();
  const int64_t dim = c.head_dim_k, width = 2 * c.kv_heads * dim, rows = rows_[size_t(layer)];
  cudaStream_t stream = stream_.get();
  int64_t* first = row_positions_.as<int64_t>() + c.layers;
  card::AppendArgs a;  // keys and values alone, turned already
  a.qkv = rows_in_.as<float>();
  a.first = positions_.as<int64_t>() + c.layers;
  a.kv = kv_rows_[size_t(layer)];
  for (int64_t begin = 0; begin < rows; begin += kPieceRows) {
    a.n = std::min(kPieceRows, rows - begin);
    LONGKV_TRY(stream_.wait("rows of the cache"));  // the staging buffer is free again
    pool_.run(2 * c.kv_heads, [&](int64_t task, int) {
      const KvHeadView view = kv_.cache().view(layer, int(task) % c.kv_heads);
      const int64_t from = view.first_row + begin, n = std::clamp<int64_t>(view.rows - from, 0, a.n);
      std::vector<float> values(size_t(a.n * dim));  // zeros where a head has no row
      if (n > 0) {
        task < c.kv_heads ? decode_k_rows(view, from, from + n, values.data())
                          : decode_v_rows(view, from, from + n, values.data());
      }
      for (int64_t r = 0; r < a.n; ++r) {
        std::memcpy(staging_.as<float>() + r * width + task * dim, values.data() + r * dim, size_t(dim) * 4);
      }
    });
    *first = begin;
    LONGKV_TRY(cuda_status(
        cudaMemcpyAsync(a.qkv, staging_.as<void>(), size_t(a.n * width) * 4, cudaMemcpyHostToDevice, stream),
        "rows of the cache"));
    LONGKV_TRY(cuda_status(
        cudaMemcpyAsync(positions_.as<int64_t>() + c.layers, first, sizeof(int64_t), cudaMemcpyHostToDevice, stream),
        "rows of the cache"));
    LONGKV_TRY(card::append_rows(a, stream));
  }
  return {};
}

Status CardKeptSession::load_bias(int layer) {
  const ModelConfig& c = config();
  const card::CardKv& kv = kv_rows_[size_t(layer)];
  std::vector<float> bias(size_t(c.kv_heads * kv.capacity), 0.0f);
  for (int h = 0; h < c.kv_heads; ++h) {
    const KvHeadView view = kv_.cache().view(layer, h);
    float* to = bias.data() + h * kv.capacity;
    const int64_t n = view.rows - view.first_row;
    if (view.bias != nullptr) std::copy_n(view.bias + view.first_row, n, to);
    std::fill(to + n, to + rows_[size_t(layer)], -std::numeric_limits<float>::infinity());
  }
  LONGKV_TRY(stream_.wait("rows of the cache"));
  return cuda_status(
      cudaMemcpy(const_cast<float*>(kv.bias), bias.data(), bias.size() * sizeof(float), cudaMemcpyHostToDevice),
      "biases of the cache's rows");
}

bool CardKeptSession::reads_prompts() const {
  if (kv_.changes_prompt()) return false;
  for (int l = 0; l < config().layers; ++l) {
    for (int h = 0; h < config().kv_heads; ++h) {
      const KvHeadView view = kv_.cache().view(l, h);
      if (view.bias != nullptr || view.rows != kv_.cache().view(l, 0).rows) return false;
    }
  }
  return true;
}

Status CardKeptSession::settle() {
  if (decoded_ == 0) return {};
  const TokenCount held = kv_.tokens();
  if (const Status brought = bring_back(); !brought.ok()) {
    (void)kv_.truncate(held);  // of layers that have the rows already
    return brought;
  }
  decoded_ = 0;
  stale_ = true;
  return {};
}

// Rows of decoded tokens, to the cache in memory.
Status CardKeptSession::bring_back() {
  const ModelConfig& c = config();
  const int64_t dim = c.head_dim_k, one = c.kv_heads * dim, n = decoded_;
  cudaStream_t stream = stream_.get();
  std::vector<f16_t> halves(size_t(n * one));  // [kv_heads][n][dim]
  std::vector<float> values[2] = {std::vector<float>(size_t(n * one)), std::vector<float>(size_t(n * one))};
  for (int l = 0; l < c.layers; ++l) {
    const int64_t from = rows_[size_t(l)];
    LONGKV_TRY(card::decode_rows(kv_rows_[size_t(l)], from, n, work_, stream));
    LONGKV_TRY(stream_.wait("rows of decoded tokens"));
    for (int side = 0; side < 2; ++side) {
      const uint8_t* rows = (side == 0 ? work_.k : work_.v) + from * dim * 2;
      LONGKV_TRY(cuda_status(cudaMemcpy2D(halves.data(), size_t(n * dim) * 2, rows, size_t(work_.capacity * dim) * 2,
                                          size_t(n * dim) * 2, size_t(c.kv_heads), cudaMemcpyDeviceToHost),
                             "rows of decoded tokens"));
      for (int64_t h = 0; h < c.kv_heads; ++h) {
        for (int64_t t = 0; t < n; ++t) {
          for (int64_t i = 0; i < dim; ++i)
            values[side][size_t((t * c.kv_heads + h) * dim + i)] = to_float(halves[size_t((h * n + t) * dim + i)]);
        }
      }
    }
    LONGKV_TRY(kv_.append_decoded(l, values[0].data(), values[1].data(), n));
  }
  return {};
}

Status CardKeptSession::truncate(int64_t n) {
  const int64_t held = kv_.tokens().v;
  if (n < held) {
    LONGKV_TRY(kv_.truncate(TokenCount{n}));
    stale_ = true;
  }
  decoded_ = std::max<int64_t>(0, n - held);
  return {};
}

Status CardKeptSession::record_step() {
  const ModelConfig& c = config();
  cudaStream_t stream = stream_.get();
  const auto copy = [&](void* to, const void* from, size_t bytes, const char* what) {
    return cuda_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream), what);
  };
  LONGKV_TRY(copy(graph_->hidden(), host_.hidden, size_t(c.dim) * 4, "embedding"));
  LONGKV_TRY(copy(graph_->position(), host_.position, 2 * sizeof(int64_t), "position"));
  LONGKV_TRY(copy(positions_.as<void>(), row_positions_.as<void>(), size_t(c.layers) * 8, "places of a token's rows"));
  LONGKV_TRY(graph_->begin_token(stream));
  for (int l = 0; l < c.layers; ++l) {
    const card::CardKv& kv = kv_rows_[size_t(l)];
    LONGKV_TRY(graph_->qkv_token(l, kv, stream, {}, nullptr, row_at(l)));
    card::TileList list;
    if (selects(l)) {
      LONGKV_ASSIGN(list, index_->choose(l, CardChoiceStep(), graph_->query(), kv, {}, row_at(l), stream));
    }
    LONGKV_TRY(graph_->attend_token(l, kv, list, stream, row_at(l)));
    LONGKV_TRY(graph_->finish_token(l, stream));
  }
  LONGKV_TRY(graph_->output(graph_->hidden(), stream));
  return cuda_status(
      cudaMemcpyAsync(host_.logits, graph_->logits(), size_t(c.vocab) * 4, cudaMemcpyDeviceToHost, stream), "logits");
}

Status CardKeptSession::decode(int32_t id, std::span<float> logits) {
  const ModelConfig& c = config();
  if (!stale_ && decoded_ == room_) LONGKV_TRY(settle());
  if (stale_) LONGKV_TRY(load());
  if (step_ == nullptr) {
    LONGKV_ASSIGN(step_, capture([&] { return record_step(); }));
  }
  embed({&id, 1}, host_.hidden);
  host_.position[0] = tokens();
  host_.position[1] = steps_++;
  for (int l = 0; l < c.layers; ++l) row_positions_.as<int64_t>()[l] = rows_[size_t(l)] + decoded_;
  LONGKV_TRY(cuda_status(cudaGraphLaunch(step_, stream_.get()), "decoding a token"));
  LONGKV_TRY(stream_.wait("decoding a token"));
  std::memcpy(logits.data(), host_.logits, logits.size() * sizeof(float));
  ++decoded_;
  count_step();
  return {};
}

void CardKeptSession::count_step() {
  const ModelConfig& c = config();
  ++stats_.steps;
  for (int l = 0; l < c.layers; ++l) {
    const int64_t window = c.window.empty() ? 0 : c.window[size_t(l)], held = rows_[size_t(l)] + decoded_;
    int64_t rows = window > 0 ? std::min(held, window) : held;
    if (selects(l) && rows > index_->rules().budget) {
      rows = index_->rows_attended(held);
      stats_.index_bytes += index_->scan_bytes(held);
      ++stats_.selections;
    }
    stats_.rows_attended += rows * c.kv_heads;
    stats_.kv_bytes += card::card_kv_bytes(type_, c.kv_heads, c.head_dim_k, rows);
  }
}

}  // namespace

Result<std::unique_ptr<DeviceRunner>> make_card_kept_session(std::shared_ptr<CardModel> model,
                                                             const CardSessionOptions& options, ThreadPool& pool) {
  LONGKV_TRY(card_supports(model->model(), options.recipe));
  auto session = std::make_unique<CardKeptSession>(std::move(model), options, pool);
  LONGKV_TRY(session->allocate());
  return std::unique_ptr<DeviceRunner>(std::move(session));
}

}  // namespace longkv

#endif
