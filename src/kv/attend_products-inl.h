// The two products of a tile of decode attention, scores = q K^T and sums += p V, for every KV type and up to four
// query heads per pass. Rows are given by address, so a tile may be gathered from anywhere; the arithmetic of a row and
// head depends neither on its neighbours nor on how many heads share the pass.
#if defined(LONGKV_KV_ATTEND_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGKV_KV_ATTEND_PRODUCTS_INL_H_
#undef LONGKV_KV_ATTEND_PRODUCTS_INL_H_
#else
#define LONGKV_KV_ATTEND_PRODUCTS_INL_H_
#endif

#include <hwy/highway.h>

#include <cstring>

#include "kv/attend_ahead.h"
#include "kv/attend_kernel.h"
#include "kv/attend_quant.h"
#include "kv/codec/load-inl.h"
#include "ops/lane_sums-inl.h"

// Loops over registers: without full unrolling GCC keeps arrays of vectors in memory.
#ifndef LONGKV_UNROLL
#if defined(__clang__)
#define LONGKV_UNROLL _Pragma("unroll")
#else
#define LONGKV_UNROLL _Pragma("GCC unroll 8")
#endif
#endif

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Tiles hold at most kAttendTileMax rows and kTileGroups scales per side: tile_rows_for's limits give 64 rows of at
// most 8 groups (160 bytes of q4_0), 32 of 21 (384 bytes) or 16 of 32 (1024 channels). Those of x86, which allow more,
// meet no scales here: quantised rows have kernels of their own (attend_quant.h).
constexpr int64_t kRowPad = 8;
constexpr int64_t kTileGroups = 704;

constexpr bool is_quantized(KvType type) { return type == KvType::kQ8_0 || type == KvType::kQ4_0; }

struct TileRows {
  const uint8_t* row[kAttendTileMax];
  // Quantised types: [rows][dim / 32] or [dim / 32][padded rows]. fp8: [padded rows], times a power of two that makes
  // up for what load_channels() leaves out: 2^56 of keys, whose queries have 2^64; 2^88 of values, whose sums are kept
  // in units of 2^-32 until their chunk ends.
  float scale[kTileGroups];
};
inline constexpr float kFp8KeyLift = 0x1p56f;
inline constexpr float kFp8ValueLift = 0x1p88f;
inline constexpr float kFp8SumLift = 0x1p32f;

constexpr int64_t padded_rows(int64_t rows) { return (rows + kRowPad - 1) / kRowPad * kRowPad; }

// Makes a tile of `rows` rows whole: rows are repeated up to a multiple of kRowPad (their scores are thrown away), and
// the scales of quantised rows are widened once for all heads and slices.
HWY_INLINE void complete_tile(KvType type, int64_t dim, int64_t rows, bool by_group, float fp8_lift, TileRows& tile) {
  const int64_t padded = padded_rows(rows);
  for (int64_t r = rows; r < padded; ++r) tile.row[r] = tile.row[rows - 1];
  if (has_quant_kernels(type)) return;  // those kernels read the scales themselves
  if (type == KvType::kFp8) {
    for (int64_t r = 0; r < padded; ++r) {
      bf16_t bits;
      std::memcpy(&bits, tile.row[r] + dim, sizeof(bits));
      tile.scale[r] = to_float(bits) * fp8_lift;
    }
    return;
  }
  if (!is_quantized(type)) return;
  const DF d;
  const int64_t groups = dim / kKvQuantGroup;
  const int64_t at = type == KvType::kQ8_0 ? dim : dim / 2;
  HWY_ALIGN uint16_t bits[kTileGroups];
  for (int64_t r = 0; r < padded; ++r) {
    const auto* scales = reinterpret_cast<const uint16_t*>(tile.row[r] + at);
    for (int64_t g = 0; g < groups; ++g) bits[by_group ? g * padded + r : r * groups + g] = scales[g];
  }
  // padded * groups is a multiple of 8; where vectors are longer, the arrays' ends are too.
  for (int64_t i = 0; i < padded * groups; i += kLanes) {
    hn::StoreU(load_f16(reinterpret_cast<const uint8_t*>(bits + i)), d, tile.scale + i);
  }
}

struct KeyProduct {
  const TileRows* k;
  int64_t rows;
  int64_t dim;
  const float* q;  // [heads][q_stride], zero beyond dim
  int64_t q_stride;
  AheadRows ahead;
  float* s;  // [heads][kAttendTileMax]
};

struct ValueProduct {
  const TileRows* v;
  int64_t rows;
  int64_t dim;
  const float* p;  // [heads][kAttendTileMax]
  AheadRows ahead;
  float* sums;  // [heads][stride], padded to kAttendPad
  int64_t stride;
};

// The lane sums of a, b to first[0..1] and of c, e to second[0..1].
HWY_INLINE void store_sums(VF a, VF b, VF c, VF e, float* first, float* second) {
#if HWY_TARGET == HWY_SCALAR
  first[0] = hn::GetLane(a);
  first[1] = hn::GetLane(b);
  second[0] = hn::GetLane(c);
  second[1] = hn::GetLane(e);
#else
  const hn::FixedTag<float, 2> d2;
  const auto four = sums_of_four(DF(), a, b, c, e);
  hn::StoreU(hn::LowerHalf(d2, four), d2, first);
  hn::StoreU(hn::UpperHalf(d2, four), d2, second);
#endif
}

// kRows rows by kH heads are summed in registers: 8 to 12 sums hide the latency of the multiply-adds. kTail: the
// channels are no whole number of vectors.
template <KvType kType, int kH, bool kTail>
void key_product_of(const KeyProduct& product) {
  constexpr int kRows = is_quantized(kType) ? (kH <= 2 ? 4 : 2) : kH == 1 ? 8 : kH <= 3 ? 4 : 2;
  const DF d;
  const KeyProduct a = product;  // a copy that stores cannot alias
  const int64_t groups = a.dim / kKvQuantGroup;
  for (int64_t r0 = 0; r0 < a.rows; r0 += kRows) {
    prefetch_rows<true>(a.ahead, r0, r0 + kRows);
    VF sum[kRows][kH];
    const uint8_t* row[kRows];
    LONGKV_UNROLL
    for (int r = 0; r < kRows; ++r) {
      LONGKV_UNROLL
      for (int h = 0; h < kH; ++h) sum[r][h] = hn::Zero(d);
      row[r] = a.k->row[r0 + r];
    }
    if constexpr (is_quantized(kType)) {
      const float* scale = a.k->scale + r0 * groups;
      for (int64_t g = 0; g < groups; ++g) {
        VF group_scale[kRows];
        LONGKV_UNROLL
        for (int r = 0; r < kRows; ++r) group_scale[r] = hn::Set(d, scale[r * groups + g]);
        LONGKV_UNROLL
        for (int i = 0; i < kGroupVectors; ++i) {
          VF q[kH];
          LONGKV_UNROLL
          for (int h = 0; h < kH; ++h) q[h] = hn::LoadU(d, a.q + h * a.q_stride + g * kKvQuantGroup + i * kLanes);
          LONGKV_UNROLL
          for (int r = 0; r < kRows; ++r) {
            const VF k = hn::Mul(load_group<kType>(row[r], g, i), group_scale[r]);
            LONGKV_UNROLL
            for (int h = 0; h < kH; ++h) sum[r][h] = hn::MulAdd(k, q[h], sum[r][h]);
          }
        }
      }
    } else {
      int64_t c = 0;
      for (; c + kLanes <= a.dim; c += kLanes) {
        VF q[kH];
        LONGKV_UNROLL
        for (int h = 0; h < kH; ++h) q[h] = hn::LoadU(d, a.q + h * a.q_stride + c);
        LONGKV_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const VF k = load_channels<kType>(row[r], c);
          LONGKV_UNROLL
          for (int h = 0; h < kH; ++h) sum[r][h] = hn::MulAdd(k, q[h], sum[r][h]);
        }
      }
      if constexpr (kTail) {
        LONGKV_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const VF k = load_tail<kType>(row[r], c, a.dim - c);
          LONGKV_UNROLL
          for (int h = 0; h < kH; ++h) sum[r][h] = hn::MulAdd(k, hn::LoadU(d, a.q + h * a.q_stride + c), sum[r][h]);
        }
      }
    }
    float* s = a.s + r0;
    LONGKV_UNROLL
    for (int h = 0; h < kH; ++h) {
      LONGKV_UNROLL
      for (int r = 0; kRows >= 4 && r < kRows; r += 4) {
        float* at = s + h * kAttendTileMax + r;
        store_sums(sum[r][h], sum[r + 1][h], sum[r + 2][h], sum[r + 3][h], at, at + 2);
      }
      if (kRows == 2 && h % 2 == 0) {
        const int other = h + 1 < kH ? h + 1 : h;
        store_sums(sum[0][h], sum[1][h], sum[0][other], sum[1][other], s + h * kAttendTileMax,
                   s + other * kAttendTileMax);
      }
    }
  }
}

// Sums kVectors vectors of channels from c0 over the rows of a tile, in registers; rows are added one by one in order.
// p: [heads][p_stride]. Quantised types: the vectors lie in one group, kFirst is the first one's place in it, and p
// already has the group's scale of each row.
template <KvType kType, int kH, int kVectors, int kFirst>
HWY_INLINE void value_slice(const ValueProduct& product, int64_t c0, const float* HWY_RESTRICT p, int64_t p_stride,
                            bool prefetch) {
  const DF d;
  const ValueProduct a = product;
  const int64_t group = c0 / kKvQuantGroup;
  VF sum[kH][kVectors];
  LONGKV_UNROLL
  for (int h = 0; h < kH; ++h) {
    LONGKV_UNROLL
    for (int i = 0; i < kVectors; ++i) sum[h][i] = hn::LoadU(d, a.sums + h * a.stride + c0 + i * kLanes);
  }
  for (int64_t r = 0; r < a.rows; ++r) {
    if (prefetch) prefetch_rows<true>(a.ahead, r, r + 1);
    const uint8_t* row = a.v->row[r];
    VF weight[kH];
    LONGKV_UNROLL
    for (int h = 0; h < kH; ++h) weight[h] = hn::Set(d, p[h * p_stride + r]);
    LONGKV_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      VF v;
      if constexpr (is_quantized(kType)) {
        v = load_group<kType>(row, group, kFirst + i);
      } else {
        v = load_channels<kType>(row, c0 + i * kLanes);
      }
      LONGKV_UNROLL
      for (int h = 0; h < kH; ++h) sum[h][i] = hn::MulAdd(v, weight[h], sum[h][i]);
    }
  }
  LONGKV_UNROLL
  for (int h = 0; h < kH; ++h) {
    LONGKV_UNROLL
    for (int i = 0; i < kVectors; ++i) hn::StoreU(sum[h][i], d, a.sums + h * a.stride + c0 + i * kLanes);
  }
}

// Vectors per slice: 16 registers hold the sums, a row's vector and the weights; 32 where AVX-512 has them.
template <KvType kType, int kH>
constexpr int slice_vectors() {
  // Bytes of fp8 take a mask and a step more: with twelve sums GCC keeps some of those in memory.
  return (kH == 4 || (kH == 3 && kType == KvType::kFp8)) && HWY_MAX_BYTES < 64 ? 2 : 4;
}

// The slices of one group, kVectors vectors each, from vector kFirst on.
template <KvType kType, int kH, int kVectors, int kFirst>
HWY_INLINE void group_slices(const ValueProduct& a, int64_t g, const float* weight, bool prefetch) {
  if constexpr (kFirst < kGroupVectors) {
    value_slice<kType, kH, kVectors, kFirst>(a, g * kKvQuantGroup + kFirst * kLanes, weight, kAttendTileMax, prefetch);
    group_slices<kType, kH, kVectors, kFirst + kVectors>(a, g, weight, false);
  }
}

template <KvType kType, int kH>
void value_product_quantized(const ValueProduct& a) {
  constexpr int kVectors = slice_vectors<kType, kH>() < kGroupVectors ? slice_vectors<kType, kH>() : kGroupVectors;
  const DF d;
  const int64_t padded = padded_rows(a.rows);
  HWY_ALIGN float weight[kH * kAttendTileMax];  // one group's weights times scales
  for (int64_t g = 0; g < a.dim / kKvQuantGroup; ++g) {
    const float* scale = a.v->scale + g * padded;
    LONGKV_UNROLL
    for (int h = 0; h < kH; ++h) {
      for (int64_t r = 0; r < a.rows; r += kLanes) {
        hn::Store(hn::Mul(hn::Load(d, a.p + h * kAttendTileMax + r), hn::LoadU(d, scale + r)), d,
                  weight + h * kAttendTileMax + r);
      }
    }
    group_slices<kType, kH, kVectors, 0>(a, g, weight, g == 0);
  }
}

template <KvType kType, int kH>
void value_product_of(const ValueProduct& product) {
  ValueProduct a = product;
  HWY_ALIGN float scaled[kType == KvType::kFp8 ? kH * kAttendTileMax : 1];
  if constexpr (kType == KvType::kFp8) {
    const DF df;
    for (int h = 0; h < kH; ++h) {
      for (int64_t r = 0; r < a.rows; r += kLanes) {
        const int64_t at = h * kAttendTileMax + r;
        hn::Store(hn::Mul(hn::Load(df, a.p + at), hn::LoadU(df, a.v->scale + r)), df, scaled + at);
      }
    }
    a.p = scaled;
  }
  constexpr int kVectors = slice_vectors<kType, kH>();
  const DF d;
  bool prefetch = true;
  int64_t c = 0;
  for (; c + kVectors * kLanes <= a.dim; c += kVectors * kLanes) {
    value_slice<kType, kH, kVectors, 0>(a, c, a.p, kAttendTileMax, prefetch);
    prefetch = false;
  }
  for (; c + kLanes <= a.dim; c += kLanes) {
    value_slice<kType, kH, 1, 0>(a, c, a.p, kAttendTileMax, prefetch);
    prefetch = false;
  }
  if (c == a.dim) return;
  VF sum[kH];
  LONGKV_UNROLL
  for (int h = 0; h < kH; ++h) sum[h] = hn::LoadU(d, a.sums + h * a.stride + c);
  for (int64_t r = 0; r < a.rows; ++r) {
    const VF v = load_tail<kType>(a.v->row[r], c, a.dim - c);
    LONGKV_UNROLL
    for (int h = 0; h < kH; ++h) sum[h] = hn::MulAdd(v, hn::Set(d, a.p[h * kAttendTileMax + r]), sum[h]);
  }
  LONGKV_UNROLL
  for (int h = 0; h < kH; ++h) hn::StoreU(sum[h], d, a.sums + h * a.stride + c);
}

template <KvType kType, bool kTail>
void key_product_heads(int heads, const KeyProduct& a) {
  switch (heads) {
    case 1: return key_product_of<kType, 1, kTail>(a);
    case 2: return key_product_of<kType, 2, kTail>(a);
    case 3: return key_product_of<kType, 3, kTail>(a);
    default: return key_product_of<kType, 4, kTail>(a);
  }
}

template <KvType kType>
void key_product_dim(int heads, const KeyProduct& a) {
  if (kLanes > 1 && !is_quantized(kType) && a.dim % kLanes != 0) {
    key_product_heads<kType, !is_quantized(kType) && (kLanes > 1)>(heads, a);
  } else {
    key_product_heads<kType, false>(heads, a);
  }
}

template <KvType kType, int kH>
void value_product_any(const ValueProduct& a) {
  if constexpr (is_quantized(kType)) {
    value_product_quantized<kType, kH>(a);
  } else {
    value_product_of<kType, kH>(a);
  }
}

template <KvType kType>
void value_product_heads(int heads, const ValueProduct& a) {
  switch (heads) {
    case 1: return value_product_any<kType, 1>(a);
    case 2: return value_product_any<kType, 2>(a);
    case 3: return value_product_any<kType, 3>(a);
    default: return value_product_any<kType, 4>(a);
  }
}

// heads: 1 to 4.
HWY_INLINE void key_product(KvType type, int heads, const KeyProduct& a) {
  switch (type) {
    case KvType::kF32: return key_product_dim<KvType::kF32>(heads, a);
    case KvType::kF16: return key_product_dim<KvType::kF16>(heads, a);
    case KvType::kBf16: return key_product_dim<KvType::kBf16>(heads, a);
    case KvType::kQ8_0: return key_product_dim<KvType::kQ8_0>(heads, a);
    case KvType::kQ4_0: return key_product_dim<KvType::kQ4_0>(heads, a);
    case KvType::kFp8: return key_product_dim<KvType::kFp8>(heads, a);
    case KvType::kKivi2:
    case KvType::kKivi4: return;  // blocks of rows: kv/attend_blocks.h
  }
}

HWY_INLINE void value_product(KvType type, int heads, const ValueProduct& a) {
  switch (type) {
    case KvType::kF32: return value_product_heads<KvType::kF32>(heads, a);
    case KvType::kF16: return value_product_heads<KvType::kF16>(heads, a);
    case KvType::kBf16: return value_product_heads<KvType::kBf16>(heads, a);
    case KvType::kQ8_0: return value_product_heads<KvType::kQ8_0>(heads, a);
    case KvType::kQ4_0: return value_product_heads<KvType::kQ4_0>(heads, a);
    case KvType::kFp8: return value_product_heads<KvType::kFp8>(heads, a);
    case KvType::kKivi2:
    case KvType::kKivi4: return;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();
#endif
