// Loads of stored K and V channels as fp32 vectors, for Highway kernels. Included once per target, no include guard of
// the usual kind (Highway's -inl.h convention).
#if defined(LONGKV_KV_CODEC_LOAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGKV_KV_CODEC_LOAD_INL_H_
#undef LONGKV_KV_CODEC_LOAD_INL_H_
#else
#define LONGKV_KV_CODEC_LOAD_INL_H_
#endif

#include <hwy/highway.h>

#include <bit>
#include <cstring>

#include "base/float16.h"
#include "kv/types.h"

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;
// 1, 4, 8 or 16: a group of 32 channels is always a whole number of vectors.
inline constexpr int64_t kLanes = HWY_TARGET == HWY_SCALAR ? 1 : HWY_MAX_BYTES / 4;

HWY_INLINE VF load_f16(const uint8_t* p) {
  const DF d;
#if HWY_TARGET == HWY_SCALAR
  // Highway's scalar conversion does not carry infinities.
  f16_t half;
  std::memcpy(&half, p, sizeof(half));
  return hn::Set(d, to_float(half));
#else
  const hn::Rebind<hwy::float16_t, DF> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
#endif
}

// The bits of an E4M3 value below those of fp32, where it reads as value * 2^-120: exponents keep their meaning but for
// the bias, subnormals included.
inline constexpr int kFp8Shift = 20;
inline constexpr uint32_t kFp8Mask = 0x87f00000u;

// kLanes channels of an f32, f16, bf16 or fp8 row, starting at channel c; those of fp8 are value / scale * 2^-120.
template <KvType kType>
HWY_INLINE VF load_channels(const uint8_t* HWY_RESTRICT row, int64_t c) {
  const DF d;
  static_assert(kType != KvType::kQ8_0 && kType != KvType::kQ4_0);
  if constexpr (kType == KvType::kF32) {
    return hn::LoadU(d, reinterpret_cast<const float*>(row) + c);
  } else if constexpr (kType == KvType::kFp8) {
    const hn::RebindToSigned<DF> di;
    const hn::Rebind<int8_t, DF> d8;
    const auto wide = hn::PromoteTo(di, hn::LoadU(d8, reinterpret_cast<const int8_t*>(row + c)));
    return hn::BitCast(d, hn::And(hn::ShiftLeft<kFp8Shift>(wide), hn::Set(di, int32_t(kFp8Mask))));
  } else if constexpr (kType == KvType::kF16) {
    return load_f16(row + 2 * c);
  } else {
    const hn::RebindToUnsigned<DF> du;
    const hn::Rebind<uint16_t, DF> d16;
    return hn::BitCast(
        d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(row + 2 * c)))));
  }
}

inline constexpr int kGroupVectors = int(kKvQuantGroup / kLanes);

// Vector i of kGroupVectors of group g of a q8_0 or q4_0 row, still to be multiplied by the group's scale. With i known
// to the compiler, the two halves of a q4_0 group share the loads of their bytes.
template <KvType kType>
HWY_INLINE VF load_group(const uint8_t* HWY_RESTRICT row, int64_t g, int i) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  static_assert(kType == KvType::kQ8_0 || kType == KvType::kQ4_0);
  if constexpr (kType == KvType::kQ8_0) {
    const hn::Rebind<int8_t, DF> d8;
    const auto* values = reinterpret_cast<const int8_t*>(row + g * kKvQuantGroup + i * kLanes);
    return hn::ConvertTo(d, hn::PromoteTo(di, hn::LoadU(d8, values)));
  } else {
    const hn::Rebind<uint8_t, DF> d8;
    constexpr int64_t kHalf = kKvQuantGroup / 2;
    const auto wide = hn::PromoteTo(di, hn::LoadU(d8, row + g * kHalf + i * kLanes % kHalf));
    const auto nibble = i * kLanes < kHalf ? hn::And(wide, hn::Set(di, 15)) : hn::ShiftRight<4>(wide);
    return hn::ConvertTo(d, hn::Sub(nibble, hn::Set(di, 8)));
  }
}

// The last `n` < kLanes channels of a row from channel c; the other lanes are zero. Reads nothing beyond the row.
template <KvType kType>
HWY_INLINE VF load_tail(const uint8_t* HWY_RESTRICT row, int64_t c, int64_t n) {
  const DF d;
  HWY_ALIGN float lanes[HWY_MAX_BYTES / 4] = {};
  for (int64_t i = 0; i < n; ++i) {
    if constexpr (kType == KvType::kF32) {
      lanes[i] = reinterpret_cast<const float*>(row)[c + i];
    } else if constexpr (kType == KvType::kF16) {
      lanes[i] = to_float(reinterpret_cast<const f16_t*>(row)[c + i]);
    } else if constexpr (kType == KvType::kBf16) {
      lanes[i] = to_float(reinterpret_cast<const bf16_t*>(row)[c + i]);
    } else if constexpr (kType == KvType::kFp8) {
      lanes[i] = std::bit_cast<float>((uint32_t(int32_t(int8_t(row[c + i]))) << kFp8Shift) & kFp8Mask);
    }
    // Quantised rows have whole groups of 32, so they have no tail.
  }
  return hn::Load(d, lanes);
}

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();
#endif
