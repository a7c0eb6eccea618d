#include "kv/codec/codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/float16.h"
#include "kv/codec/middle.h"
#include "kv/layout.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kv/codec/codec.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kv/codec/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void encode_f16(const float* src, int64_t dim, uint8_t* dst) {
  auto* out = reinterpret_cast<f16_t*>(dst);
  int64_t c = 0;
#if HWY_TARGET != HWY_SCALAR  // its conversion does not round subnormals or carry infinities
  const DF d;
  const hn::Rebind<hwy::float16_t, DF> d16;
  for (; c + kLanes <= dim; c += kLanes) {
    hn::StoreU(hn::DemoteTo(d16, hn::LoadU(d, src + c)), d16, reinterpret_cast<hwy::float16_t*>(out + c));
  }
#endif
  for (; c < dim; ++c) out[c] = to_f16(src[c]);
}

void encode_bf16(const float* src, int64_t dim, uint8_t* dst) {
  auto* out = reinterpret_cast<bf16_t*>(dst);
  const hn::RebindToUnsigned<DF> du;
  const DF d;
  const hn::Rebind<uint16_t, DF> d16;
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) {
    const VF x = hn::LoadU(d, src + c);
    const auto bits = hn::BitCast(du, x);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fff))));
    const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40));  // adding to a NaN could wrap it to zero
    const auto kept = hn::IfThenElse(hn::RebindMask(du, hn::Ne(x, x)), quiet, rounded);
    hn::StoreU(hn::TruncateTo(d16, kept), d16, reinterpret_cast<uint16_t*>(out + c));
  }
  for (; c < dim; ++c) out[c] = to_bf16(src[c]);
}

// Rounds x * inverse to integers and clamps them to [lo, hi]; group of 32, result in `q`.
HWY_INLINE void round_group(const float* src, float inverse, int lo, int hi, int32_t* q) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  for (int64_t i = 0; i < kKvQuantGroup; i += kLanes) {
    const auto v = hn::NearestInt(hn::Mul(hn::LoadU(d, src + i), hn::Set(d, inverse)));
    hn::Store(hn::Min(hn::Max(v, hn::Set(di, lo)), hn::Set(di, hi)), di, q + i);
  }
}

struct GroupRange {
  float lo, hi;
  float poison;  // 0, or NaN when a value is not finite
};

HWY_INLINE GroupRange group_range(const float* src) {
  const DF d;
  VF lo = hn::LoadU(d, src), hi = lo, poison = hn::Mul(lo, hn::Zero(d));
  for (int64_t i = kLanes; i < kKvQuantGroup; i += kLanes) {
    const VF x = hn::LoadU(d, src + i);
    lo = hn::Min(lo, x);
    hi = hn::Max(hi, x);
    poison = hn::Add(poison, hn::Mul(x, hn::Zero(d)));
  }
  return {hn::GetLane(hn::MinOfLanes(d, lo)), hn::GetLane(hn::MaxOfLanes(d, hi)),
          hn::GetLane(hn::SumOfLanes(d, poison))};
}

// The stored scale is rounded to f16 first and its inverse used for the values, so the rounding of the scale does not
// add to theirs.
HWY_INLINE float inverse_of(f16_t scale) {
  const float s = to_float(scale);
  return s != 0.0f ? 1.0f / s : 0.0f;
}

void encode_q8_0(const float* src, int64_t dim, uint8_t* dst) {
  auto* values = reinterpret_cast<int8_t*>(dst);
  auto* scales = reinterpret_cast<f16_t*>(dst + dim);
  HWY_ALIGN int32_t q[kKvQuantGroup];
  for (int64_t g = 0; g < dim / kKvQuantGroup; ++g) {
    const GroupRange range = group_range(src + g * kKvQuantGroup);
    const f16_t scale = to_f16(std::max(range.hi, -range.lo) / 127.0f + range.poison);
    round_group(src + g * kKvQuantGroup, inverse_of(scale), -127, 127, q);
    for (int64_t i = 0; i < kKvQuantGroup; ++i) values[g * kKvQuantGroup + i] = int8_t(q[i]);
    scales[g] = scale;
  }
}

void encode_q4_0(const float* src, int64_t dim, uint8_t* dst) {
  constexpr int64_t kHalf = kKvQuantGroup / 2;
  auto* scales = reinterpret_cast<f16_t*>(dst + dim / 2);
  HWY_ALIGN int32_t q[kKvQuantGroup];
  for (int64_t g = 0; g < dim / kKvQuantGroup; ++g) {
    const GroupRange range = group_range(src + g * kKvQuantGroup);
    // The nibble range -8..7 is lopsided: the value of largest magnitude gets -8, whatever its sign.
    const float extreme = range.hi > -range.lo ? range.hi : range.lo;
    const f16_t scale = to_f16(extreme / -8.0f + range.poison);
    round_group(src + g * kKvQuantGroup, inverse_of(scale), -8, 7, q);
    for (int64_t i = 0; i < kHalf; ++i) dst[g * kHalf + i] = uint8_t((q[i] + 8) | ((q[i + kHalf] + 8) << 4));
    scales[g] = scale;
  }
}

// Adding half a step, less one unit in the last place of an even value, and cutting rounds to nearest even.
void encode_fp8(const float* src, int64_t dim, uint8_t* dst) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  constexpr float kLargest = 448.0f;
  VF largest = hn::Zero(d), poison = hn::Zero(d);
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) {
    const VF x = hn::LoadU(d, src + c);
    largest = hn::Max(largest, hn::Abs(x));
    poison = hn::Add(poison, hn::Mul(x, hn::Zero(d)));
  }
  float amax = hn::GetLane(hn::MaxOfLanes(d, largest)), bad = hn::GetLane(hn::SumOfLanes(d, poison));
  for (; c < dim; ++c) {
    amax = std::max(amax, std::abs(src[c]));
    bad += src[c] * 0.0f;
  }
  // Below, 448 / amax would not be finite.
  const bf16_t scale = to_bf16((amax < 0x1p-100f ? 0.0f : amax / kLargest) + bad);
  const float s = to_float(scale);
  const float inverse = s != 0.0f && s == s ? 1.0f / s : 0.0f;
  const auto code = [&](VF x) {
    const auto bits = hn::BitCast(di, hn::Mul(hn::Mul(x, hn::Set(d, inverse)), hn::Set(d, 0x1p-120f)));
    const auto magnitude = hn::And(bits, hn::Set(di, 0x7fffffff));
    const auto odd = hn::And(hn::ShiftRight<kFp8Shift>(magnitude), hn::Set(di, 1));
    const auto rounded = hn::ShiftRight<kFp8Shift>(hn::Add(magnitude, hn::Add(odd, hn::Set(di, 0x7ffff))));
    const auto sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(di, 0x80));
    return hn::Or(hn::Min(rounded, hn::Set(di, 0x7e)), sign);
  };
  HWY_ALIGN int32_t codes[HWY_MAX_BYTES / 4];
  HWY_ALIGN float lanes[HWY_MAX_BYTES / 4] = {};
  for (c = 0; c < dim; c += kLanes) {
    const int64_t n = std::min(kLanes, dim - c);
    std::memcpy(lanes, src + c, size_t(n) * sizeof(float));
    hn::Store(code(hn::Load(d, lanes)), di, codes);
    for (int64_t i = 0; i < n; ++i) dst[c + i] = uint8_t(codes[i]);
  }
  std::memcpy(dst + dim, &scale, sizeof(scale));
}

void decode_fp8(const uint8_t* src, int64_t dim, float* dst) {
  const DF d;
  bf16_t bits;
  std::memcpy(&bits, src + dim, sizeof(bits));
  // 2^120 in two exact steps: with the scale it could exceed fp32.
  const VF scale = hn::Set(d, to_float(bits) * 0x1p20f), lift = hn::Set(d, 0x1p100f);
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) {
    hn::StoreU(hn::Mul(hn::Mul(load_channels<KvType::kFp8>(src, c), lift), scale), d, dst + c);
  }
  if (c < dim) {
    HWY_ALIGN float lanes[HWY_MAX_BYTES / 4];
    hn::Store(hn::Mul(hn::Mul(load_tail<KvType::kFp8>(src, c, dim - c), lift), scale), d, lanes);
    std::memcpy(dst + c, lanes, size_t(dim - c) * sizeof(float));
  }
}

template <KvType kType>
void decode(const uint8_t* src, int64_t dim, float* dst) {
  const DF d;
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) hn::StoreU(load_channels<kType>(src, c), d, dst + c);
  if (c < dim) {
    HWY_ALIGN float lanes[kLanes];
    hn::Store(load_tail<kType>(src, c, dim - c), d, lanes);
    std::memcpy(dst + c, lanes, size_t(dim - c) * sizeof(float));
  }
}

template <KvType kType>
void decode_groups(const uint8_t* src, int64_t dim, float* dst) {
  const DF d;
  const auto* scales = reinterpret_cast<const f16_t*>(src + (kType == KvType::kQ8_0 ? dim : dim / 2));
  for (int64_t g = 0; g < dim / kKvQuantGroup; ++g) {
    const VF scale = hn::Set(d, to_float(scales[g]));
    for (int i = 0; i < kGroupVectors; ++i) {
      hn::StoreU(hn::Mul(load_group<kType>(src, g, i), scale), d, dst + g * kKvQuantGroup + i * kLanes);
    }
  }
}

void EncodeRow(KvType type, const float* src, int64_t dim, uint8_t* dst) {
  switch (type) {
    case KvType::kF32: std::memcpy(dst, src, size_t(dim) * sizeof(float)); break;
    case KvType::kF16: encode_f16(src, dim, dst); break;
    case KvType::kBf16: encode_bf16(src, dim, dst); break;
    case KvType::kQ8_0: encode_q8_0(src, dim, dst); break;
    case KvType::kQ4_0: encode_q4_0(src, dim, dst); break;
    case KvType::kFp8: encode_fp8(src, dim, dst); break;
    case KvType::kKivi2:
    case KvType::kKivi4: break;  // blocks of rows: kv/codec/kivi.h
  }
}

void DecodeRow(KvType type, const uint8_t* src, int64_t dim, float* dst) {
  switch (type) {
    case KvType::kF32: decode<KvType::kF32>(src, dim, dst); break;
    case KvType::kF16: decode<KvType::kF16>(src, dim, dst); break;
    case KvType::kBf16: decode<KvType::kBf16>(src, dim, dst); break;
    case KvType::kQ8_0: decode_groups<KvType::kQ8_0>(src, dim, dst); break;
    case KvType::kQ4_0: decode_groups<KvType::kQ4_0>(src, dim, dst); break;
    case KvType::kFp8: decode_fp8(src, dim, dst); break;
    case KvType::kKivi2:
    case KvType::kKivi4: break;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(EncodeRow);
HWY_EXPORT(DecodeRow);

void encode_row(KvType type, const float* src, int64_t dim, uint8_t* dst) {
  HWY_DYNAMIC_DISPATCH(EncodeRow)(type, src, dim, dst);
}

void decode_row(KvType type, const uint8_t* src, int64_t dim, float* dst) {
  HWY_DYNAMIC_DISPATCH(DecodeRow)(type, src, dim, dst);
}

void encode_rows(KvType type, const float* src, int64_t src_stride, int64_t n, int64_t dim, uint8_t* dst,
                 int64_t dst_stride) {
  const auto encode = HWY_DYNAMIC_DISPATCH(EncodeRow);
  for (int64_t i = 0; i < n; ++i) encode(type, src + i * src_stride, dim, dst + row_offset(i, dst_stride));
}

void decode_rows(KvType type, const uint8_t* src, int64_t src_stride, int64_t n, int64_t dim, float* dst,
                 int64_t dst_stride) {
  const auto decode = HWY_DYNAMIC_DISPATCH(DecodeRow);
  for (int64_t i = 0; i < n; ++i) decode(type, src + row_offset(i, src_stride), dim, dst + i * dst_stride);
}

namespace {

// Calls plain(begin, end) and middle(begin, end) for the parts of [begin, end) in order, `middle` with rows counted
// from the middle's first.
template <class Plain, class Middle>
void each_region(const KvHeadView& head, int64_t begin, int64_t end, const Plain& plain, const Middle& middle) {
  const int64_t from = head.middle == nullptr ? end : std::clamp(head.middle->begin, begin, end);
  const int64_t to = head.middle == nullptr ? end : std::clamp(head.middle->end, begin, end);
  if (begin < from) plain(begin, from);
  if (from < to) middle(from - head.middle->begin, to - head.middle->begin);
  if (to < end) plain(to, end);
}

}  // namespace

void decode_k_rows(const KvHeadView& head, int64_t begin, int64_t end, float* dst) {
  each_region(
      head, begin, end,
      [&](int64_t from, int64_t to) {
        decode_rows(head.k_type, head.k + row_offset(from, head.k_stride), head.k_stride, to - from, head.dim_k,
                    dst + (from - begin) * head.dim_k, head.dim_k);
      },
      [&](int64_t from, int64_t to) {
        decode_middle_k(head, from, to, dst + (from + head.middle->begin - begin) * head.dim_k);
      });
}

void decode_v_rows(const KvHeadView& head, int64_t begin, int64_t end, float* dst) {
  each_region(
      head, begin, end,
      [&](int64_t from, int64_t to) {
        decode_rows(head.v_type, head.v + row_offset(from, head.v_stride), head.v_stride, to - from, head.dim_v,
                    dst + (from - begin) * head.dim_v, head.dim_v);
      },
      [&](int64_t from, int64_t to) {
        decode_middle_v(head, from, to, dst + (from + head.middle->begin - begin) * head.dim_v);
      });
}

}  // namespace longkv
#endif  // HWY_ONCE
