// The last, partial vector of a row for Highway kernels, included once per target (see hwy/foreach_target.h).
#if defined(LONGKV_OPS_TAIL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGKV_OPS_TAIL_INL_H_
#undef LONGKV_OPS_TAIL_INL_H_
#else
#define LONGKV_OPS_TAIL_INL_H_
#endif

#include <hwy/highway.h>

#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Below AVX2 Highway's masked loads and stores touch the whole vector, beyond the end of the row.
#define LONGKV_MASKS_ARE_EXACT (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2)

// p[0, n) and zeros, n <= Lanes(d).
template <class D, class T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> load_first(D d, const T* p, size_t n) {
#if LONGKV_MASKS_ARE_EXACT
  return hn::MaskedLoad(hn::FirstN(d, n), d, p);
#else
  HWY_ALIGN T lanes[hn::MaxLanes(D())] = {};
  std::memcpy(lanes, p, n * sizeof(T));
  return hn::Load(d, lanes);
#endif
}

// Writes p[0, n).
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void store_first(hn::Vec<D> v, D d, T* p, size_t n) {
#if LONGKV_MASKS_ARE_EXACT
  hn::BlendedStore(v, hn::FirstN(d, n), d, p);
#else
  HWY_ALIGN T lanes[hn::MaxLanes(D())];
  hn::Store(v, d, lanes);
  std::memcpy(p, lanes, n * sizeof(T));
#endif
}

#undef LONGKV_MASKS_ARE_EXACT

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();

#endif  // include guard
