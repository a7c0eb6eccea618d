// AVX-512 VNNI bodies of attend_quant.h for fp8 rows: codes become 16-bit integers, 64 of them by twelve instructions,
// which meet queries and weights of 16 bits.
//
// A code's bits are s eeee mmm, its value (8 + m) 2^(e - 10), or m 2^-9 where e is 0. Two tables of bytes, by the lower
// and by the upper four bits, hold (8 + m) 2^(e mod 2) and +-4^(e / 2 mod 4); where e < 8 their product is divided by
// 256 and rounded. That is the value in units of 2^-5, at most 15360. Of e = 0 the tables make half of 8 + m: that and
// the value are below half a unit and become 0 both.
//
// Rows of keys are turned over by fours, so that a lane belongs to a row and to 16 of every 64 channels, and rows of
// values by twos, so that a lane has a channel of both.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kv/attend_ahead.h"
#include "kv/attend_heads.h"
#include "kv/attend_kernel.h"
#include "kv/attend_quant.h"
#include "kv/attend_x86_512.h"

namespace longkv::avx512vnni {

namespace {

constexpr float kUnit = 0x1p-5f;
// The largest sum of magnitudes that 15360 may be multiplied by is 139810; rounding adds at most half a step for each
// of 64 numbers.
constexpr float kMostSteps = 139000.0f;
constexpr float kMostOfOne = 32767.0f;
// Below, the inverse of a step might not be finite. A row's scale is zero or above 2^-109.
constexpr float kTiny = 0x1p-110f;

constexpr int64_t kStep = 64;         // channels
constexpr int64_t kMostSummed = 256;  // channels of a query whose products are summed in int32
// A prepared query: for every 64 channels vectors [4 dwords of 16 channels][even, odd], whose 128-bit block k has four
// times the channels 16 k + 4 i and + 2, or + 1 and + 3; then the scale.
constexpr int64_t kStepBytes = 8 * 64;

struct alignas(64) Bytes {
  uint8_t of[64];
};
constexpr Bytes mantissas() {
  Bytes b{};
  for (int i = 0; i < 64; ++i) b.of[i] = uint8_t((8 + i % 8) << (3 + i / 8 % 2));
  return b;
}
constexpr Bytes powers() {
  Bytes b{};
  for (int i = 0; i < 64; ++i) b.of[i] = uint8_t((i & 8 ? -1 : 1) * (1 << 2 * (i % 4)));
  return b;
}
constexpr Bytes kMantissas = mantissas(), kPowers = powers();

struct Tables {
  __m512i mantissa = _mm512_load_si512(kMantissas.of), power = _mm512_load_si512(kPowers.of);
};

// The integers of 64 codes, those of even and of odd bytes.
struct Levels {
  __m512i even, odd;
};
inline Levels levels_of(__m512i x, const Tables& t) {
  const __m512i nibble = _mm512_set1_epi8(15), step = _mm512_set1_epi16(128);
  const __m512i low = _mm512_and_si512(x, nibble), high = _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble);
  const __m512i power = _mm512_shuffle_epi8(t.power, high);
  const __m512i even = _mm512_maddubs_epi16(_mm512_maskz_shuffle_epi8(0x5555555555555555u, t.mantissa, low), power);
  const __m512i odd = _mm512_maddubs_epi16(_mm512_maskz_shuffle_epi8(0xaaaaaaaaaaaaaaaau, t.mantissa, low), power);
  return {_mm512_mask_mulhrs_epi16(even, _mm512_testn_epi16_mask(x, _mm512_set1_epi16(0x40)), even, step),
          _mm512_mask_mulhrs_epi16(odd, _mm512_testn_epi16_mask(x, _mm512_set1_epi16(0x4000)), odd, step)};
}

// Bytes [at, at + 64) of a row; kPart: only those in `lanes`, the others zero.
template <bool kPart>
inline __m512i load_codes(const uint8_t* row, int64_t at, __mmask64 lanes) {
  return kPart ? _mm512_maskz_loadu_epi8(lanes, row + at) : _mm512_loadu_si512(row + at);
}
inline __mmask64 codes_left(int64_t n) { return (uint64_t(1) << n) - 1; }

// Scales of the rows, which are bf16 behind the codes, as bits of fp32.
inline void scales_of(const uint8_t* const* row, int64_t rows, int64_t dim, uint32_t* bits) {
  for (int64_t r = 0; r < rows; ++r) {
    uint16_t half;
    std::memcpy(&half, row[r] + dim, sizeof(half));
    bits[r] = uint32_t(half) << 16;
  }
}

// Adds the products of 64 channels of four rows: lane l of a sum gets those of row l % 4.
template <int kH, bool kPart>
inline void add_keys(const uint8_t* const* row, int64_t c, __mmask64 lanes, const uint8_t* q, int64_t q_stride,
                     const Tables& tables, __m512i (&sum)[kH][2]) {
  __m512i a = load_codes<kPart>(row[0], c, lanes), b = load_codes<kPart>(row[1], c, lanes);
  __m512i d = load_codes<kPart>(row[2], c, lanes), e = load_codes<kPart>(row[3], c, lanes);
  // Rows lie across cache lines: GCC would read them twice.
  settle(a), settle(b), settle(d), settle(e);
  const __m512i ab = _mm512_unpacklo_epi32(a, b), de = _mm512_unpacklo_epi32(d, e);
  const __m512i ab2 = _mm512_unpackhi_epi32(a, b), de2 = _mm512_unpackhi_epi32(d, e);
  const __m512i turned[4] = {_mm512_unpacklo_epi64(ab, de), _mm512_unpackhi_epi64(ab, de),
                             _mm512_unpacklo_epi64(ab2, de2), _mm512_unpackhi_epi64(ab2, de2)};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Levels x = levels_of(turned[i], tables);
#pragma GCC unroll 4
    for (int h = 0; h < kH; ++h) {
      const uint8_t* at = q + h * q_stride + 128 * i;
      sum[h][0] = _mm512_dpwssd_epi32(sum[h][0], x.even, _mm512_load_si512(at));
      sum[h][1] = _mm512_dpwssd_epi32(sum[h][1], x.odd, _mm512_load_si512(at + 64));
      settle(sum[h][0]);
      settle(sum[h][1]);
    }
  }
}

// Four rows by the heads: each lane sums a quarter of the channels.
template <int kH>
inline void four_rows(const QuantKeyTile& t, const uint8_t* const* row, const Tables& tables, __m512 (&total)[kH]) {
  const uint8_t* q = t.q;
  for (int h = 0; h < kH; ++h) total[h] = _mm512_setzero_ps();
  for (int64_t c0 = 0; c0 < t.dim; c0 += kMostSummed) {
    __m512i sum[kH][2];
    for (int h = 0; h < kH; ++h) sum[h][0] = sum[h][1] = _mm512_setzero_si512();
    const int64_t end = t.dim - c0 < kMostSummed ? t.dim : c0 + kMostSummed;
    int64_t c = c0;
    for (; c + kStep <= end; c += kStep, q += kStepBytes) {
      add_keys<kH, false>(row, c, 0, q, t.q_stride, tables, sum);
    }
    if (c < end) add_keys<kH, true>(row, c, codes_left(end - c), q, t.q_stride, tables, sum);
#pragma GCC unroll 4
    for (int h = 0; h < kH; ++h) {
      const __m512 x = _mm512_cvtepi32_ps(_mm512_add_epi32(sum[h][0], sum[h][1]));
      total[h] = c0 == 0 ? x : _mm512_add_ps(total[h], x);
    }
  }
}

template <int kH>
void key_product_of(const QuantKeyTile& tile) {
  const QuantKeyTile t = tile;  // a copy that stores cannot alias
  const Tables lookup;
  const int64_t padded = (t.rows + 7) / 8 * 8, scale_at = (t.dim + kStep - 1) / kStep * kStepBytes;
  alignas(64) uint32_t scales[kAttendTileMax];
  scales_of(t.row, padded, t.dim, scales);
  for (int64_t r0 = 0; r0 < t.rows; r0 += 16) {
    __m512 half[2][kH];  // eight rows each: in the blocks (0 2), (1 3) of the lanes of the first four, of the others
    for (int h = 0; h < kH; ++h) half[1][h] = _mm512_setzero_ps();
    const int64_t eights = padded - r0 < 16 ? 1 : 2;
    for (int64_t i = 0; i < eights; ++i) {
      prefetch_rows<true>(t.ahead, r0 + 8 * i, r0 + 8 * i + 8);
      __m512 a[kH], b[kH];
      four_rows<kH>(t, t.row + r0 + 8 * i, lookup, a);
      four_rows<kH>(t, t.row + r0 + 8 * i + 4, lookup, b);
#pragma GCC unroll 4
      for (int h = 0; h < kH; ++h) {
        half[i][h] = _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a[h], b[h]), _mm512_shuffle_f32x4(a[h], b[h], 0x4e));
      }
    }
    const auto lanes = __mmask16(eights == 1 ? 0xffu : 0xffffu);
    const __m512 row_scale = _mm512_maskz_load_ps(lanes, scales + r0);
#pragma GCC unroll 4
    for (int h = 0; h < kH; ++h) {
      const __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(half[0][h], half[1][h], 0x88),
                                       _mm512_shuffle_f32x4(half[0][h], half[1][h], 0xdd));
      float scale;
      std::memcpy(&scale, t.q + h * t.q_stride + scale_at, sizeof(scale));
      _mm512_mask_storeu_ps(t.s + h * t.s_stride + r0, lanes,
                            _mm512_mul_ps(_mm512_mul_ps(all, _mm512_set1_ps(scale)), row_scale));
    }
  }
}

// The weights of a tile's rows for all heads, p * row scale ~ scale * q. The scale is NaN when a weight is not finite.
template <int kH>
struct RowWeights {
  alignas(64) int16_t q[kH][kAttendTileMax];
  alignas(16) float scale[4];

  void assign(const QuantValueTile& t) {
    const int64_t vectors = (t.rows + 15) / 16;
    alignas(64) uint32_t scales[kAttendTileMax];
    scales_of(t.row, t.rows, t.dim, scales);
    __m512 product[kH][kAttendTileMax / 16], sum[4];
    __m512i top[4];
    for (int h = 0; h < 4; ++h) {
      sum[h] = _mm512_setzero_ps();
      top[h] = _mm512_setzero_si512();
    }
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t left = t.rows - 16 * v;
      const auto lanes = __mmask16(left < 16 ? (1u << left) - 1 : 0xffffu);
      const __m512 row_scale = _mm512_maskz_load_ps(lanes, scales + 16 * v);
#pragma GCC unroll 4
      for (int h = 0; h < kH; ++h) {
        const __m512 f = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, t.p + h * t.p_stride + 16 * v), row_scale);
        const __m512 magnitude = _mm512_abs_ps(f);
        product[h][v] = f;
        sum[h] = _mm512_add_ps(sum[h], magnitude);
        top[h] = _mm512_max_epu32(top[h], _mm512_castps_si512(magnitude));
      }
    }
    // The larger of two steps, NaN where a weight is: the second operand is taken then.
    const __m128 amax = _mm_castsi128_ps(largest_of_four(top[0], top[1], top[2], top[3]));
    const __m128 total = sums_of_four(sum[0], sum[1], sum[2], sum[3]);
    const __m128 step =
        _mm_max_ps(_mm_mul_ps(amax, _mm_set1_ps(1.0f / kMostOfOne)), _mm_mul_ps(total, _mm_set1_ps(1.0f / kMostSteps)));
    const __mmask8 finite = _mm_cmp_ps_mask(step, _mm_set1_ps(std::numeric_limits<float>::max()), _CMP_LE_OQ);
    const __mmask8 usable = _mm_cmp_ps_mask(amax, _mm_set1_ps(kTiny), _CMP_GE_OQ) & finite;
    alignas(16) float inverse[4];
    _mm_store_ps(inverse, _mm_maskz_div_ps(usable, _mm_set1_ps(1.0f), step));
    _mm_store_ps(scale, _mm_mask_blend_ps(finite, _mm_set1_ps(NAN), _mm_mul_ps(step, _mm_set1_ps(kUnit))));
    // Packing leaves rows by fours of the one and the other vector.
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
#pragma GCC unroll 4
    for (int h = 0; h < kH; ++h) {
      const __m512 factor = _mm512_set1_ps(inverse[h]);
      for (int64_t v = 0; v < vectors; v += 2) {
        const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(product[h][v], factor));
        const __m512i b =
            v + 1 < vectors ? _mm512_cvtps_epi32(_mm512_mul_ps(product[h][v + 1], factor)) : _mm512_setzero_si512();
        _mm512_store_si512(q[h] + 16 * v, _mm512_permutexvar_epi64(order, _mm512_packs_epi32(a, b)));
      }
    }
  }
};

// Adds the rows of a tile times their weights to the sums of 64 channels from c on; kPart: of those in `lanes`.
template <int kH, bool kPart>
inline void add_values(const QuantValueTile& t, int64_t c, __mmask64 lanes, const RowWeights<kH>& w,
                       const Tables& lookup, bool ahead) {
  __m512i sum[kH][4];
  for (int h = 0; h < kH; ++h) {
    for (int i = 0; i < 4; ++i) sum[h][i] = _mm512_setzero_si512();
  }
  for (int64_t r = 0; r < t.rows; r += 2) {
    if (ahead) prefetch_rows<true>(t.ahead, r, r + 2);
    const __m512i a = load_codes<kPart>(t.row[r], c, lanes), b = load_codes<kPart>(t.row[r + 1], c, lanes);
    // Block k: bytes 2 j and 2 j + 1 of the first and of the second row, j < 4 or j >= 4.
    const Levels low = levels_of(_mm512_unpacklo_epi16(a, b), lookup);
    const Levels high = levels_of(_mm512_unpackhi_epi16(a, b), lookup);
#pragma GCC unroll 4
    for (int h = 0; h < kH; ++h) {
      const __m512i weight = word(w.q[h] + r);
      sum[h][0] = _mm512_dpwssd_epi32(sum[h][0], low.even, weight);
      sum[h][1] = _mm512_dpwssd_epi32(sum[h][1], low.odd, weight);
      sum[h][2] = _mm512_dpwssd_epi32(sum[h][2], high.even, weight);
      sum[h][3] = _mm512_dpwssd_epi32(sum[h][3], high.odd, weight);
      for (int i = 0; i < 4; ++i) settle(sum[h][i]);
    }
  }
  // Four channels a block: of 16 k the first four, the next...; then a vector for each k.
#pragma GCC unroll 4
  for (int h = 0; h < kH; ++h) {
    const __m512i a = _mm512_unpacklo_epi32(sum[h][0], sum[h][1]), b = _mm512_unpackhi_epi32(sum[h][0], sum[h][1]);
    const __m512i d = _mm512_unpacklo_epi32(sum[h][2], sum[h][3]), e = _mm512_unpackhi_epi32(sum[h][2], sum[h][3]);
    const __m512i ab = _mm512_shuffle_i64x2(a, b, 0x44), de = _mm512_shuffle_i64x2(d, e, 0x44);
    const __m512i ab2 = _mm512_shuffle_i64x2(a, b, 0xee), de2 = _mm512_shuffle_i64x2(d, e, 0xee);
    const __m512i of[4] = {_mm512_shuffle_i64x2(ab, de, 0x88), _mm512_shuffle_i64x2(ab, de, 0xdd),
                           _mm512_shuffle_i64x2(ab2, de2, 0x88), _mm512_shuffle_i64x2(ab2, de2, 0xdd)};
    const __m512 scale = _mm512_set1_ps(w.scale[h]);
    float* at = t.sums + h * t.stride + c;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const auto used = kPart ? __mmask16(lanes >> (16 * i)) : __mmask16(0xffff);
      const __m512 old = _mm512_maskz_loadu_ps(used, at + 16 * i);
      _mm512_mask_storeu_ps(at + 16 * i, used, _mm512_fmadd_ps(_mm512_cvtepi32_ps(of[i]), scale, old));
    }
  }
}

template <int kH>
void value_product_of(const QuantValueTile& tile) {
  const QuantValueTile t = tile;
  const Tables lookup;
  RowWeights<kH> w;
  w.assign(t);
  int64_t c = 0;
  for (; c + kStep <= t.dim; c += kStep) add_values<kH, false>(t, c, 0, w, lookup, c == 0);
  if (c < t.dim) add_values<kH, true>(t, c, codes_left(t.dim - c), w, lookup, c == 0);
}

}  // namespace

void prepare_fp8_query(const float* q, int64_t dim, uint8_t* prepared) {
  const int64_t steps = (dim + kStep - 1) / kStep;
  const auto block = [&](int64_t c) {  // channels [c, c + 16), zeros beyond the last
    return _mm512_maskz_loadu_ps(
        dim - c >= 16 ? __mmask16(0xffff) : __mmask16((1u << std::max<int64_t>(dim - c, 0)) - 1), q + c);
  };
  // A lane of keys sums 16 of every 64 channels.
  __m512 top = _mm512_setzero_ps();
  __m128 most = _mm_setzero_ps(), all = _mm_setzero_ps();
  for (int64_t c0 = 0; c0 < dim; c0 += kMostSummed) {
    __m512 sum[4];
    for (int k = 0; k < 4; ++k) sum[k] = _mm512_setzero_ps();
    for (int64_t c = c0; c < dim && c < c0 + kMostSummed; c += kStep) {
      for (int k = 0; k < 4; ++k) {
        const __m512 magnitude = _mm512_abs_ps(block(c + 16 * k));
        sum[k] = _mm512_add_ps(sum[k], magnitude);
        top = _mm512_max_ps(top, magnitude);
      }
    }
    const __m128 sums = sums_of_four(sum[0], sum[1], sum[2], sum[3]);
    most = _mm_max_ps(most, sums);
    all = _mm_add_ps(all, sums);
  }
  // A maximum may lose NaN, the sum of all does not.
  const bool finite = _mm_movemask_ps(_mm_cmple_ps(all, _mm_set1_ps(std::numeric_limits<float>::max()))) == 15;
  alignas(16) float sums[4];
  _mm_store_ps(sums, most);
  const float amax = _mm512_reduce_max_ps(top);
  const bool usable = finite && amax >= 0x1p-100f;
  const float step = usable ? std::max(amax / kMostOfOne, *std::max_element(sums, sums + 4) / kMostSteps) : 0.0f;
  const float scale = finite ? step * kUnit : NAN;
  const __m512 inverse = _mm512_set1_ps(usable ? 1.0f / step : 0.0f);
  for (int64_t c = 0; c < steps * kStep; c += 16) {
    alignas(64) int32_t value[16];
    _mm512_store_si512(value, usable ? _mm512_cvtps_epi32(_mm512_mul_ps(block(c), inverse)) : _mm512_setzero_si512());
    uint8_t* at = prepared + c / kStep * kStepBytes + c % kStep;
    for (int i = 0; i < 4; ++i) {
      const auto pair = [&](int j) {
        return int32_t(uint32_t(value[j]) & 0xffff) | int32_t(uint32_t(value[j + 2]) << 16);
      };
      _mm_store_si128(reinterpret_cast<__m128i*>(at + 128 * i), _mm_set1_epi32(pair(4 * i)));
      _mm_store_si128(reinterpret_cast<__m128i*>(at + 128 * i + 64), _mm_set1_epi32(pair(4 * i + 1)));
    }
  }
  std::memcpy(prepared + steps * kStepBytes, &scale, sizeof(scale));
}

void fp8_key_product(const QuantKeyTile& tile) {
  with_heads(tile.heads, [&](auto heads) { key_product_of<heads>(tile); });
}

void fp8_value_product(const QuantValueTile& tile) {
  with_heads(tile.heads, [&](auto heads) { value_product_of<heads>(tile); });
}

}  // namespace longkv::avx512vnni
