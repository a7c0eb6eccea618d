#include "kv/index/scan.h"

#include "base/cpu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kv/index/scan.cc"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::CappedTag<float, size_t(kTileBlocks)>;
using V = hn::Vec<D>;
constexpr int kLanes = int(hn::MaxLanes(D()));
constexpr int kVecs = int(kTileBlocks) / kLanes;
// Query heads per pass over a tile: their accumulators and the loaded summaries share 16 registers on AVX2.
constexpr int kMaxHeads = 4;

HWY_INLINE V load_f16(const f16_t* p) {
  const D d;
  const hn::Rebind<hwy::float16_t, D> dh;
  return hn::PromoteTo(d, hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(p)));
}

HWY_INLINE V load_i8(const int8_t* p) {
  const D d;
  const hn::Rebind<int8_t, D> d8;
  const hn::Rebind<int32_t, D> d32;
  return hn::ConvertTo(d, hn::PromoteTo(d32, hn::LoadU(d8, p)));
}

HWY_INLINE V load_u8(const uint8_t* p) {
  const D d;
  const hn::Rebind<uint8_t, D> d8;
  const hn::Rebind<int32_t, D> d32;
  return hn::ConvertTo(d, hn::PromoteTo(d32, hn::LoadU(d8, p)));
}

// acc += q . slot, or |q| . slot.
template <int kHeads, bool kAbs = false, class Load>
HWY_INLINE void dot_with(int64_t dim, const float* q, const Load& load, V (&acc)[kHeads][kVecs]) {
  const D d;
  for (int64_t c = 0; c < dim; ++c) {
    V k[kVecs];
    for (int i = 0; i < kVecs; ++i) k[i] = load(c * kTileBlocks + i * kLanes);
    for (int j = 0; j < kHeads; ++j) {
      V qc = hn::Set(d, q[j * dim + c]);
      if (kAbs) qc = hn::Abs(qc);
      for (int i = 0; i < kVecs; ++i) acc[j][i] = hn::MulAdd(qc, k[i], acc[j][i]);
    }
  }
}

template <int kHeads, bool kAbs = false>
HWY_INLINE void dot(const f16_t* slot, int64_t dim, const float* q, V (&acc)[kHeads][kVecs]) {
  dot_with<kHeads, kAbs>(
      dim, q, [slot](int64_t at) HWY_ATTR { return load_f16(slot + at); }, acc);
}

template <int kHeads>
HWY_INLINE void clear(V (&acc)[kHeads][kVecs]) {
  for (auto& row : acc) {
    for (V& v : row) v = hn::Zero(D());
  }
}

template <int kHeads>
void scan_heads(ScanRule rule, const f16_t* tile, int64_t tiles, int slots, int64_t dim, const float* q, float* scores,
                int64_t stride) {
  const D d;
  const int64_t slot_size = dim * kTileBlocks;
  for (int64_t t = 0; t < tiles; ++t, tile += slots * slot_size, scores += kTileBlocks) {
    V acc[kHeads][kVecs];
    clear(acc);
    if (rule == ScanRule::kCentre) {
      dot<kHeads>(tile, dim, q, acc);
      dot<kHeads, true>(tile + slot_size, dim, q, acc);
    } else {
      dot<kHeads>(tile, dim, q, acc);
      for (int s = 1; s < slots; ++s) {
        V other[kHeads][kVecs];
        clear(other);
        dot<kHeads>(tile + s * slot_size, dim, q, other);
        for (int j = 0; j < kHeads; ++j) {
          for (int i = 0; i < kVecs; ++i) acc[j][i] = hn::Max(acc[j][i], other[j][i]);
        }
      }
    }
    for (int j = 0; j < kHeads; ++j) {
      for (int i = 0; i < kVecs; ++i) hn::StoreU(acc[j][i], d, scores + j * stride + i * kLanes);
    }
  }
}

// Tiles of boxes whose sums share the registers.
constexpr int kBoxTiles = kVecs >= 8 ? 1 : 8 / kVecs;
constexpr int64_t kMaxDim = 1024;

// kHeads query heads over kTiles tiles. at: [heads][kMaxDim], where in a tile the bound of a channel that a head meets
// begins. ahead: of kTiles tiles the first to prefetch meanwhile, one in `every`, or nullptr.
template <int kTiles, int kHeads>
HWY_INLINE void scan_boxes(const f16_t* tile, int64_t tile_size, int64_t dim, const float* q,
                           const int32_t (*at)[kMaxDim], const f16_t* ahead, int every, float* scores, int64_t stride) {
  const D d;
  V acc[kHeads][kTiles * kVecs];
  for (auto& row : acc) {
    for (V& v : row) v = hn::Zero(d);
  }
  for (int64_t c = 0; c < dim; ++c) {
    // A tile has as many lines of 64 bytes as channels.
    for (int t = 0; ahead != nullptr && t < kTiles; t += every) hwy::Prefetch(ahead + t * tile_size + c * 32);
    for (int j = 0; j < kHeads; ++j) {
      const V qc = hn::Set(d, q[j * dim + c]);
      const f16_t* bound = tile + at[j][c];
      for (int t = 0; t < kTiles; ++t) {
        for (int i = 0; i < kVecs; ++i) {
          V& sum = acc[j][t * kVecs + i];
          sum = hn::MulAdd(qc, load_f16(bound + t * tile_size + i * kLanes), sum);
        }
      }
    }
  }
  for (int j = 0; j < kHeads; ++j) {
    for (int i = 0; i < kTiles * kVecs; ++i) hn::StoreU(acc[j][i], d, scores + j * stride + i * kLanes);
  }
}

// max(q * upper, q * lower) is q times the upper bound or, where q is negative, the lower one: a query head reads one
// of the two. Some tiles at a time stay in the nearest cache for all heads; single ones meet all heads at once.
void scan_box(const f16_t* tile, int64_t tiles, int64_t dim, const float* q, int n_q, float* scores, int64_t stride) {
  const int64_t slot_size = dim * kTileBlocks, tile_size = 2 * slot_size;
  int32_t at[kMaxHeads][kMaxDim];
  for (int first = 0; first < n_q; first += kMaxHeads) {
    const int heads = HWY_MIN(kMaxHeads, n_q - first);
    const float* own = q + first * dim;
    for (int j = 0; j < heads; ++j) {
      for (int64_t c = 0; c < dim; ++c) {
        at[j][c] = int32_t((own[j * dim + c] < 0.0f ? slot_size : 0) + c * kTileBlocks);
      }
    }
    float* out = scores + first * stride;
    int64_t t = 0;
    for (; t + kBoxTiles <= tiles; t += kBoxTiles) {
      const f16_t* now = tile + t * tile_size;
      const f16_t* next = t + 2 * kBoxTiles <= tiles ? now + kBoxTiles * tile_size : nullptr;
      for (int j = 0; j < heads; ++j) {
        const f16_t* ahead = next != nullptr && j < kBoxTiles ? next + j * tile_size : nullptr;
        scan_boxes<kBoxTiles, 1>(now, tile_size, dim, own + j * dim, at + j, ahead, heads,
                                 out + j * stride + t * kTileBlocks, stride);
      }
    }
    for (; t < tiles; ++t) {
      const f16_t* now = tile + t * tile_size;
      float* to = out + t * kTileBlocks;
      switch (heads) {
        case 1: scan_boxes<1, 1>(now, tile_size, dim, own, at, nullptr, 1, to, stride); break;
        case 2: scan_boxes<1, 2>(now, tile_size, dim, own, at, nullptr, 1, to, stride); break;
        case 3: scan_boxes<1, 3>(now, tile_size, dim, own, at, nullptr, 1, to, stride); break;
        default: scan_boxes<1, kMaxHeads>(now, tile_size, dim, own, at, nullptr, 1, to, stride);
      }
    }
  }
}

// Chains of sums per slot: two and their vectors wait for no other.
constexpr int kChains = kVecs >= 4 ? 1 : 4 / kVecs;

template <int kSlots>
void add_slots(const f16_t* tile, int64_t tiles, int64_t dim, const float* a, const float* b, const f16_t* ahead,
               float* scores) {
  const D d;
  const int64_t slot_size = dim * kTileBlocks;
  for (int64_t t = 0; t < tiles; ++t, tile += kSlots * slot_size, scores += kTileBlocks) {
    V first[kChains][kVecs], second[kChains][kVecs];
    clear(first);
    clear(second);
    const f16_t* next = t + 1 < tiles ? tile + kSlots * slot_size : ahead;
    const auto channel = [&](int64_t c, int u) HWY_ATTR {
      for (int i = 0; i < kVecs; ++i) {
        const f16_t* at = tile + c * kTileBlocks + i * kLanes;
        first[u][i] = hn::MulAdd(hn::Set(d, a[c]), load_f16(at), first[u][i]);
        if (kSlots == 2) second[u][i] = hn::MulAdd(hn::Set(d, b[c]), load_f16(at + slot_size), second[u][i]);
      }
    };
    int64_t c = 0;
    for (; c + kChains <= dim; c += kChains) {
      // A slot of a tile has a line of 64 bytes for two channels.
      for (int u = 0; next != nullptr && u < kChains; u += 3 - kSlots) hwy::Prefetch(next + (c + u) * 16 * kSlots);
      for (int u = 0; u < kChains; ++u) channel(c + u, u);
    }
    for (; c < dim; ++c) channel(c, 0);
    for (int i = 0; i < kVecs; ++i) {
      V sum = hn::Add(first[0][i], second[0][i]);
      for (int u = 1; u < kChains; ++u) sum = hn::Add(sum, hn::Add(first[u][i], second[u][i]));
      hn::StoreU(sum, d, scores + i * kLanes);
    }
  }
}

void AddSlots(const f16_t* first, int64_t tiles, int slots, int64_t dim, const float* a, const float* b,
              const f16_t* ahead, float* scores) {
  slots == 2 ? add_slots<2>(first, tiles, dim, a, b, ahead, scores)
             : add_slots<1>(first, tiles, dim, a, b, ahead, scores);
}

// of_widths: what meets the widths, in place of q its magnitudes.
template <int kHeads>
void scan8_heads(const uint8_t* tile, int64_t tiles, int64_t dim, const float* q, const float* of_widths, float* scores,
                 int64_t stride) {
  const D d;
  const int64_t slot_size = dim * kTileBlocks;
  for (int64_t t = 0; t < tiles; ++t, tile += scan8_tile_bytes(dim), scores += kTileBlocks) {
    V centre[kHeads][kVecs], width[kHeads][kVecs];
    clear(centre);
    const auto* centres = reinterpret_cast<const int8_t*>(tile);
    dot_with<kHeads>(
        dim, q, [centres](int64_t at) HWY_ATTR { return load_i8(centres + at); }, centre);
    clear(width);
    const uint8_t* widths = tile + slot_size;
    dot_with<kHeads, true>(
        dim, of_widths, [widths](int64_t at) HWY_ATTR { return load_u8(widths + at); }, width);
    const auto* scales = reinterpret_cast<const float*>(tile + 2 * slot_size);
    for (int i = 0; i < kVecs; ++i) {
      const V of_centre = hn::LoadU(d, scales + i * kLanes), of_width = hn::LoadU(d, scales + kTileBlocks + i * kLanes);
      for (int j = 0; j < kHeads; ++j) {
        const V score = hn::MulAdd(width[j][i], of_width, hn::Mul(centre[j][i], of_centre));
        hn::StoreU(score, d, scores + j * stride + i * kLanes);
      }
    }
  }
}

void Scan8Tiles(const uint8_t* first, int64_t tiles, int64_t dim, const float* q, int n_q, float* scores,
                int64_t stride) {
  for (int j = 0; j < n_q; j += kMaxHeads) {
    const float* qj = q + j * dim;
    float* out = scores + j * stride;
    switch (n_q - j) {
      case 1: scan8_heads<1>(first, tiles, dim, qj, qj, out, stride); break;
      case 2: scan8_heads<2>(first, tiles, dim, qj, qj, out, stride); break;
      case 3: scan8_heads<3>(first, tiles, dim, qj, qj, out, stride); break;
      default: scan8_heads<kMaxHeads>(first, tiles, dim, qj, qj, out, stride);
    }
  }
}

void Scan8Folded(const uint8_t* first, int64_t tiles, int64_t dim, const float* a, const float* b, float* scores) {
  scan8_heads<1>(first, tiles, dim, a, b, scores, 0);
}

// Query head j reads slot j alone.
void scan_own(const f16_t* tile, int64_t tiles, int slots, int64_t dim, const float* q, int n_q, float* scores,
              int64_t stride) {
  const D d;
  const int64_t slot_size = dim * kTileBlocks;
  for (int64_t t = 0; t < tiles; ++t, tile += slots * slot_size, scores += kTileBlocks) {
    for (int j = 0; j < n_q; ++j) {
      V acc[1][kVecs];
      clear(acc);
      dot<1>(tile + j * slot_size, dim, q + j * dim, acc);
      for (int i = 0; i < kVecs; ++i) hn::StoreU(acc[0][i], d, scores + j * stride + i * kLanes);
    }
  }
}

void ScanTiles(ScanRule rule, const f16_t* first, int64_t tiles, int slots, int64_t dim, const float* q, int n_q,
               float* scores, int64_t stride) {
  if (rule == ScanRule::kOwn) return scan_own(first, tiles, slots, dim, q, n_q, scores, stride);
  if (rule == ScanRule::kBox) return scan_box(first, tiles, dim, q, n_q, scores, stride);
  for (int j = 0; j < n_q; j += kMaxHeads) {
    const float* qj = q + j * dim;
    float* out = scores + j * stride;
    switch (n_q - j) {
      case 1: scan_heads<1>(rule, first, tiles, slots, dim, qj, out, stride); break;
      case 2: scan_heads<2>(rule, first, tiles, slots, dim, qj, out, stride); break;
      case 3: scan_heads<3>(rule, first, tiles, slots, dim, qj, out, stride); break;
      default: scan_heads<kMaxHeads>(rule, first, tiles, slots, dim, qj, out, stride);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(ScanTiles);
HWY_EXPORT(Scan8Tiles);
HWY_EXPORT(AddSlots);
HWY_EXPORT(Scan8Folded);

void scan_tiles(ScanRule rule, const f16_t* first, int64_t tiles, int slots, int64_t dim, const float* q, int n_q,
                float* scores, int64_t stride) {
  HWY_DYNAMIC_DISPATCH(ScanTiles)(rule, first, tiles, slots, dim, q, n_q, scores, stride);
}

void scan_folded(const f16_t* first, int64_t tiles, int slots, int64_t dim, const float* a, const float* b,
                 const f16_t* ahead, float* scores) {
  HWY_DYNAMIC_DISPATCH(AddSlots)(first, tiles, slots, dim, a, b, ahead, scores);
}

#if defined(__x86_64__)
namespace {
// Whether there are int8 products for this many channels.
bool has_int8(int64_t dim) { return active_isa() >= IsaLevel::kAvx512Vnni && dim % 4 == 0 && dim <= 1024; }
}  // namespace
#endif

void scan8_tiles(const uint8_t* first, int64_t tiles, int64_t dim, const float* q, int n_q, [[maybe_unused]] bool bound,
                 float* scores, int64_t stride) {
#if defined(__x86_64__)
  if (has_int8(dim)) return avx512vnni::scan8_tiles(first, tiles, dim, q, n_q, bound, scores, stride);
#endif
  HWY_DYNAMIC_DISPATCH(Scan8Tiles)(first, tiles, dim, q, n_q, scores, stride);
}

void scan8_folded(const uint8_t* first, int64_t tiles, int64_t dim, const float* a, const float* b,
                  [[maybe_unused]] bool bound, [[maybe_unused]] const uint8_t* ahead, float* scores) {
#if defined(__x86_64__)
  if (has_int8(dim)) return avx512vnni::scan8_folded(first, tiles, dim, a, b, bound, ahead, scores);
#endif
  HWY_DYNAMIC_DISPATCH(Scan8Folded)(first, tiles, dim, a, b, scores);
}

}  // namespace longkv
#endif
