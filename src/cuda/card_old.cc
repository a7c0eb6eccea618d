#ifdef LONGKV_WITH_CUDA

#include "cuda/card_old.h"

#include <algorithm>

#include "base/checked.h"
#include "base/error.h"
#include "cuda/card_plan.h"
#include "cuda/kv.h"
#include "kv/region_spec.h"
#include "model/identity.h"

namespace longkv {

Result<std::unique_ptr<CardOldRows>> CardOldRows::create(CardMemory& memory, const ModelConfig& c, const Recipe& recipe,
                                                         int64_t capacity, int first_layer) {
  std::unique_ptr<CardOldRows> self(new CardOldRows());
  CardOldRows& s = *self;
  LONGKV_ASSIGN(std::optional<RegionSpec> spec,
                region_spec(c.kv_shape(), recipe, model_identity(c), c.attn_softcap > 0.0f));
  if (!spec) return fail(Code::kInternal, "{} encodes no rows", recipe.canonical());
  s.spec_ = *std::move(spec);
  s.kv_heads_ = c.kv_heads;
  s.dim_ = c.head_dim_k;
  s.masked_ = !s.spec_.masks.empty();
  s.border_ = card::OldBorder(c.layers, s.spec_.sink, s.spec_.window);
  const auto slot = [&](int l, int h) { return size_t(l) * size_t(c.kv_heads) + size_t(h); };
  const auto active = [&](int l) { return l >= first_layer && (c.window.empty() || c.window[size_t(l)] == 0); };
  for (int l = 0; l < c.layers; ++l) {
    for (int h = 0; h < c.kv_heads; ++h) {
      if (s.masked_ && s.spec_.masks[slot(l, h)].directed()) {
        return fail(Code::kUnsupported,
                    "{}: layer {} holds products of keys with directions, which the card does not have; nearest legal: "
                    "a mask of channels, or --kv-place cpu",
                    recipe.canonical(), l);
      }
      s.kept_.push_back(s.masked_ ? int(s.spec_.masks[slot(l, h)].channels.size()) : c.head_dim_k);
    }
  }
  int64_t bytes = 0;
  for (int l = 0; l < c.layers; ++l) {
    if (!active(l)) continue;
    ++s.count_;
    bytes +=
        round_up(card_old_bytes(c, recipe, capacity, std::span(s.kept_).subspan(slot(l, 0), size_t(c.kv_heads))), 256);
  }
  LONGKV_ASSIGN(s.memory_,
                CardBuffer::create(memory, bytes, fmt::format("the encoded KV cache of {} tokens", capacity)));
  // Channels, factors and means of a head: [dim] of each, sums of two of them first.
  const int64_t per_head = s.masked_ ? round_up(s.dim_ * (2 * 8 + 4 + 4 + 4 + 2), 256) : 0;
  LONGKV_ASSIGN(s.masks_,
                CardBuffer::create(memory, std::max<int64_t>(16, s.count_ * s.kv_heads_ * per_head), "channel masks"));
  LONGKV_TRY(cuda_status(cudaMemset(s.masks_.data(), 0, size_t(s.masks_.bytes())), "channel masks"));
  LONGKV_ASSIGN(s.heads_, CardBuffer::create(memory, s.count_ * s.kv_heads_ * int64_t(sizeof(card::OldHead)),
                                             "places of encoded rows"));
  LONGKV_ASSIGN(s.list_, CardBuffer::create(memory, s.count_ * int64_t(sizeof(card::OldLayer)), "encoded layers"));

  if (s.count_ == 0) {  // every layer here has a window
    s.layers_.resize(size_t(c.layers));
    return self;
  }
  const int64_t steps = card::old_steps(capacity, s.spec_.sink), ring = card::old_ring(s.spec_.window);
  uint8_t *at = s.memory_.data(), *mask_at = s.masks_.data();
  std::vector<card::OldHead> heads;
  for (int l = 0; l < c.layers; ++l) {
    card::OldLayer layer;
    if (active(l)) {
      uint8_t* next = at;
      layer.rows = card::place_kv(KvType::kF16, s.kv_heads_, s.dim_, s.spec_.sink + ring, next);
      layer.rows.fixed = s.spec_.sink, layer.rows.ring = ring;
      next += card::card_kv_bytes(KvType::kF16, s.kv_heads_, s.dim_, s.spec_.sink + ring);
      layer.old = {s.spec_.k,
                   s.kv_heads_,
                   s.dim_,
                   s.spec_.sink,
                   s.spec_.window,
                   nullptr,
                   s.heads_.as<card::OldHead>() + heads.size()};
      for (int h = 0; h < s.kv_heads_; ++h) {
        card::OldHead head;
        head.channels = s.kept_[slot(l, h)];
        head.kept = card::old_kept(head.channels);
        if (head.kept > 0) {
          head.k = next;
          head.v = head.k + steps * card::old_step_bytes(s.spec_.k, head.kept);
          next = head.v + steps * card::old_step_bytes(s.spec_.k, s.dim_);
        }
        if (s.masked_) {
          const HeadMask& mask = s.spec_.masks[slot(l, h)];
          auto* sums = reinterpret_cast<double*>(mask_at);
          auto* mean_k = reinterpret_cast<float*>(sums + 2 * s.dim_);
          float *mean_v = mean_k + s.dim_, *alpha = mean_v + s.dim_;
          auto* channel = reinterpret_cast<uint16_t*>(alpha + s.dim_);
          const bool gone = head.kept == 0;
          if (gone ? mask.removed == RemovedAs::kMean : s.spec_.compensate) head.mean_k = mean_k;
          if (gone && mask.removed != RemovedAs::kDrop) head.mean_v = mean_v;
          if (gone && mask.removed == RemovedAs::kConstant) head.score = mask.score;
          if (head.mean_k != nullptr || head.mean_v != nullptr) head.sums = sums, s.means_ = true;
          if (!gone) {
            head.channel = channel;
            LONGKV_TRY(
                cuda_status(cudaMemcpy(channel, mask.channels.data(), mask.channels.size() * 2, cudaMemcpyHostToDevice),
                            "channel masks"));
          }
          if (!mask.alpha.empty()) {
            head.alpha = alpha;
            LONGKV_TRY(cuda_status(cudaMemcpy(alpha, mask.alpha.data(), mask.alpha.size() * 4, cudaMemcpyHostToDevice),
                                   "channel masks"));
          }
          mask_at += per_head;
        }
        heads.push_back(head);
      }
      at += round_up(next - at, 256);
    }
    s.layers_.push_back(layer);
  }
  LONGKV_TRY(cuda_status(
      cudaMemcpy(s.heads_.data(), heads.data(), heads.size() * sizeof(card::OldHead), cudaMemcpyHostToDevice),
      "places of encoded rows"));
  return self;
}

Status CardOldRows::place_end(const int64_t* end) {
  if (count_ == 0) return {};
  std::vector<card::OldLayer> there;
  for (card::OldLayer& l : layers_) {
    if (l.old.heads == nullptr) continue;
    l.old.end = end;
    there.push_back(l);
  }
  return cuda_status(
      cudaMemcpy(list_.data(), there.data(), there.size() * sizeof(card::OldLayer), cudaMemcpyHostToDevice),
      "encoded layers");
}

int64_t CardOldRows::attended_bytes(int layer, int64_t tokens, int64_t attended) const {
  const int64_t old = std::min(attended, std::max<int64_t>(0, std::min(end(), tokens) - spec_.sink));
  int64_t bytes = card::card_kv_bytes(KvType::kF16, kv_heads_, dim_, attended - old);
  for (int h = 0; h < kv_heads_; ++h) {
    const int n = card::old_kept(kept_[size_t(layer) * size_t(kv_heads_) + size_t(h)]);
    if (n > 0) bytes += old * (card::old_step_bytes(spec_.k, n) + card::old_step_bytes(spec_.k, dim_)) / card::kOldStep;
  }
  return bytes;
}

int64_t CardOldRows::bytes(int64_t tokens) const {
  int64_t all = 0;
  for (size_t l = 0; l < layers_.size(); ++l)
    if (holds(int(l))) all += attended_bytes(int(l), tokens, tokens);
  return all;
}

Status CardOldRows::read(int layer, int64_t start, const card::CardKv& work, cudaStream_t stream) {
  return card::read_old(old(layer), rows(layer), 0, start, end(), work, stream);
}

Status CardOldRows::take(int layer, int64_t n, const card::CardKv& work, cudaStream_t stream) {
  const int64_t from = border_.end(layer), to = border_.take(layer, n);
  LONGKV_TRY(card::encode_old(old(layer), work, from, to, stream));
  if (means_) LONGKV_TRY(card::add_means(old(layer), work, from, to, stream));
  LONGKV_TRY(card::copy_rows(work, 0, std::min(n, spec_.sink), rows(layer), stream));
  return card::copy_rows(work, to, n, rows(layer), stream);
}

Status CardOldRows::truncate(int64_t n, cudaStream_t stream) {
  const int64_t to = border_.end_of_cut(n);
  bool cut = false;
  for (int l = 0; l < int(layers_.size()); ++l) {
    const int64_t end = border_.end(l);
    if (!holds(l) || end <= to) continue;
    LONGKV_TRY(card::read_old(old(l), rows(l), to, std::min(n, end), end, rows(l), stream));
    if (means_) LONGKV_TRY(card::cut_means(old(l), end - spec_.sink, to - spec_.sink, stream));
    cut = true;
  }
  border_.cut(n);
  return cut ? cuda_status(cudaStreamSynchronize(stream), "cutting encoded rows") : Status();
}

Status CardOldRows::encode_last(const int64_t* position, cudaStream_t stream) const {
  if (count_ == 0) return {};
  return card::encode_last(list_.as<card::OldLayer>(), count_, kv_heads_, spec_.k, means_, position, stream);
}

}  // namespace longkv

#endif
