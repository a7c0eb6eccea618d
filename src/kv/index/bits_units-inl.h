// How the sums of a tile of low-bit keys become the scores of its units of 16 tokens (bits_layout.h), for Highway
// kernels. Included once per target.
#if defined(LONGKV_KV_INDEX_BITS_UNITS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGKV_KV_INDEX_BITS_UNITS_INL_H_
#undef LONGKV_KV_INDEX_BITS_UNITS_INL_H_
#else
#define LONGKV_KV_INDEX_BITS_UNITS_INL_H_
#endif

#include <hwy/highway.h>
// After highway.h: the maths library is compiled once for each target.
#include <hwy/contrib/math/math-inl.h>

#include <algorithm>
#include <bit>

#include "kv/index/bits_layout.h"
#include "ops/fast_exp-inl.h"
#include "ops/lane_sums-inl.h"

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kHalfTile = kBitsTile / 2;
constexpr int64_t kUnits = kBitsTile / kBitsUnit;

#if HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR

using D8 = hn::CappedTag<uint8_t, size_t(kBitsTile)>;
using D16 = hn::Repartition<int16_t, D8>;
using V8 = hn::Vec<D8>;
using V16 = hn::Vec<D16>;
constexpr int64_t kByteLanes = int64_t(hn::MaxLanes(D8()));
constexpr int64_t kShortLanes = kByteLanes / 2;
constexpr int kMaxHeads = 4;

// The largest of each 16-byte block's eight numbers, in all of its lanes.
HWY_INLINE V16 max_of_eight(V16 v) {
  const D16 d16;
  const D8 d8;
  const hn::Repartition<int32_t, D8> d32;
  v = hn::Max(v, hn::BitCast(d16, hn::Shuffle1032(hn::BitCast(d32, v))));
  v = hn::Max(v, hn::BitCast(d16, hn::Shuffle2301(hn::BitCast(d32, v))));
  alignas(16) static constexpr uint8_t kSwap[16] = {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13};
  return hn::Max(v, hn::BitCast(d16, hn::TableLookupBytes(hn::BitCast(d8, v), hn::LoadDup128(d8, kSwap))));
}

// How a difference d <= 0 of two sums becomes the bits of 2^(d * unit) as a half: 1.0 has the bits 0x3c00, an order
// of two is 1024 of them, and the bits between are read as a straight line.
struct HalfExp {
  int16_t lowest;  // differences below give zero
  int shift;
  int16_t factor;

  HalfExp() = default;
  // unit: binary orders per unit of the sums.
  explicit HalfExp(float unit) {
    // Differences times 2^shift * factor / 2^15 = unit * 1024, factor in [0.5, 1) * 2^15. Outside of these limits all
    // tokens are as good as equal, or 16 orders apart.
    const float bits = unit > 1e-6f ? HWY_MIN(unit, 15.0f) * 1024.0f : 1e-3f;
    const uint32_t word = std::bit_cast<uint32_t>(bits);
    const int exponent = int(word >> 23) - 126;
    shift = HWY_MAX(0, exponent);
    const float part = std::bit_cast<float>((word & 0x7fffffu) | 0x3f000000u);  // in [0.5, 1)
    factor = int16_t(exponent >= 0 ? part * 32767.0f : bits * 32767.0f);
    // The shifted difference has to fit in 16 bits.
    lowest = int16_t(HWY_MAX(-15360.0f / bits, -32767.0f));
  }
};

// The best of each unit of one head's sums of a tile.
HWY_INLINE void unit_peaks(const int16_t* sums, int16_t* peaks) {
  const D16 d16;
  alignas(64) int16_t top[kHalfTile];
  for (int64_t t = 0; t < kHalfTile; t += kShortLanes) {
    hn::Store(max_of_eight(hn::Max(hn::Load(d16, sums + t), hn::Load(d16, sums + kHalfTile + t))), d16, top + t);
  }
  for (int64_t u = 0; u < kUnits; ++u) peaks[u] = top[8 * u];
}

// Of one head's sums of a tile: the best of each unit, and the exponentials of all as halves, in the sums' order.
HWY_INLINE void unit_exponentials(const int16_t* sums, const HalfExp& half_exp, int16_t* peaks, int16_t* bits) {
  const D16 d16;
  alignas(64) int16_t top[kHalfTile];
  const V16 lowest = hn::Set(d16, half_exp.lowest), factor = hn::Set(d16, half_exp.factor);
  const V16 one = hn::Set(d16, 0x3c00);
  const auto exp_bits = [&](V16 d) HWY_ATTR {
    const V16 shifted = hn::ShiftLeftSame(hn::Max(d, lowest), half_exp.shift);
    return hn::Max(hn::Zero(d16), hn::Add(hn::MulFixedPoint15(shifted, factor), one));
  };
  for (int64_t t = 0; t < kHalfTile; t += kShortLanes) {
    const V16 e = hn::Load(d16, sums + t), o = hn::Load(d16, sums + kHalfTile + t);
    const V16 peak = max_of_eight(hn::Max(e, o));
    hn::Store(peak, d16, top + t);
    hn::Store(exp_bits(hn::Sub(e, peak)), d16, bits + t);
    hn::Store(exp_bits(hn::Sub(o, peak)), d16, bits + kHalfTile + t);
  }
  for (int64_t u = 0; u < kUnits; ++u) peaks[u] = top[8 * u];
}

// The sums of the exponentials of each unit.
HWY_INLINE void unit_totals(const int16_t* bits, float* totals) {
  const hn::CappedTag<float, 8> df;
  const hn::FixedTag<float, 4> d4;
  const hn::Rebind<hwy::float16_t, decltype(df)> dh;
  const int64_t lanes = int64_t(hn::Lanes(df));
  const auto unit = [&](int64_t u) HWY_ATTR {
    auto total = hn::Zero(df);
    for (int64_t i = 8 * u; i < 8 * u + 8; i += lanes) {
      for (const int16_t* half : {bits, bits + kHalfTile}) {
        total = hn::Add(total, hn::PromoteTo(df, hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(half + i))));
      }
    }
    return total;
  };
  hn::StoreU(sums_of_four(df, unit(0), unit(1), unit(2), unit(3)), d4, totals);
}

// Tiles are taken some at a time, so that scores are formed in whole vectors.
constexpr int64_t kRunTiles = 16;
struct UnitRun {
  alignas(64) int16_t peaks[kMaxHeads][kRunTiles * kUnits];
  alignas(64) float totals[kMaxHeads][kRunTiles * kUnits];
  alignas(64) float scales[kRunTiles * kUnits];
};

// out[u] = step * scale * peak + root * ln(total).
void finish_units(const UnitRun& run, int head, int64_t units, BitsPool pool, float step, float root, float* out) {
  const hn::CappedTag<float, 16> df;
  const hn::Rebind<int16_t, decltype(df)> ds;
  const hn::Rebind<int32_t, decltype(df)> di;
  alignas(64) float scores[kRunTiles * kUnits];
  for (int64_t u = 0; u < units; u += int64_t(hn::Lanes(df))) {
    const auto scale = hn::Mul(hn::Load(df, run.scales + u), hn::Set(df, step));
    auto score = hn::Mul(hn::ConvertTo(df, hn::PromoteTo(di, hn::Load(ds, run.peaks[head] + u))), scale);
    if (pool == BitsPool::kMass) {
      score = hn::MulAdd(hn::Log(df, hn::Load(df, run.totals[head] + u)), hn::Set(df, root), score);
    }
    hn::Store(score, df, scores + u);
  }
  std::copy(scores, scores + units, out);
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();
#endif
