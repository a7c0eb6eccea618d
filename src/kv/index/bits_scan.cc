#include "kv/index/bits_scan.h"

#include <algorithm>

#include "base/cpu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kv/index/bits_scan.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// After highway.h: the maths library is compiled once for each target.
#include <hwy/contrib/math/math-inl.h>

#include "kv/index/bits_units-inl.h"
#include "ops/fast_exp-inl.h"
#include "ops/tail-inl.h"

// Loops over registers: without full unrolling GCC keeps arrays of vectors in memory.
#ifndef LONGKV_UNROLL
#if defined(__clang__)
#define LONGKV_UNROLL _Pragma("unroll")
#else
#define LONGKV_UNROLL _Pragma("GCC unroll 8")
#endif
#endif

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Targets without byte shuffles use none of these.
[[maybe_unused]] constexpr float kFixedOne = 32767.0f;

// One token after the other, in fp32: for tiles with magnitudes that are not finite, and where bytes cannot be
// shuffled.
void ScanTileSlow(const uint8_t* tile, int64_t groups, const BitsTables* tables, int n_q, float* scores,
                  int64_t stride) {
  constexpr int64_t kBytes = kBitsGroup / 8;
  const auto* magnitudes = reinterpret_cast<const f16_t*>(tile + groups * kBytes * kBitsTile);
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t t = 0; t < kBitsTile; ++t) {
      const float magnitude = to_float(magnitudes[g * kBitsTile + bits_magnitude_at(t)]);
      for (int j = 0; j < n_q; ++j) {
        const BitsTables& table = tables[j * groups + g];
        int sum = -kBitsNibbles * kBitsBias;
        for (int64_t i = 0; i < kBytes; ++i) {
          const uint8_t signs = tile[(g * kBytes + i) * kBitsTile + t];
          sum += table.bytes[2 * i][signs & 15] + table.bytes[2 * i + 1][signs >> 4];
        }
        float& score = scores[j * stride + t];
        score = (g == 0 ? 0.0f : score) + float(sum) * table.step * magnitude;
      }
    }
  }
}

// Blocks are taken some at a time, so that one vector of logarithms serves many.
void BlockScores(BitsPool pool, const float* s, int64_t block, int64_t count, float root, float* out) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = int64_t(hn::Lanes(d));
  const auto scale = hn::Set(d, kLog2E / root);
  constexpr int64_t kAtOnce = 64;
  alignas(64) float peaks[kAtOnce], sums[kAtOnce];
  for (float& x : peaks) x = 0.0f;
  for (float& x : sums) x = 1.0f;
  const int64_t blocks = ceil_div(count, block);
  for (int64_t first = 0; first < blocks; first += kAtOnce) {
    const int64_t n_blocks = HWY_MIN(kAtOnce, blocks - first);
    for (int64_t b = 0; b < n_blocks; ++b) {
      const float* t = s + (first + b) * block;
      const int64_t n = HWY_MIN(block, count - (first + b) * block);
      auto peak_lanes = hn::Set(d, t[0]);
      auto nan = hn::Zero(d);  // x - x is NaN for NaN and for infinities, which a maximum may lose
      int64_t i = 0;
      for (; i + lanes <= n; i += lanes) {
        const auto x = hn::LoadU(d, t + i);
        peak_lanes = hn::Max(peak_lanes, x);
        nan = hn::Add(nan, hn::Sub(x, x));
      }
      const auto rest = hn::FirstN(d, size_t(n - i));
      if (i < n) {
        const auto x = hn::IfThenElse(rest, load_first(d, t + i, size_t(n - i)), hn::Set(d, t[0]));
        peak_lanes = hn::Max(peak_lanes, x);
        nan = hn::Add(nan, hn::Sub(x, x));
      }
      const auto peak = hn::MaxOfLanes(d, peak_lanes);
      auto sum = nan;
      if (pool == BitsPool::kMass) {
        for (i = 0; i + lanes <= n; i += lanes) {
          sum = hn::Add(sum, fast_exp2(d, hn::Mul(hn::Sub(hn::LoadU(d, t + i), peak), scale)));
        }
        if (i < n) {
          const auto e = fast_exp2(d, hn::Mul(hn::Sub(load_first(d, t + i, size_t(n - i)), peak), scale));
          sum = hn::Add(sum, hn::IfThenElseZero(rest, e));
        }
      }
      peaks[b] = hn::GetLane(peak);
      sums[b] = hn::GetLane(hn::SumOfLanes(d, sum));
    }
    for (int64_t b = 0; b < n_blocks; b += lanes) {
      const auto sum = hn::LoadU(d, sums + b);
      auto score = hn::LoadU(d, peaks + b);
      if (pool == BitsPool::kMass) score = hn::MulAdd(hn::Log(d, sum), hn::Set(d, root), score);
      hn::StoreU(hn::IfThenElse(hn::IsNaN(sum), sum, score), d, peaks + b);  // Log does not pass NaN on
    }
    for (int64_t b = 0; b < n_blocks; ++b) out[first + b] = peaks[b];
  }
}

void UnitsSlow(const uint8_t* tile, int64_t groups, const BitsTables* tables, int n_q, BitsPool pool, float root,
               float* scores, int64_t stride) {
  float tokens[kBitsTile];
  for (int j = 0; j < n_q; ++j) {
    ScanTileSlow(tile, groups, tables + j * groups, 1, tokens, kBitsTile);
    BlockScores(pool, tokens, kBitsUnit, kBitsTile, root, scores + j * stride);
  }
}

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

void ScanTiles(const uint8_t* tile, int64_t tiles, int64_t groups, const BitsTables* tables, int n_q, float* scores,
               int64_t stride) {
  for (int64_t t = 0; t < tiles; ++t) {
    ScanTileSlow(tile + t * kBitsTile * groups * 6, groups, tables, n_q, scores + t * kBitsTile, stride);
  }
}

void ScanUnits(const uint8_t* tile, int64_t tiles, int64_t groups, const BitsTables* tables, int n_q, BitsPool pool,
               float root, float* scores, int64_t stride) {
  for (int64_t t = 0; t < tiles; ++t) {
    UnitsSlow(tile + t * kBitsTile * groups * 6, groups, tables, n_q, pool, root, scores + t * kUnits, stride);
  }
}

#else

// The magnitudes of a tile as 16-bit numbers, and what the tables' bias adds to its sums.
struct FixedTile {
  alignas(64) int16_t magnitude[kBitsMaxGroups][kBitsTile];
  alignas(64) int16_t offset[kBitsTile];
  float scale;  // of a sum, beside the step
  int shift;    // sums of bytes are multiplied by 2^shift, so that rounding the products costs little
};

// Sums of all groups stay below 2^15: a group adds at most 248 * 2^shift.
constexpr int shift_for(int64_t groups) { return groups <= 8 ? 4 : groups <= 16 ? 3 : 2; }

// The largest magnitude of a tile as the bits of a half. Halves without their sign are ordered like whole numbers; from
// 0x7c00 on they are not finite.
int16_t largest_magnitude(const uint8_t* tile, int64_t groups) {
  const D16 d16;
  const auto* magnitudes = reinterpret_cast<const int16_t*>(tile + groups * (kBitsGroup / 8) * kBitsTile);
  V16 top = hn::Zero(d16);
  const V16 unsigned_half = hn::Set(d16, int16_t(0x7fff));
  for (int64_t i = 0; i < groups * kBitsTile; i += kShortLanes) {
    top = hn::Max(top, hn::And(hn::LoadU(d16, magnitudes + i), unsigned_half));
  }
  return hn::GetLane(hn::MaxOfLanes(d16, top));
}

// bits: largest_magnitude(), finite.
void fix_tile(const uint8_t* tile, int64_t groups, int16_t bits, FixedTile& fixed) {
  const hn::CappedTag<float, 16> df;
  const hn::Rebind<hwy::float16_t, decltype(df)> dh;
  const hn::Rebind<int32_t, decltype(df)> di;
  const hn::Rebind<int16_t, decltype(df)> ds;
  const D16 d16;
  const int64_t lanes = int64_t(hn::Lanes(df));
  const auto* magnitudes = reinterpret_cast<const int16_t*>(tile + groups * (kBitsGroup / 8) * kBitsTile);
  const float largest = to_float(f16_t{uint16_t(bits)});
  fixed.shift = shift_for(groups);
  fixed.scale = largest * (32768.0f / kFixedOne) / float(1 << fixed.shift);
  const auto inverse = hn::Set(df, largest > 0 ? kFixedOne / largest : 0.0f);
  for (int64_t i = 0; i < groups * kBitsTile; i += lanes) {
    const auto m = hn::PromoteTo(df, hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(magnitudes + i)));
    // Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits.
    const auto rounded = hn::BitCast(di, hn::MulAdd(m, inverse, hn::Set(df, 12582912.0f)));
    hn::StoreU(hn::DemoteTo(ds, hn::Sub(rounded, hn::Set(di, 0x4b400000))), ds, fixed.magnitude[0] + i);
  }
  const V16 bias = hn::Set(d16, int16_t((kBitsNibbles * kBitsBias) << fixed.shift));
  for (int64_t t = 0; t < kBitsTile; t += kShortLanes) {
    V16 sum = hn::Zero(d16);
    for (int64_t g = 0; g < groups; ++g) {
      sum = hn::Sub(sum, hn::MulFixedPoint15(bias, hn::Load(d16, fixed.magnitude[g] + t)));
    }
    hn::Store(sum, d16, fixed.offset + t);
  }
}

// sums: [kHeads][64], even tokens before odd ones, in units of step * fixed.scale. Intermediate sums may wrap around;
// final ones fit.
template <int kHeads, int kShift>
void SumTile(const uint8_t* tile, int64_t groups, const BitsTables* tables, const FixedTile& fixed, int16_t* sums) {
  const D8 d8;
  const D16 d16;
  const hn::Repartition<uint16_t, D8> du;
  const V8 low = hn::Set(d8, 15);
  const auto even = hn::Set(du, 0xff);
  for (int64_t t = 0; t < kBitsTile; t += kByteLanes) {
    V16 sum_even[kHeads], sum_odd[kHeads];
    LONGKV_UNROLL
    for (int j = 0; j < kHeads; ++j) {
      sum_even[j] = hn::Load(d16, fixed.offset + t / 2);
      sum_odd[j] = hn::Load(d16, fixed.offset + kHalfTile + t / 2);
    }
    for (int64_t g = 0; g < groups; ++g) {
      const uint8_t* signs = tile + g * 4 * kBitsTile + t;
      V8 nibble[kBitsNibbles];
      LONGKV_UNROLL
      for (int i = 0; i < 4; ++i) {
        const V8 byte = hn::LoadU(d8, signs + i * kBitsTile);
        nibble[2 * i] = hn::And(byte, low);
        nibble[2 * i + 1] = hn::ShiftRight<4>(byte);
      }
      const V16 m_even = hn::Load(d16, fixed.magnitude[g] + t / 2);
      const V16 m_odd = hn::Load(d16, fixed.magnitude[g] + kHalfTile + t / 2);
      LONGKV_UNROLL
      for (int j = 0; j < kHeads; ++j) {
        const BitsTables& table = tables[j * groups + g];
        const auto look = [&](int i)
                              HWY_ATTR { return hn::TableLookupBytes(hn::LoadDup128(d8, table.bytes[i]), nibble[i]); };
        // Four bytes of at most 2 * kBitsBias fit in one byte.
        const auto a = hn::BitCast(du, hn::Add(hn::Add(look(0), look(1)), hn::Add(look(2), look(3))));
        const auto b = hn::BitCast(du, hn::Add(hn::Add(look(4), look(5)), hn::Add(look(6), look(7))));
        const auto e = hn::ShiftLeft<kShift>(hn::Add(hn::And(a, even), hn::And(b, even)));
        const auto o = hn::ShiftLeft<kShift>(hn::Add(hn::ShiftRight<8>(a), hn::ShiftRight<8>(b)));
        sum_even[j] = hn::Add(sum_even[j], hn::MulFixedPoint15(hn::BitCast(d16, e), m_even));
        sum_odd[j] = hn::Add(sum_odd[j], hn::MulFixedPoint15(hn::BitCast(d16, o), m_odd));
      }
    }
    LONGKV_UNROLL
    for (int j = 0; j < kHeads; ++j) {
      hn::Store(sum_even[j], d16, sums + j * kBitsTile + t / 2);
      hn::Store(sum_odd[j], d16, sums + j * kBitsTile + kHalfTile + t / 2);
    }
  }
}

template <int kHeads>
void sum_heads(const uint8_t* tile, int64_t groups, const BitsTables* tables, const FixedTile& fixed, int16_t* sums) {
  switch (fixed.shift) {
    case 4: return SumTile<kHeads, 4>(tile, groups, tables, fixed, sums);
    case 3: return SumTile<kHeads, 3>(tile, groups, tables, fixed, sums);
    default: return SumTile<kHeads, 2>(tile, groups, tables, fixed, sums);
  }
}

void sum_tile(const uint8_t* tile, int64_t groups, const BitsTables* tables, int heads, const FixedTile& fixed,
              int16_t* sums) {
  switch (heads) {
    case 1: return sum_heads<1>(tile, groups, tables, fixed, sums);
    case 2: return sum_heads<2>(tile, groups, tables, fixed, sums);
    case 3: return sum_heads<3>(tile, groups, tables, fixed, sums);
    default: return sum_heads<4>(tile, groups, tables, fixed, sums);
  }
}

// Some tiles, of which each step is taken before the next one begins: a tile's steps wait for each other, those of
// different tiles do not.
struct TileRun {
  FixedTile fixed[kRunTiles];
  alignas(64) int16_t sums[kRunTiles][kMaxHeads * kBitsTile];
  uint32_t slow;  // bit per tile: a magnitude is not finite

  bool is_slow(int64_t t) const { return (slow >> t & 1) != 0; }

  void fix(const uint8_t* tile, int64_t count, int64_t groups) {
    const int64_t tile_bytes = groups * (kBitsGroup / 8 + 2) * kBitsTile;
    int16_t largest[kRunTiles];
    slow = 0;
    for (int64_t t = 0; t < count; ++t) {
      largest[t] = largest_magnitude(tile + t * tile_bytes, groups);
      if (largest[t] >= 0x7c00) slow |= 1u << t;
    }
    for (int64_t t = 0; t < count; ++t) {
      if (!is_slow(t)) fix_tile(tile + t * tile_bytes, groups, largest[t], fixed[t]);
    }
  }

  void sum(const uint8_t* tile, int64_t count, int64_t groups, const BitsTables* tables, int heads) {
    const int64_t tile_bytes = groups * (kBitsGroup / 8 + 2) * kBitsTile;
    for (int64_t t = 0; t < count; ++t) {
      if (!is_slow(t)) sum_tile(tile + t * tile_bytes, groups, tables, heads, fixed[t], sums[t]);
    }
  }
};

// One head's sums of a tile, in order and with their scale.
void token_scores(const int16_t* sums, float scale, float* scores) {
  const hn::CappedTag<float, 16> df;
  const hn::Rebind<int16_t, decltype(df)> ds;
  const hn::Rebind<int32_t, decltype(df)> di;
  const D16 d16;
  alignas(64) int16_t ordered[kBitsTile];
  for (int64_t t = 0; t < kHalfTile; t += kShortLanes) {
    hn::StoreInterleaved2(hn::Load(d16, sums + t), hn::Load(d16, sums + kHalfTile + t), d16, ordered + 2 * t);
  }
  for (int64_t t = 0; t < kBitsTile; t += int64_t(hn::Lanes(df))) {
    const auto whole = hn::PromoteTo(di, hn::LoadU(ds, ordered + t));
    hn::StoreU(hn::Mul(hn::ConvertTo(df, whole), hn::Set(df, scale)), df, scores + t);
  }
}

void ScanTiles(const uint8_t* tile, int64_t tiles, int64_t groups, const BitsTables* tables, int n_q, float* scores,
               int64_t stride) {
  const int64_t tile_bytes = groups * (kBitsGroup / 8 + 2) * kBitsTile;
  TileRun run;
  for (int64_t begin = 0; begin < tiles; begin += kRunTiles) {
    const int64_t count = HWY_MIN(kRunTiles, tiles - begin);
    const uint8_t* first_tile = tile + begin * tile_bytes;
    run.fix(first_tile, count, groups);
    for (int first = 0; first < n_q; first += kMaxHeads) {
      const int heads = HWY_MIN(kMaxHeads, n_q - first);
      const BitsTables* own = tables + first * groups;
      run.sum(first_tile, count, groups, own, heads);
      for (int64_t t = 0; t < count; ++t) {
        float* out = scores + first * stride + (begin + t) * kBitsTile;
        if (run.is_slow(t)) {
          ScanTileSlow(first_tile + t * tile_bytes, groups, own, heads, out, stride);
          continue;
        }
        for (int j = 0; j < heads; ++j) {
          token_scores(run.sums[t] + j * kBitsTile, run.fixed[t].scale * own[j * groups].step, out + j * stride);
        }
      }
    }
  }
}

void ScanUnits(const uint8_t* tile, int64_t tiles, int64_t groups, const BitsTables* tables, int n_q, BitsPool pool,
               float root, float* scores, int64_t stride) {
  const int64_t tile_bytes = groups * (kBitsGroup / 8 + 2) * kBitsTile;
  TileRun run;
  HalfExp exps[kRunTiles][kMaxHeads];
  UnitRun units;
  std::fill(&units.totals[0][0], &units.totals[0][0] + kMaxHeads * kRunTiles * kUnits, 1.0f);
  std::fill(&units.peaks[0][0], &units.peaks[0][0] + kMaxHeads * kRunTiles * kUnits, int16_t(0));
  std::fill(units.scales, units.scales + kRunTiles * kUnits, 0.0f);
  const float orders = kLog2E / root;
  for (int64_t begin = 0; begin < tiles; begin += kRunTiles) {
    const int64_t count = HWY_MIN(kRunTiles, tiles - begin);
    const uint8_t* first_tile = tile + begin * tile_bytes;
    run.fix(first_tile, count, groups);
    for (int64_t t = 0; t < count; ++t) {
      if (!run.is_slow(t)) std::fill(units.scales + t * kUnits, units.scales + (t + 1) * kUnits, run.fixed[t].scale);
    }
    for (int first = 0; first < n_q; first += kMaxHeads) {
      const int heads = HWY_MIN(kMaxHeads, n_q - first);
      const BitsTables* own = tables + first * groups;
      run.sum(first_tile, count, groups, own, heads);
      const auto each = [&](const auto& step) {
        for (int64_t t = 0; t < count; ++t) {
          for (int j = 0; j < heads && !run.is_slow(t); ++j) step(t, j);
        }
      };
      if (pool == BitsPool::kMax) {
        each([&](int64_t t, int j) HWY_ATTR { unit_peaks(run.sums[t] + j * kBitsTile, units.peaks[j] + t * kUnits); });
      } else {
        each([&](int64_t t, int j) { exps[t][j] = HalfExp(run.fixed[t].scale * own[j * groups].step * orders); });
        each([&](int64_t t, int j) HWY_ATTR {
          int16_t* at = run.sums[t] + j * kBitsTile;
          unit_exponentials(at, exps[t][j], units.peaks[j] + t * kUnits, at);
        });
        each([&](int64_t t, int j)
                 HWY_ATTR { unit_totals(run.sums[t] + j * kBitsTile, units.totals[j] + t * kUnits); });
      }
      float* out = scores + first * stride + begin * kUnits;
      for (int j = 0; j < heads; ++j) {
        finish_units(units, j, count * kUnits, pool, own[j * groups].step, root, out + j * stride);
      }
      for (int64_t t = 0; t < count; ++t) {
        if (!run.is_slow(t)) continue;
        UnitsSlow(first_tile + t * tile_bytes, groups, own, heads, pool, root, out + t * kUnits, stride);
      }
    }
  }
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(ScanTiles);
HWY_EXPORT(ScanUnits);
HWY_EXPORT(BlockScores);

void bits_scan_tiles_portable(const uint8_t* tile, int64_t tiles, int64_t groups, const BitsTables* tables, int n_q,
                              float* scores, int64_t stride) {
  HWY_DYNAMIC_DISPATCH(ScanTiles)(tile, tiles, groups, tables, n_q, scores, stride);
}

void bits_scan_units_portable(const uint8_t* tile, int64_t tiles, int64_t groups, const BitsTables* tables, int n_q,
                              BitsPool pool, float root, float* scores, int64_t stride) {
  HWY_DYNAMIC_DISPATCH(ScanUnits)(tile, tiles, groups, tables, n_q, pool, root, scores, stride);
}

#if defined(__x86_64__)
#define LONGKV_BITS_SCAN(name) (active_isa() >= IsaLevel::kAvx512 ? avx512::name : name##_portable)
#else
#define LONGKV_BITS_SCAN(name) name##_portable
#endif

void bits_scan_tiles(const uint8_t* tile, int64_t tiles, int64_t groups, const BitsTables* tables, int n_q,
                     float* scores, int64_t stride) {
  LONGKV_BITS_SCAN(bits_scan_tiles)(tile, tiles, groups, tables, n_q, scores, stride);
}

void bits_scan_units(const uint8_t* tile, int64_t tiles, int64_t groups, const BitsTables* tables, int n_q,
                     BitsPool pool, float root, float* scores, int64_t stride) {
  LONGKV_BITS_SCAN(bits_scan_units)(tile, tiles, groups, tables, n_q, pool, root, scores, stride);
}

void bits_block_scores(BitsPool pool, const float* scores, int64_t block, int64_t count, float root, float* out) {
  HWY_DYNAMIC_DISPATCH(BlockScores)(pool, scores, block, count, root, out);
}

}  // namespace longkv
#endif
