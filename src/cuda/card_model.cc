#include "cuda/card_model.h"

#include "base/error.h"

#ifdef LONGKV_WITH_CUDA

#include <algorithm>
#include <cstring>

#include "cuda/card_model_impl.h"

namespace longkv {

namespace {

// Copies tensors over in pieces of two pinned buffers: while one travels, the next is filled from the mapped file.
class Loader {
 public:
  Loader(CardModel::Impl& impl) : impl_(impl) {}

  Status open() {
    for (int i = 0; i < 2; ++i) {
      LONGKV_ASSIGN(host_[i], PinnedBuffer::create(kPiece, "staging of weights"));
      LONGKV_ASSIGN(raw_[i], CardBuffer::create(*impl_.memory, kPiece, "staging of weights"));
      LONGKV_TRY(cuda_status(cudaEventCreateWithFlags(&done_[i], cudaEventDisableTiming), "creating an event"));
    }
    return {};
  }
  ~Loader() {
    for (cudaEvent_t e : done_) {
      if (e != nullptr) (void)cudaEventDestroy(e);
    }
  }

  Status stack(CardStack& out, std::initializer_list<const Weight*> weights, const std::string& name) {
    out.cols = (*weights.begin())->cols;
    const Weight* previous = nullptr;
    std::vector<int64_t> part_rows;
    for (const Weight* w : weights) {
      if (w->cols % 32 != 0) {
        return fail(Code::kUnsupported, "{} has rows of {} values; the card's products need a multiple of 32", name,
                    w->cols);
      }
      if (previous != nullptr && previous->type == w->type) {
        part_rows.back() += w->rows;
      } else {
        out.parts.push_back(CardMatrix{w->type, 0, w->cols});
        part_rows.push_back(w->rows);
      }
      previous = w;
      out.rows += w->rows;
    }
    auto w = weights.begin();
    for (size_t i = 0; i < out.parts.size(); ++i) {
      CardMatrix& m = out.parts[i];
      m.rows = part_rows[i];
      LONGKV_ASSIGN(CardBuffer buffer,
                    CardBuffer::create(*impl_.memory, card_matrix_bytes(m.type, m.rows, m.cols), name));
      place_planes(m, buffer.data());
      impl_.buffers.push_back(std::move(buffer));
      for (int64_t first = 0; first < m.rows; first += (*w++)->rows) LONGKV_TRY(upload(m, **w, first));
    }
    return {};
  }

  // Vectors of a layer, one after another in one buffer. Empty ones give nullptr.
  Status vectors(std::initializer_list<std::pair<const Vector*, const float**>> list, const std::string& name) {
    int64_t total = 0;
    for (const auto& [v, p] : list) total += int64_t(v->size() + 63) / 64 * 64;
    LONGKV_ASSIGN(CardBuffer buffer, CardBuffer::create(*impl_.memory, total * 4, name));
    float* at = buffer.as<float>();
    for (const auto& [v, p] : list) {
      if (v->empty()) continue;
      LONGKV_TRY(cuda_status(cudaMemcpy(at, v->data(), v->size() * 4, cudaMemcpyHostToDevice), name));
      *p = at;
      at += int64_t(v->size() + 63) / 64 * 64;
    }
    impl_.buffers.push_back(std::move(buffer));
    return {};
  }

 private:
  static constexpr int64_t kPiece = int64_t(32) << 20;

  Status upload(const CardMatrix& m, const Weight& w, int64_t first) {
    const int64_t per_piece = kPiece / w.row_bytes;
    if (per_piece == 0) return fail(Code::kUnsupported, "rows of {} bytes are too long for the card", w.row_bytes);
    for (int64_t r = 0; r < w.rows; r += per_piece) {
      const int64_t n = std::min(per_piece, w.rows - r);
      const int i = next_;
      next_ = 1 - next_;
      LONGKV_TRY(cuda_status(cudaEventSynchronize(done_[i]), "loading weights"));
      std::memcpy(host_[i].as<uint8_t>(), w.row(r), size_t(n * w.row_bytes));
      LONGKV_TRY(cuda_status(cudaMemcpyAsync(raw_[i].data(), host_[i].as<uint8_t>(), size_t(n * w.row_bytes),
                                             cudaMemcpyHostToDevice, impl_.stream.get()),
                             "loading weights"));
      LONGKV_TRY(card::pack_rows(m, raw_[i].data(), w.row_bytes, first + r, n, impl_.stream.get()));
      LONGKV_TRY(cuda_status(cudaEventRecord(done_[i], impl_.stream.get()), "loading weights"));
    }
    return {};
  }

  CardModel::Impl& impl_;
  PinnedBuffer host_[2];
  CardBuffer raw_[2];
  cudaEvent_t done_[2] = {};
  int next_ = 0;
};

Vector joined(std::initializer_list<std::pair<const Vector*, int64_t>> parts) {
  Vector all;
  bool any = false;
  for (const auto& [v, n] : parts) {
    any |= !v->empty();
    all.insert(all.end(), v->begin(), v->end());
    all.resize(all.size() + size_t(n) - v->size());
  }
  return any ? all : Vector();
}

Status check_shape(const ModelConfig& c) {
  if (c.head_dim_k != c.head_dim_v || !card::card_kv_supports(KvType::kF16, c.head_dim_k)) {
    return fail(Code::kUnsupported,
                "heads of {} and {} channels are not computed on the card; it has kernels for 64, 96, 128 and 256",
                c.head_dim_k, c.head_dim_v);
  }
  return {};
}

Status load_layer(Loader& loader, const ModelConfig& c, int i, const LayerWeights& l, CardLayer& out) {
  const std::string name = fmt::format("layer {}", i);
  out.window = c.window.empty() ? 0 : c.window[size_t(i)];
  out.window_rope = out.window > 0 && c.rope_window.has_value();
  LONGKV_TRY(loader.stack(out.qkv, {&l.q, &l.k, &l.v}, name + ", q k v"));
  LONGKV_TRY(loader.stack(out.o, {&l.o}, name + ", attention output"));
  LONGKV_TRY(loader.stack(out.gate_up, {&l.gate, &l.up}, name + ", gate and up"));
  LONGKV_TRY(loader.stack(out.down, {&l.down}, name + ", down"));
  const Vector bias = joined({{&l.q_bias, l.q.rows}, {&l.k_bias, l.k.rows}, {&l.v_bias, l.v.rows}});
  return loader.vectors({{&l.attn_norm, &out.attn_norm},
                         {&bias, &out.qkv_bias},
                         {&l.q_norm, &out.q_norm},
                         {&l.k_norm, &out.k_norm},
                         {&l.o_bias, &out.o_bias},
                         {&l.post_attn_norm, &out.post_attn_norm},
                         {&l.ffn_norm, &out.ffn_norm},
                         {&l.post_ffn_norm, &out.post_ffn_norm}},
                        name + ", norms");
}

}  // namespace

CardModel::CardModel() : impl_(std::make_unique<Impl>()) {}
CardModel::~CardModel() = default;

Result<std::shared_ptr<CardModel>> CardModel::load(std::shared_ptr<const LoadedModel> model,
                                                   const CardOptions& options) {
  LONGKV_ASSIGN(const std::vector<CudaCard> cards, cuda_cards());
  const auto chosen =
      std::find_if(cards.begin(), cards.end(), [&](const CudaCard& c) { return c.index == options.device; });
  if (chosen == cards.end()) return fail(Code::kUnsupported, "there is no usable card {}", options.device);
  LONGKV_TRY(check_shape(model->config()));
  std::shared_ptr<CardModel> made(new CardModel());
  Impl& m = *made->impl_;
  m.model = std::move(model);
  m.card = *chosen;
  LONGKV_TRY(cuda_status(cudaSetDevice(m.card.index), "choosing the card"));
  m.memory = std::make_unique<CardMemory>(options.vram_cap);
  LONGKV_ASSIGN(m.stream, CardStream::create());
  Loader loader(m);
  LONGKV_TRY(loader.open());
  const ModelWeights& w = m.model->weights();
  m.layers.resize(w.layers.size());
  for (size_t i = 0; i < w.layers.size(); ++i)
    LONGKV_TRY(load_layer(loader, m.model->config(), int(i), w.layers[i], m.layers[i]));
  LONGKV_TRY(loader.stack(m.output, {&w.output}, "output matrix"));
  LONGKV_TRY(loader.vectors({{&w.output_norm, &m.output_norm}}, "output norm"));
  LONGKV_TRY(m.stream.wait("loading weights"));
  return made;
}

const LoadedModel& CardModel::model() const { return *impl_->model; }
const CudaCard& CardModel::device() const { return impl_->card; }
int64_t CardModel::vram_used() const { return impl_->memory->used(); }
int64_t CardModel::vram_peak() const { return impl_->memory->peak(); }
int64_t CardModel::vram_cap() const { return impl_->memory->cap(); }
double CardModel::bandwidth() const {
  int khz = 0, bits = 0;
  if (cudaDeviceGetAttribute(&khz, cudaDevAttrMemoryClockRate, impl_->card.index) != cudaSuccess ||
      cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, impl_->card.index) != cudaSuccess) {
    return 0;
  }
  return 2e3 * double(khz) * double(bits) / 8;  // two transfers a clock
}

}  // namespace longkv

#else

namespace longkv {

struct CardModel::Impl {
  std::shared_ptr<const LoadedModel> model;
  CudaCard card;
};

CardModel::CardModel() = default;
CardModel::~CardModel() = default;
Result<std::shared_ptr<CardModel>> CardModel::load(std::shared_ptr<const LoadedModel>, const CardOptions&) {
  return cuda_cards().status();
}
const LoadedModel& CardModel::model() const { return *impl_->model; }
const CudaCard& CardModel::device() const { return impl_->card; }
int64_t CardModel::vram_used() const { return 0; }
int64_t CardModel::vram_peak() const { return 0; }
int64_t CardModel::vram_cap() const { return 0; }
double CardModel::bandwidth() const { return 0; }

}  // namespace longkv

#endif
