#include "cuda/card_model.h"

#include "base/error.h"

#ifdef LONGKV_WITH_CUDA

#include <algorithm>

#include "cuda/card_model_impl.h"
#include "cuda/upload.h"

namespace longkv {

namespace {

class Loader {
 public:
  explicit Loader(CardModel::Impl& impl) : impl_(impl) {}

  Status open() {
    LONGKV_ASSIGN(upload_, WeightUpload::create(*impl_.memory, impl_.stream.get(), 1));
    return {};
  }

  Status stack(CardStack& s, const std::string& name) {
    LONGKV_ASSIGN(CardBuffer buffer, CardBuffer::create(*impl_.memory, s.bytes(), name));
    s.place(buffer.data());
    impl_.buffers.push_back(std::move(buffer));
    return upload_->stack(s);
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
  CardModel::Impl& impl_;
  std::unique_ptr<WeightUpload> upload_;
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

Status load_layer(Loader& loader, const ModelConfig& c, int i, const LayerWeights& l, bool on_card, CardLayer& out) {
  const std::string name = fmt::format("layer {}", i);
  out.window = c.window.empty() ? 0 : c.window[size_t(i)];
  out.window_rope = out.window > 0 && c.rope_window.has_value();
  LONGKV_ASSIGN(static_cast<CardLayerStacks&>(out), CardLayerStacks::of(l, i));
  if (on_card) {
    LONGKV_TRY(loader.stack(out.qkv, name + ", q k v"));
    LONGKV_TRY(loader.stack(out.o, name + ", attention output"));
    LONGKV_TRY(loader.stack(out.gate_up, name + ", gate and up"));
    LONGKV_TRY(loader.stack(out.down, name + ", down"));
  }
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
  LONGKV_TRY(check_shape(model->config()));
  LONGKV_ASSIGN(CudaCard card, open_card(options.device));
  std::shared_ptr<CardModel> made(new CardModel());
  Impl& m = *made->impl_;
  m.model = std::move(model);
  m.card = std::move(card);
  m.host_layers = std::clamp(options.host_layers, 0, m.model->config().layers);
  m.memory = std::make_unique<CardMemory>(options.vram_cap);
  LONGKV_ASSIGN(m.stream, CardStream::create());
  Loader loader(m);
  LONGKV_TRY(loader.open());
  const ModelWeights& w = m.model->weights();
  m.layers.resize(w.layers.size());
  for (size_t i = 0; i < w.layers.size(); ++i)
    LONGKV_TRY(load_layer(loader, m.model->config(), int(i), w.layers[i], int(i) >= m.host_layers, m.layers[i]));
  LONGKV_ASSIGN(m.output, CardStack::of({&w.output}, "output matrix"));
  LONGKV_TRY(loader.stack(m.output, "output matrix"));
  LONGKV_TRY(loader.vectors({{&w.output_norm, &m.output_norm}}, "output norm"));
  LONGKV_TRY(m.stream.wait("loading weights"));
  return made;
}

const LoadedModel& CardModel::model() const { return *impl_->model; }
const CudaCard& CardModel::device() const { return impl_->card; }
int CardModel::host_layers() const { return impl_->host_layers; }
int64_t CardModel::streamed_bytes() const { return impl_->streamed_bytes; }
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
// NOLINTNEXTLINE(performance-unnecessary-value-param): kept by the build with a card
Result<std::shared_ptr<CardModel>> CardModel::load(std::shared_ptr<const LoadedModel>, const CardOptions&) {
  return cuda_cards().status();
}
const LoadedModel& CardModel::model() const { return *impl_->model; }
const CudaCard& CardModel::device() const { return impl_->card; }
int CardModel::host_layers() const { return 0; }
int64_t CardModel::streamed_bytes() const { return 0; }
int64_t CardModel::vram_used() const { return 0; }
int64_t CardModel::vram_peak() const { return 0; }
int64_t CardModel::vram_cap() const { return 0; }
double CardModel::bandwidth() const { return 0; }

}  // namespace longkv

#endif
