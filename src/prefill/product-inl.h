// The product kernel of prompt attention and its estimates: a block of rows against a panel of packed columns. Included
// once per target.
#if defined(LONGKV_PREFILL_PRODUCT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGKV_PREFILL_PRODUCT_INL_H_
#undef LONGKV_PREFILL_PRODUCT_INL_H_
#else
#define LONGKV_PREFILL_PRODUCT_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;

constexpr int kLanes = HWY_LANES(float);
constexpr int kPanel = 2 * kLanes;
// kBlock x 2 accumulators, two columns and one broadcast fill the register file (16 or 32 registers).
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
constexpr int kBlock = 12;
#else
constexpr int kBlock = 6;
#endif

// c[i][:] = sum over t < n of a[i * a_stride + t] * b[t * kPanel + :], in ascending t.
HWY_INLINE void product_block(const float* HWY_RESTRICT a, int64_t a_stride, const float* HWY_RESTRICT b, int64_t n,
                              VF (&c)[kBlock][2]) {
  const DF df;
#pragma GCC unroll 16
  for (int i = 0; i < kBlock; ++i) {
    c[i][0] = hn::Zero(df);
    c[i][1] = hn::Zero(df);
  }
  for (int64_t t = 0; t < n; ++t) {
    const VF b0 = hn::Load(df, b + t * kPanel);
    const VF b1 = hn::Load(df, b + t * kPanel + kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kBlock; ++i) {
      const VF x = hn::Set(df, a[i * a_stride + t]);
      c[i][0] = hn::MulAdd(x, b0, c[i][0]);
      c[i][1] = hn::MulAdd(x, b1, c[i][1]);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();

#endif  // include guard
