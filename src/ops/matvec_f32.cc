// Decode products with fp32 activations: float weights straight from the file, quantised ones decoded tile by tile.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matvec_f32.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include <algorithm>
#include <bit>

#include "base/float16.h"
#include "ops/matmul.h"
#include "ops/matvec_split.h"

HWY_BEFORE_NAMESPACE();
namespace longkv::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using Floats = hn::ScalableTag<float>;
using FloatVec = hn::Vec<Floats>;

// Values of a row that are decoded together: a multiple of every block, small enough for four rows in the L1 cache.
constexpr int64_t kTile = 512;
constexpr int kTokens = 4;

HWY_INLINE FloatVec LoadWeights(Floats d, const float* p) { return hn::LoadU(d, p); }
HWY_INLINE FloatVec LoadWeights(Floats d, const hwy::float16_t* p) {
  return hn::PromoteTo(d, hn::LoadU(hn::Rebind<hwy::float16_t, Floats>(), p));
}
HWY_INLINE FloatVec LoadWeights(Floats d, const hwy::bfloat16_t* p) {
  return hn::PromoteTo(d, hn::LoadU(hn::Rebind<hwy::bfloat16_t, Floats>(), p));
}

HWY_INLINE float WeightValue(float w) { return w; }
// Highway's half is a compiler type on Arm, a structure elsewhere.
HWY_INLINE float WeightValue(hwy::float16_t w) { return to_float(std::bit_cast<f16_t>(w)); }
HWY_INLINE float WeightValue(hwy::bfloat16_t w) { return to_float(std::bit_cast<bf16_t>(w)); }

// sums[r * kTokens + t] += w[r] . x[t] over n values. Rows are processed together so that x is loaded once and enough
// independent chains hide the latency of the multiply-add.
template <int kRowCount, int kTokenCount, class T>
HWY_INLINE void AddDots(const T* HWY_RESTRICT w, int64_t w_stride, const float* HWY_RESTRICT x, int64_t x_stride,
                        int64_t n, float* HWY_RESTRICT sums) {
  const Floats d;
  const int64_t lanes = int64_t(hn::Lanes(d));
  FloatVec acc[kRowCount][kTokenCount];
  for (auto& row : acc) {
    for (auto& a : row) a = hn::Zero(d);
  }
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    FloatVec xs[kTokenCount];
    for (int t = 0; t < kTokenCount; ++t) xs[t] = hn::LoadU(d, x + t * x_stride + i);
    for (int r = 0; r < kRowCount; ++r) {
      const FloatVec weights = LoadWeights(d, w + r * w_stride + i);
      for (int t = 0; t < kTokenCount; ++t) acc[r][t] = hn::MulAdd(weights, xs[t], acc[r][t]);
    }
  }
  for (int r = 0; r < kRowCount; ++r) {
    for (int t = 0; t < kTokenCount; ++t) {
      float sum = hn::GetLane(hn::SumOfLanes(d, acc[r][t]));
      for (int64_t j = i; j < n; ++j) sum += WeightValue(w[r * w_stride + j]) * x[t * x_stride + j];
      sums[r * kTokens + t] += sum;
    }
  }
}

// kRowCount rows, `apart` rows from each other, against kTokenCount tokens; the order of operations in a row does not
// depend on the other rows.
template <int kRowCount, int kTokenCount>
HWY_INLINE void Rows(const Weight& w, int64_t row, int64_t apart, const float* x, float* y, int64_t y_stride) {
  float sums[kRowCount * kTokens] = {};
  const uint8_t* first = w.row(row);
  const int64_t stride = apart * w.row_bytes;
  if (w.type == TensorType::kF32) {
    AddDots<kRowCount, kTokenCount>(reinterpret_cast<const float*>(first), stride / 4, x, w.cols, w.cols, sums);
  } else if (w.type == TensorType::kF16) {
    AddDots<kRowCount, kTokenCount>(reinterpret_cast<const hwy::float16_t*>(first), stride / 2, x, w.cols, w.cols,
                                    sums);
  } else if (w.type == TensorType::kBF16) {
    AddDots<kRowCount, kTokenCount>(reinterpret_cast<const hwy::bfloat16_t*>(first), stride / 2, x, w.cols, w.cols,
                                    sums);
  } else {
    const TensorTypeInfo& info = *tensor_type_info(w.type);
    alignas(64) float tile[kRowCount * kTile];
    for (int64_t c = 0; c < w.cols; c += kTile) {
      const int64_t n = w.cols - c < kTile ? w.cols - c : kTile;
      for (int r = 0; r < kRowCount; ++r) {
        dequantize(w.type, w.row(row + r * apart) + c / info.block_values * info.block_bytes, tile + r * kTile, n);
      }
      AddDots<kRowCount, kTokenCount>(static_cast<const float*>(tile), kTile, x + c, w.cols, n, sums);
    }
  }
  for (int r = 0; r < kRowCount; ++r) {
    for (int t = 0; t < kTokenCount; ++t) y[t * y_stride + row + r * apart] = sums[r * kTokens + t];
  }
}

template <int kTokenCount>
void RowRange(const Weight& w, int64_t begin, int64_t end, const float* x, float* y, int64_t y_stride) {
  constexpr int kRowCount = kTokenCount <= 2 ? 4 : 2;  // 16 vector registers
  // Rows that lie far apart are so many streams of memory; see matvec_x86_small.h.
  const int64_t apart = (end - begin) / kRowCount;
  for (int64_t k = 0; k < apart; ++k) Rows<kRowCount, kTokenCount>(w, begin + k, apart, x, y, y_stride);
  for (int64_t r = begin + kRowCount * apart; r < end; ++r) Rows<1, kTokenCount>(w, r, 0, x, y, y_stride);
}

void MatvecF32Rows(const Weight& w, int64_t begin, int64_t end, const float* x, int64_t tokens, float* y,
                   int64_t y_stride) {
  for (; tokens >= kTokens; tokens -= kTokens, x += kTokens * w.cols, y += kTokens * y_stride) {
    RowRange<kTokens>(w, begin, end, x, y, y_stride);
  }
  static_assert(kTokens == 4);
  switch (tokens) {
    case 1: return RowRange<1>(w, begin, end, x, y, y_stride);
    case 2: return RowRange<2>(w, begin, end, x, y, y_stride);
    case 3: return RowRange<3>(w, begin, end, x, y, y_stride);
    default: return;
  }
}

}  // namespace longkv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(MatvecF32Rows);

void matvec_f32(const Weight& w, const float* x, int64_t tokens, float* y, int64_t y_stride, ThreadPool& pool) {
  const auto rows = HWY_DYNAMIC_DISPATCH(MatvecF32Rows);
  for_row_ranges(w, pool, [&](int64_t begin, int64_t end) { rows(w, begin, end, x, tokens, y, y_stride); });
}

}  // namespace longkv
#endif
