#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "base/gemm.cc"
#include "base/gemm.h"

#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace longkv::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Rows [i, i + R) against two vectors of columns: R * 2 sums stay in registers over the whole of k.
template <int R, class D>
HWY_INLINE void Columns2(D d, int64_t k, const float* HWY_RESTRICT a, int64_t a_stride, const float* HWY_RESTRICT b,
                         int64_t b_stride, float* HWY_RESTRICT c, int64_t c_stride) {
  const int64_t lanes = int64_t(hn::Lanes(d));
  hn::Vec<D> sum[R][2];
  for (int r = 0; r < R; ++r) {
    sum[r][0] = hn::LoadU(d, c + r * c_stride);
    sum[r][1] = hn::LoadU(d, c + r * c_stride + lanes);
  }
  for (int64_t l = 0; l < k; ++l) {
    const auto b0 = hn::LoadU(d, b + l * b_stride), b1 = hn::LoadU(d, b + l * b_stride + lanes);
    for (int r = 0; r < R; ++r) {
      const auto x = hn::Set(d, a[r * a_stride + l]);
      sum[r][0] = hn::MulAdd(x, b0, sum[r][0]);
      sum[r][1] = hn::MulAdd(x, b1, sum[r][1]);
    }
  }
  for (int r = 0; r < R; ++r) {
    hn::StoreU(sum[r][0], d, c + r * c_stride);
    hn::StoreU(sum[r][1], d, c + r * c_stride + lanes);
  }
}

void GemmAdd(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
             float* c, int64_t c_stride) {
  const hn::CappedTag<float, 16> d;
  const int64_t step = 2 * int64_t(hn::Lanes(d));
  int64_t j = 0;
  for (; j + step <= n; j += step) {
    int64_t i = 0;
    for (; i + 4 <= m; i += 4) {
      Columns2<4>(d, k, a + i * a_stride, a_stride, b + j, b_stride, c + i * c_stride + j, c_stride);
    }
    for (; i < m; ++i) {
      Columns2<1>(d, k, a + i * a_stride, a_stride, b + j, b_stride, c + i * c_stride + j, c_stride);
    }
  }
  for (; j < n; ++j) {
    for (int64_t i = 0; i < m; ++i) {
      float sum = c[i * c_stride + j];
      for (int64_t l = 0; l < k; ++l) sum += a[i * a_stride + l] * b[l * b_stride + j];
      c[i * c_stride + j] = sum;
    }
  }
}

}  // namespace longkv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(GemmAdd);

void gemm_add(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
              float* c, int64_t c_stride) {
  HWY_DYNAMIC_DISPATCH(GemmAdd)(m, n, k, a, a_stride, b, b_stride, c, c_stride);
}

void transpose(const float* x, int64_t rows, int64_t cols, int64_t x_stride, float* out, int64_t out_stride) {
  // Squares of 8 keep the lines of both sides in the first-level cache.
  constexpr int64_t kSquare = 8;
  for (int64_t i0 = 0; i0 < rows; i0 += kSquare) {
    const int64_t i1 = i0 + kSquare < rows ? i0 + kSquare : rows;
    for (int64_t j = 0; j < cols; ++j) {
      for (int64_t i = i0; i < i1; ++i) out[j * out_stride + i] = x[i * x_stride + j];
    }
  }
}

}  // namespace longkv
#endif
