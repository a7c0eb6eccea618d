// Sums of a vector's lanes for Highway kernels, included once per target (see hwy/foreach_target.h).
#if defined(LONGKV_OPS_LANE_SUMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGKV_OPS_LANE_SUMS_INL_H_
#undef LONGKV_OPS_LANE_SUMS_INL_H_
#else
#define LONGKV_OPS_LANE_SUMS_INL_H_
#endif

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET != HWY_SCALAR
// Sums of the lanes of four vectors of at least four floats, in one fixed order: lanes i and i + 2 of each 128-bit
// block, then i and i + 1, then the blocks.
template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Vec<hn::FixedTag<float, 4>> sums_of_four(D d, V a, V b, V c, V e) {
  const hn::RepartitionToWide<D> dw;
  const V ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const V ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const V lo = hn::BitCast(d, hn::InterleaveLower(dw, hn::BitCast(dw, ab), hn::BitCast(dw, ce)));
  const V hi = hn::BitCast(d, hn::InterleaveUpper(dw, hn::BitCast(dw, ab), hn::BitCast(dw, ce)));
  const V blocks = hn::Add(lo, hi);
  if constexpr (hn::MaxLanes(D()) == 4) {
    return blocks;
  } else {
    const hn::Half<D> dh;
    const auto half = hn::Add(hn::LowerHalf(dh, blocks), hn::UpperHalf(dh, blocks));
    if constexpr (hn::MaxLanes(D()) == 8) {
      return half;
    } else {
      static_assert(hn::MaxLanes(D()) == 16);
      const hn::Half<decltype(dh)> dq;
      return hn::Add(hn::LowerHalf(dq, half), hn::UpperHalf(dq, half));
    }
  }
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();

#endif  // include guard
