#include "kv/index/bits_layout.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kv/index/bits_scan.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// After highway.h: the maths library is compiled once for each target.
#include <hwy/contrib/math/math-inl.h>

#include "ops/fast_exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

// Without byte shuffles a token's tables are looked up one by one.
void ScanTile(const uint8_t* tile, int64_t groups, const BitsTables* tables, int n_q, float* scores, int64_t stride) {
  constexpr int64_t kBytes = kBitsGroup / 8;
  const auto* magnitudes = reinterpret_cast<const f16_t*>(tile + groups * kBytes * kBitsTile);
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t t = 0; t < kBitsTile; ++t) {
      const float magnitude = to_float(magnitudes[g * kBitsTile + t]);
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

#else

using Bytes = hn::CappedTag<uint8_t, size_t(kBitsTile)>;
using Floats = hn::CappedTag<float, size_t(kBitsTile)>;
constexpr int kByteLanes = int(hn::MaxLanes(Bytes()));
constexpr int kFloatLanes = int(hn::MaxLanes(Floats()));
constexpr int kVecs = kByteLanes / kFloatLanes;

void ScanTile(const uint8_t* tile, int64_t groups, const BitsTables* tables, int n_q, float* scores, int64_t stride) {
  const Bytes d8;
  const Floats df;
  const hn::Rebind<int32_t, Floats> di;
  const hn::Rebind<uint8_t, Floats> dq;
  const hn::Rebind<hwy::float16_t, Floats> dh;
  const auto low = hn::Set(d8, 15);
  const auto bias = hn::Set(di, kBitsNibbles * kBitsBias);
  const auto* magnitudes = reinterpret_cast<const hwy::float16_t*>(tile + groups * (kBitsGroup / 8) * kBitsTile);
  alignas(64) uint8_t sums[2][kByteLanes];

  for (int64_t t = 0; t < kBitsTile; t += kByteLanes) {
    for (int64_t g = 0; g < groups; ++g) {
      const uint8_t* signs = tile + g * 4 * kBitsTile + t;
      const auto b0 = hn::LoadU(d8, signs), b1 = hn::LoadU(d8, signs + kBitsTile);
      const auto b2 = hn::LoadU(d8, signs + 2 * kBitsTile), b3 = hn::LoadU(d8, signs + 3 * kBitsTile);
      const auto l0 = hn::And(b0, low), l1 = hn::And(b1, low), l2 = hn::And(b2, low), l3 = hn::And(b3, low);
      const auto h0 = hn::ShiftRight<4>(b0), h1 = hn::ShiftRight<4>(b1);
      const auto h2 = hn::ShiftRight<4>(b2), h3 = hn::ShiftRight<4>(b3);
      hn::Vec<Floats> m[kVecs];
      for (int i = 0; i < kVecs; ++i) {
        m[i] = hn::PromoteTo(df, hn::LoadU(dh, magnitudes + g * kBitsTile + t + i * kFloatLanes));
      }
      for (int j = 0; j < n_q; ++j) {
        const BitsTables& table = tables[j * groups + g];
        const auto look = [&](int nibble, auto index)
                              HWY_ATTR { return hn::TableLookupBytes(hn::LoadDup128(d8, table.bytes[nibble]), index); };
        // Four bytes of at most 2 * kBitsBias fit in one byte.
        const auto first = hn::Add(hn::Add(look(0, l0), look(1, h0)), hn::Add(look(2, l1), look(3, h1)));
        const auto second = hn::Add(hn::Add(look(4, l2), look(5, h2)), hn::Add(look(6, l3), look(7, h3)));
        hn::Store(first, d8, sums[0]);
        hn::Store(second, d8, sums[1]);
        const auto step = hn::Set(df, table.step);
        float* out = scores + j * stride + t;
        for (int i = 0; i < kVecs; ++i) {
          const auto a = hn::PromoteTo(di, hn::LoadU(dq, sums[0] + i * kFloatLanes));
          const auto b = hn::PromoteTo(di, hn::LoadU(dq, sums[1] + i * kFloatLanes));
          const auto dot = hn::Mul(hn::ConvertTo(df, hn::Sub(hn::Add(a, b), bias)), step);
          const auto before = g == 0 ? hn::Zero(df) : hn::LoadU(df, out + i * kFloatLanes);
          hn::StoreU(hn::MulAdd(dot, m[i], before), df, out + i * kFloatLanes);
        }
      }
    }
  }
}

#endif

// Blocks are taken some at a time, so that their reductions overlap and one vector of logarithms serves many blocks.
void BlockScores(const float* s, int64_t block, int64_t rows, float root, float* out) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = int64_t(hn::Lanes(d));
  const auto scale = hn::Set(d, kLog2E / root);
  constexpr int64_t kAtOnce = 64;
  alignas(64) float peaks[kAtOnce], sums[kAtOnce];
  for (float& x : peaks) x = 0.0f;
  for (float& x : sums) x = 1.0f;
  const int64_t blocks = ceil_div(rows, block);
  for (int64_t first = 0; first < blocks; first += kAtOnce) {
    const int64_t count = HWY_MIN(kAtOnce, blocks - first);
    for (int64_t b = 0; b < count; ++b) {
      const float* t = s + (first + b) * block;
      const int64_t n = HWY_MIN(block, rows - (first + b) * block);
      auto peak_lanes = hn::Set(d, t[0]);
      int64_t i = 0;
      for (; i + lanes <= n; i += lanes) peak_lanes = hn::Max(peak_lanes, hn::LoadU(d, t + i));
      const auto rest = hn::FirstN(d, size_t(n - i));
      if (i < n) peak_lanes = hn::Max(peak_lanes, hn::IfThenElse(rest, hn::MaskedLoad(rest, d, t + i), peak_lanes));
      const auto peak = hn::MaxOfLanes(d, peak_lanes);
      auto sum = hn::Zero(d);
      for (i = 0; i + lanes <= n; i += lanes) {
        sum = hn::Add(sum, fast_exp2(d, hn::Mul(hn::Sub(hn::LoadU(d, t + i), peak), scale)));
      }
      if (i < n) {
        const auto e = fast_exp2(d, hn::Mul(hn::Sub(hn::MaskedLoad(rest, d, t + i), peak), scale));
        sum = hn::Add(sum, hn::IfThenElseZero(rest, e));
      }
      peaks[b] = hn::GetLane(peak);
      sums[b] = hn::GetLane(hn::SumOfLanes(d, sum));
    }
    for (int64_t b = 0; b < count; b += lanes) {
      const auto sum = hn::LoadU(d, sums + b);
      const auto score = hn::MulAdd(hn::Log(d, sum), hn::Set(d, root), hn::LoadU(d, peaks + b));
      hn::StoreU(hn::IfThenElse(hn::IsNaN(sum), sum, score), d, peaks + b);  // Log does not pass NaN on
    }
    for (int64_t b = 0; b < count; ++b) out[first + b] = peaks[b];
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(ScanTile);
HWY_EXPORT(BlockScores);

void bits_scan_tile(const uint8_t* tile, int64_t groups, const BitsTables* tables, int n_q, float* scores,
                    int64_t stride) {
  HWY_DYNAMIC_DISPATCH(ScanTile)(tile, groups, tables, n_q, scores, stride);
}

void bits_block_scores(const float* scores, int64_t block, int64_t rows, float root, float* out) {
  HWY_DYNAMIC_DISPATCH(BlockScores)(scores, block, rows, root, out);
}

}  // namespace longkv
#endif
