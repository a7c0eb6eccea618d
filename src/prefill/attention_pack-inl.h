// Decoding of stored rows to fp32 and packing into panels for the product kernel, included once per target.
#if defined(LONGKV_PREFILL_ATTENTION_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGKV_PREFILL_ATTENTION_PACK_INL_H_
#undef LONGKV_PREFILL_ATTENTION_PACK_INL_H_
#else
#define LONGKV_PREFILL_ATTENTION_PACK_INL_H_
#endif

#include <hwy/highway.h>

#include <cstring>
#include <span>

#include "base/float16.h"
#include "kv/codec/codec.h"
#include "kv/types.h"

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class Half>
HWY_INLINE void decode_half(const uint8_t* src, int64_t dim, float* dst) {
  const hn::ScalableTag<float> df;
  const hn::Rebind<Half, decltype(df)> dh;
  const int64_t lanes = int64_t(hn::Lanes(df));
  const auto* half = reinterpret_cast<const Half*>(src);
  int64_t i = 0;
  for (; i + lanes <= dim; i += lanes) hn::StoreU(hn::PromoteTo(df, hn::LoadU(dh, half + i)), df, dst + i);
  for (; i < dim; ++i) {
    uint16_t bits;
    std::memcpy(&bits, src + 2 * i, 2);
    if constexpr (std::is_same_v<Half, hwy::float16_t>) {
      dst[i] = to_float(f16_t{bits});
    } else {
      dst[i] = to_float(bf16_t{bits});
    }
  }
}

HWY_INLINE float scale_at(const uint8_t* scales, int64_t group) {
  uint16_t bits;
  std::memcpy(&bits, scales + 2 * group, 2);
  return to_float(f16_t{bits});
}

// Formats of kv/codec/codec.h: values first, then one f16 scale per 32.
HWY_INLINE void decode_q8_0(const uint8_t* src, int64_t dim, float* dst) {
  const hn::ScalableTag<float> df;
  const hn::Rebind<int8_t, decltype(df)> d8;
  const hn::Rebind<int32_t, decltype(df)> d32;
  const int64_t lanes = int64_t(hn::Lanes(df));
  const auto* values = reinterpret_cast<const int8_t*>(src);
  for (int64_t g = 0; g < dim / 32; ++g) {
    const auto scale = hn::Set(df, scale_at(src + dim, g));
    for (int64_t i = 32 * g; i < 32 * g + 32; i += lanes) {
      hn::StoreU(hn::Mul(hn::ConvertTo(df, hn::PromoteTo(d32, hn::LoadU(d8, values + i))), scale), df, dst + i);
    }
  }
}

HWY_INLINE void decode_q4_0(const uint8_t* src, int64_t dim, float* dst) {
  const hn::ScalableTag<float> df;
  const hn::Rebind<uint8_t, decltype(df)> d8;
  const hn::Rebind<int32_t, decltype(df)> d32;
  const int64_t lanes = int64_t(hn::Lanes(df));
  const auto bias = hn::Set(d32, 8);
  const auto low_mask = hn::Set(d32, 15);
  for (int64_t g = 0; g < dim / 32; ++g) {
    const auto scale = hn::Set(df, scale_at(src + dim / 2, g));
    for (int64_t i = 0; i < 16; i += lanes) {
      const auto byte = hn::PromoteTo(d32, hn::LoadU(d8, src + 16 * g + i));
      const auto low = hn::Sub(hn::And(byte, low_mask), bias);
      const auto high = hn::Sub(hn::ShiftRight<4>(byte), bias);
      hn::StoreU(hn::Mul(hn::ConvertTo(df, low), scale), df, dst + 32 * g + i);
      hn::StoreU(hn::Mul(hn::ConvertTo(df, high), scale), df, dst + 32 * g + 16 + i);
    }
  }
}

HWY_INLINE void decode_stored_row(KvType type, const uint8_t* src, int64_t dim, float* dst) {
  switch (type) {
    case KvType::kF32: std::memcpy(dst, src, size_t(dim) * sizeof(float)); return;
    case KvType::kF16: decode_half<hwy::float16_t>(src, dim, dst); return;
    case KvType::kBf16: decode_half<hwy::bfloat16_t>(src, dim, dst); return;
    case KvType::kQ8_0: decode_q8_0(src, dim, dst); return;
    case KvType::kQ4_0: decode_q4_0(src, dim, dst); return;
    case KvType::kFp8: decode_row(type, src, dim, dst); return;
    case KvType::kKivi2:
    case KvType::kKivi4: return;  // never rows by themselves
  }
}

// Rows of a head, wherever they lie.
HWY_INLINE void decode_key(const KvHeadView& kv, int64_t row, float* dst) {
  if (kv.middle != nullptr && row >= kv.middle->begin && row < kv.middle->end)
    return decode_k_rows(kv, row, row + 1, dst);
  decode_stored_row(kv.k_type, kv.k + row * kv.k_stride, kv.dim_k, dst);
}

HWY_INLINE void decode_value(const KvHeadView& kv, int64_t row, float* dst) {
  if (kv.middle != nullptr && row >= kv.middle->begin && row < kv.middle->end)
    return decode_v_rows(kv, row, row + 1, dst);
  decode_stored_row(kv.v_type, kv.v + row * kv.v_stride, kv.dim_v, dst);
}

// Interleaves N decoded rows: panel[i * N + j] = decoded[j * dim + i].
template <int N>
HWY_INLINE void interleave_panel(const float* decoded, int64_t dim, float* panel) {
  for (int64_t i = 0; i < dim; i += 8) {
    for (int64_t j = 0; j < N; ++j) {
      const float* src = decoded + j * dim + i;
      for (int64_t c = 0; c < 8; ++c) panel[(i + c) * N + j] = src[c];
    }
  }
}

// K rows [begin, end) of panels of N rows that start at row `base`, as dst[(row - base) / N][dim][N]. Rows of the
// panels outside [begin, end) become zero and are not read. `decoded`: [N][dim].
template <int N>
void pack_keys(const KvHeadView& kv, int64_t base, int64_t begin, int64_t end, float* decoded, float* dst) {
  const int64_t dim = kv.dim_k;
  for (int64_t p = (begin - base) / N; p * N < end - base; ++p) {
    for (int64_t j = 0; j < N; ++j) {
      const int64_t row = base + p * N + j;
      if (row >= begin && row < end) {
        decode_key(kv, row, decoded + j * dim);
      } else {
        std::memset(decoded + j * dim, 0, size_t(dim) * sizeof(float));
      }
    }
    interleave_panel<N>(decoded, dim, dst + p * N * dim);
  }
}

// The same for K rows given by number, in panels of N of them; the last panel is filled up with zeros.
template <int N>
void pack_listed_keys(const KvHeadView& kv, std::span<const int64_t> rows, float* decoded, float* dst) {
  const int64_t dim = kv.dim_k;
  const int64_t n = int64_t(rows.size());
  for (int64_t first = 0; first < n; first += N) {
    for (int64_t j = 0; j < N; ++j) {
      if (first + j < n) {
        decode_key(kv, rows[size_t(first + j)], decoded + j * dim);
      } else {
        std::memset(decoded + j * dim, 0, size_t(dim) * sizeof(float));
      }
    }
    interleave_panel<N>(decoded, dim, dst + first * dim);
  }
}

// V rows in panels of N channels: dst[channel / N][row - base][N], `tile` rows from panel to panel. Channels beyond
// dim_v, and rows of the touched groups of N rows outside [begin, end), become zero.
template <int N>
void pack_values(const KvHeadView& kv, int64_t base, int64_t tile, int64_t begin, int64_t end, float* decoded,
                 float* dst) {
  const int64_t dim = kv.dim_v;
  const int64_t panels = (dim + N - 1) / N;
  std::memset(decoded, 0, size_t(panels * N) * sizeof(float));
  const int64_t first = (begin - base) / N * N;
  const int64_t last = (end - base + N - 1) / N * N;
  for (int64_t r = first; r < last; ++r) {
    const int64_t row = base + r;
    const bool held = row >= begin && row < end;
    if (held) decode_value(kv, row, decoded);
    for (int64_t p = 0; p < panels; ++p) {
      float* to = dst + (p * tile + r) * N;
      if (held) {
        std::memcpy(to, decoded + p * N, N * sizeof(float));
      } else {
        std::memset(to, 0, N * sizeof(float));
      }
    }
  }
}

// The same for V rows given by number; rows beyond them up to a multiple of N become zero.
template <int N>
void pack_listed_values(const KvHeadView& kv, std::span<const int64_t> rows, int64_t tile, float* decoded, float* dst) {
  const int64_t dim = kv.dim_v;
  const int64_t panels = (dim + N - 1) / N;
  const int64_t n = int64_t(rows.size());
  std::memset(decoded, 0, size_t(panels * N) * sizeof(float));
  for (int64_t r = 0; r < (n + N - 1) / N * N; ++r) {
    if (r < n) decode_value(kv, rows[size_t(r)], decoded);
    for (int64_t p = 0; p < panels; ++p) {
      float* to = dst + (p * tile + r) * N;
      if (r < n) {
        std::memcpy(to, decoded + p * N, N * sizeof(float));
      } else {
        std::memset(to, 0, N * sizeof(float));
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();

#endif  // include guard
