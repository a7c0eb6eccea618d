// 2^x and tanh for Highway kernels, included once per target (see hwy/foreach_target.h).
#if defined(LONGKV_OPS_FAST_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGKV_OPS_FAST_EXP_INL_H_
#undef LONGKV_OPS_FAST_EXP_INL_H_
#else
#define LONGKV_OPS_FAST_EXP_INL_H_
#endif

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

constexpr float kLog2E = 1.44269504088896341f;

// 2^x for x <= 127; exactly 1 at 0, exactly 0 below -126 (-inf included), NaN for NaN. Relative error below 2e-7.
//
// x = n + f with n the nearest integer, found by adding 1.5 * 2^23, which leaves n in the low mantissa bits. The
// polynomial is the minimax fit of 2^f on [-0.5, 0.5] in relative error (2e-9 before rounding).
template <class D, class V = hn::Vec<D>>
HWY_INLINE V fast_exp2(D d, V x) {
  const hn::RebindToSigned<D> di;
  const V magic = hn::Set(d, 12582912.0f);
  const V shifted = hn::Add(x, magic);
  const V f = hn::Sub(x, hn::Sub(shifted, magic));
  V p = hn::Set(d, 0x1.41d334p-13f);
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.5f456ap-10f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.3b2dbcp-7f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.c6aed4p-5f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.ebfbdap-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.62e43p-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  // Adding n to the exponent field multiplies by 2^n; the other bits of `shifted` leave the word by the shift.
  const V scaled = hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::BitCast(di, shifted))));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -126.0f)), scaled);
}

// tanh(y) where x = 2 * log2(e) * y is given; absolute error below 2e-7.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V fast_tanh_of_log2(D d, V x) {
  const V one = hn::Set(d, 1.0f);
  // Beyond 2^+-48 the result has rounded to +-1 long since; NaN passes (the comparisons are false).
  x = hn::IfThenElse(hn::Gt(x, hn::Set(d, 48.0f)), hn::Set(d, 48.0f), x);
  x = hn::IfThenElse(hn::Lt(x, hn::Set(d, -48.0f)), hn::Set(d, -48.0f), x);
  return hn::Sub(one, hn::Div(hn::Set(d, 2.0f), hn::Add(one, fast_exp2(d, x))));
}

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();

#endif  // include guard
