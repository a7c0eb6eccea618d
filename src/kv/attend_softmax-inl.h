// The softmax of a tile of scores with a running maximum, for Highway kernels. Included once per target.
#if defined(LONGKV_KV_ATTEND_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGKV_KV_ATTEND_SOFTMAX_INL_H_
#undef LONGKV_KV_ATTEND_SOFTMAX_INL_H_
#else
#define LONGKV_KV_ATTEND_SOFTMAX_INL_H_
#endif

#include <hwy/highway.h>

#include <limits>

#include "kv/attend_kernel.h"
#include "kv/codec/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// exp(x) = 2^n * exp(r), |r| <= ln(2)/2, exp(r) = 1 + r + r^2 g(r) with g of degree 4 through the Chebyshev nodes
// (error below 1e-8). ln(2) is split so that n * ln2_hi is exact.
HWY_INLINE VF exp_vector(VF x) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  // Below this 2^n would be subnormal. Comparisons with NaN are false, so NaN runs through the polynomial.
  const auto tiny = hn::Lt(x, hn::Set(d, -87.33f));
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits, from where a shift takes it to the exponent.
  const VF magic = hn::Set(d, 0x1.8p23f);
  const VF shifted = hn::MulAdd(hn::Max(hn::Set(d, -87.33f), x), hn::Set(d, 1.44269504f), magic);
  const VF n = hn::Sub(shifted, magic);
  const VF r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x));
  VF g = hn::Set(d, 1.3926326e-3f);
  g = hn::MulAdd(g, r, hn::Set(d, 8.3632928e-3f));
  g = hn::MulAdd(g, r, hn::Set(d, 4.1666554e-2f));
  g = hn::MulAdd(g, r, hn::Set(d, 0.16666576f));
  g = hn::MulAdd(g, r, hn::Set(d, 0.5f));
  const VF e = hn::MulAdd(hn::Mul(r, r), g, hn::Add(r, hn::Set(d, 1.0f)));
  // A product, not an addition to e's bits: those of a NaN must stay.
  const auto power = hn::Add(hn::ShiftLeft<23>(hn::BitCast(di, shifted)), hn::Set(di, 0x3f800000));
  return hn::IfThenZeroElse(tiny, hn::Mul(e, hn::BitCast(d, power)));
}

HWY_INLINE float exp_scalar(float x) { return hn::GetLane(exp_vector(hn::Set(DF(), x))); }

// softcap * tanh(s / softcap), with tanh(y) = (1 - t) / (1 + t), t = exp(-2|y|) <= 1: no overflow.
HWY_INLINE void cap_scores(float* s, int64_t n, float softcap) {
  const DF d;
  for (int64_t i = 0; i < n; i += kLanes) {
    const VF y = hn::Mul(hn::Load(d, s + i), hn::Set(d, 1.0f / softcap));
    const VF t = exp_vector(hn::Mul(hn::Abs(y), hn::Set(d, -2.0f)));
    const VF tanh = hn::Div(hn::Sub(hn::Set(d, 1.0f), t), hn::Add(hn::Set(d, 1.0f), t));
    hn::Store(hn::CopySign(hn::Mul(tanh, hn::Set(d, softcap)), y), d, s + i);
  }
}

// Most heads whose weights are formed together.
inline constexpr int kSoftmaxHeads = 4;

// Turns the scores of kH heads over a tile, s [heads][s_stride] padded with -inf to whole vectors, into
// exp(score - max). partial: [heads][stride], channels of the sums up to stride - kPartialTail, then the running
// maximum and sum; what was summed is rescaled when the maximum rises. Heads go side by side through each step: those
// of one head alone are chains of latencies.
template <int kH>
HWY_INLINE void softmax_heads(float* HWY_RESTRICT s, int64_t s_stride, int64_t rows, float* HWY_RESTRICT partial,
                              int64_t stride) {
  const DF d;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const int64_t max_at = stride - kPartialTail, sum_at = max_at + 1;
  VF top[kH], base[kH], sum[kH];
  for (int h = 0; h < kH; ++h) top[h] = hn::Set(d, kNone);
  for (int64_t i = 0; i < rows; i += kLanes) {
    for (int h = 0; h < kH; ++h) top[h] = hn::Max(top[h], hn::Load(d, s + h * s_stride + i));
  }
  for (int h = 0; h < kH; ++h) top[h] = hn::MaxOfLanes(d, top[h]);
  for (int h = 0; h < kH; ++h) {
    float* sums = partial + h * stride;
    const float tile_max = hn::GetLane(top[h]), old_max = sums[max_at];
    const float new_max = tile_max > old_max ? tile_max : old_max;
    if (new_max != old_max && old_max != kNone) {
      const float shrink = exp_scalar(old_max - new_max);
      sums[sum_at] *= shrink;
      for (int64_t c = 0; c < max_at; c += kLanes) {
        hn::StoreU(hn::Mul(hn::LoadU(d, sums + c), hn::Set(d, shrink)), d, sums + c);
      }
    }
    sums[max_at] = new_max;
    // All scores -inf so far: weights are exp(-inf) = 0, not exp(-inf + inf).
    base[h] = hn::Set(d, new_max == kNone ? 0.0f : new_max);
    sum[h] = hn::Zero(d);
  }
  for (int64_t i = 0; i < rows; i += kLanes) {
    for (int h = 0; h < kH; ++h) {
      const VF p = exp_vector(hn::Sub(hn::Load(d, s + h * s_stride + i), base[h]));
      sum[h] = hn::Add(sum[h], p);
      hn::Store(p, d, s + h * s_stride + i);
    }
  }
  for (int h = 0; h < kH; ++h) sum[h] = hn::SumOfLanes(d, sum[h]);
  for (int h = 0; h < kH; ++h) partial[h * stride + sum_at] += hn::GetLane(sum[h]);
}

// heads: 1 to kSoftmaxHeads.
HWY_INLINE void softmax_tile(float* s, int64_t s_stride, int heads, int64_t rows, float* partial, int64_t stride) {
  switch (heads) {
    case 1: return softmax_heads<1>(s, s_stride, rows, partial, stride);
    case 2: return softmax_heads<2>(s, s_stride, rows, partial, stride);
    case 3: return softmax_heads<3>(s, s_stride, rows, partial, stride);
    default: return softmax_heads<kSoftmaxHeads>(s, s_stride, rows, partial, stride);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();
#endif
