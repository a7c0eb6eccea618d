// AVX-512 VNNI bodies of attend_blocks.h. A vector holds 32 bytes of a block twice, each copy shifted to other codes,
// so that one word of the query or of the weights meets all lanes and sums come out in the order of rows or channels.
//
// Folded weights are rounded to 16 bits without a sign (error at most 1 / 131070 of the largest of head, block and
// group) and multiplied as two bytes, which a sign would not fit. Blocks with signs in the scales of values, which no
// encoder writes but for NaN, go to the AVX2 body.
#include <cstring>
#include <limits>

#include "kv/attend_blocks.h"
#include "kv/attend_heads.h"
#include "kv/attend_x86_512.h"
#include "kv/codec/kivi.h"

namespace longkv::avx512vnni {

namespace {

constexpr int64_t kMaxDim = 1024;

// Lines of the block that is wanted next, some at each step of a product: a burst of requests waits for free buffers.
struct Ahead {
  const uint8_t* at;
  const uint8_t* end;
  int64_t step;  // bytes

  Ahead(const uint8_t* block, int64_t bytes, int64_t steps)
      : at(block), end(block == nullptr ? block : block + bytes), step((bytes / steps + 63) / 64 * 64) {}
  void prefetch() {
    const uint8_t* stop = end - at < step ? end : at + step;
    for (; at < stop; at += 64) _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
  }
};

// A query head folded with the scales of a block: q * scale ~ scale * value, and sum q * minimum.
struct FoldedQuery {
  alignas(64) int8_t value[kMaxDim];
  float scale;
  float bias;
};

inline __m512i magnitudes(__m512 x) { return _mm512_castps_si512(_mm512_abs_ps(x)); }

template <int kH>
void fold(const BlockKeys& b, const uint8_t* scales, const uint8_t* minima, FoldedQuery* out) {
  alignas(64) float folded[kH][kMaxDim];
  __m512 bias[4];
  __m512i top[4];
  for (int h = 0; h < 4; ++h) {
    bias[h] = _mm512_setzero_ps();
    top[h] = _mm512_setzero_si512();
  }
  const int64_t padded = (b.dim + 63) / 64 * 64;
  for (int64_t c = 0; c < b.dim; c += 16) {
    const auto lanes = __mmask16(b.dim - c < 16 ? (1u << (b.dim - c)) - 1 : 0xffffu);
    const __m512 scale = halves(lanes, scales + 2 * c), minimum = halves(lanes, minima + 2 * c);
#pragma GCC unroll 4
    for (int h = 0; h < kH; ++h) {
      const __m512 x = _mm512_maskz_loadu_ps(lanes, b.q + h * b.q_stride + c), f = _mm512_mul_ps(x, scale);
      bias[h] = _mm512_fmadd_ps(x, minimum, bias[h]);
      top[h] = _mm512_max_epu32(top[h], magnitudes(f));
      _mm512_store_ps(folded[h] + c, f);
    }
  }
  for (int h = 0; h < kH; ++h) {
    for (int64_t c = (b.dim + 15) / 16 * 16; c < padded; c += 16) _mm512_store_ps(folded[h] + c, _mm512_setzero_ps());
  }
  alignas(16) float inverse[4], scale[4], sum[4];
  const Steps steps = steps_of(_mm_castsi128_ps(largest_of_four(top[0], top[1], top[2], top[3])), 127.0f);
  _mm_store_ps(inverse, steps.inverse);
  _mm_store_ps(scale, steps.scale);
  _mm_store_ps(sum, sums_of_four(bias[0], bias[1], bias[2], bias[3]));
  // Packing works in 128-bit blocks: words of four channels come out as 0 4 8 12, 1 5 9 13, ...
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#pragma GCC unroll 4
  for (int h = 0; h < kH; ++h) {
    const __m512 factor = _mm512_set1_ps(inverse[h]);
    out[h].scale = scale[h];
    out[h].bias = sum[h];
    for (int64_t c = 0; c < padded; c += 64) {
      __m512i w[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        w[i] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(folded[h] + c + 16 * i), factor));
      }
      const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(w[0], w[1]), _mm512_packs_epi32(w[2], w[3]));
      _mm512_store_si512(out[h].value + c, _mm512_permutexvar_epi32(order, bytes));
    }
  }
}

// Scores of 32 rows. Two words of four channels at a time, each with sums of its own: a product takes five cycles.
template <int kBits, int kH>
void scores(const BlockKeys& b, const FoldedQuery* q) {
  __m512i sum[kH][2][2];
  for (int h = 0; h < kH; ++h) {
    for (int i = 0; i < 2; ++i) sum[h][i][0] = sum[h][i][1] = _mm512_setzero_si512();
  }
  const __m512i mask = _mm512_set1_epi8((1 << kBits) - 1), low = shifts(0, 2), high = shifts(4, 6);
  Ahead ahead(b.ahead, b.ahead_bytes, b.dim / 8);
  for (int64_t c = 0; c < b.dim; c += 8) {
    ahead.prefetch();
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      __m512i first, second;
      if constexpr (kBits == 2) {
        const __m512i x = twice(b.block + (c + 4 * i) * 8);
        first = _mm512_and_si512(_mm512_srlv_epi32(x, low), mask);
        second = _mm512_and_si512(_mm512_srlv_epi32(x, high), mask);
      } else {
        const __m512i x = _mm512_loadu_si512(b.block + (c + 4 * i) * 16);
        first = _mm512_and_si512(x, mask);
        second = _mm512_and_si512(_mm512_srli_epi16(x, 4), mask);
      }
#pragma GCC unroll 4
      for (int h = 0; h < kH; ++h) {
        const __m512i f = word(q[h].value + c + 4 * i);
        sum[h][i][0] = _mm512_dpbusd_epi32(sum[h][i][0], first, f);
        sum[h][i][1] = _mm512_dpbusd_epi32(sum[h][i][1], second, f);
        settle(sum[h][i][0]);
        settle(sum[h][i][1]);
      }
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < kH; ++h) {
    __m512i first = _mm512_add_epi32(sum[h][0][0], sum[h][1][0]);
    __m512i second = _mm512_add_epi32(sum[h][0][1], sum[h][1][1]);
    if constexpr (kBits == 4) {  // rows 0-7 and 16-23, 8-15 and 24-31
      const __m512i a = first;
      first = _mm512_shuffle_i64x2(a, second, 0x44);
      second = _mm512_shuffle_i64x2(a, second, 0xee);
    }
    const __m512 scale = _mm512_set1_ps(q[h].scale), bias = _mm512_set1_ps(q[h].bias);
    float* s = b.s + h * b.s_stride;
    _mm512_storeu_ps(s, _mm512_fmadd_ps(_mm512_cvtepi32_ps(first), scale, bias));
    _mm512_storeu_ps(s + 16, _mm512_fmadd_ps(_mm512_cvtepi32_ps(second), scale, bias));
  }
}

template <int kBits, int kH>
void keys_of(const BlockKeys* b, int n) {
  FoldedQuery q[kBlocksAtOnce][kH];
  for (int i = 0; i < n; ++i) {
    const uint8_t* scales = b[i].block + b[i].dim * kKiviRows * kBits / 8;
    fold<kH>(b[i], scales, scales + 2 * b[i].dim, q[i]);
  }
  for (int i = 0; i < n; ++i) scores<kBits, kH>(b[i], q[i]);
}

template <int kBits>
void keys(const BlockKeys* b, int n) {
  with_heads(b->heads, [&](auto heads) { keys_of<kBits, heads>(b, n); });
}

// The weights of some groups of a block for all heads. Bytes of a weight lie as words of four rows in the order 0 2 1
// 3, that of the codes: words [4][4], rows 4 * w, rows 16 + 4 * w, then the high bytes of both.
constexpr int64_t kGroupsAtOnce = 2;
template <int kH>
struct BlockWeights {
  static constexpr int kSlots = int((kGroupsAtOnce * kH + 3) / 4 * 4);  // group by group, in fours
  alignas(64) uint8_t bytes[kGroupsAtOnce * kH][64];
  alignas(16) float scale[kSlots], bias[kSlots];  // bias: sums of weight * minimum

  static const uint8_t* low(const uint8_t* bytes, int64_t u) { return bytes + u % 4 * 16 + u / 4 * 4; }
  static const uint8_t* high(const uint8_t* bytes, int64_t u) { return low(bytes, u) + 8; }

  // scales, minima: of the first of n groups.
  void assign(const BlockValues& b, const uint8_t* scales, const uint8_t* minima, int64_t n) {
    __m512 product[kGroupsAtOnce * kH][2], sum[kSlots];
    __m512i top[kSlots];
    for (int i = 0; i < kSlots; ++i) {
      sum[i] = _mm512_setzero_ps();
      top[i] = _mm512_setzero_si512();
    }
#pragma GCC unroll 2
    for (int64_t r = 0; r < 2; ++r) {
      __m512 p[kH];
      __mmask16 counts[kH];
#pragma GCC unroll 4
      for (int h = 0; h < kH; ++h) {
        p[h] = _mm512_loadu_ps(b.p + h * b.p_stride + 16 * r);
        counts[h] = _mm512_cmp_ps_mask(p[h], _mm512_setzero_ps(), _CMP_NEQ_UQ);
      }
      for (int64_t g = 0; g < n; ++g) {
        const int64_t at = 2 * (g * kKiviRows + 16 * r);
        const __m512 scale = halves(scales + at), minimum = halves(minima + at);
#pragma GCC unroll 4
        for (int h = 0; h < kH; ++h) {
          const int64_t i = g * kH + h;
          product[i][r] = _mm512_maskz_mul_ps(counts[h], p[h], scale);
          sum[i] = _mm512_mask3_fmadd_ps(p[h], minimum, sum[i], counts[h]);
          top[i] = _mm512_max_epu32(top[i], _mm512_castps_si512(product[i][r]));
        }
      }
    }
    alignas(16) float inverse[kSlots];
    for (int i = 0; i < kSlots; i += 4) {
      const __m128i amax = largest_of_four(top[i], top[i + 1], top[i + 2], top[i + 3]);
      const Steps steps = steps_of(_mm_castsi128_ps(amax), 65535.0f);
      _mm_store_ps(inverse + i, steps.inverse);
      _mm_store_ps(scale + i, steps.scale);
      _mm_store_ps(bias + i, sums_of_four(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]));
    }
    const __m512i split = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 2, 6, 8, 12, 10, 14, 1, 5, 3, 7, 9, 13, 11, 15));
    for (int64_t i = 0; i < n * kH; ++i) {
      const __m512 factor = _mm512_set1_ps(inverse[i]);
      const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(product[i][0], factor));
      const __m512i c = _mm512_cvtps_epi32(_mm512_mul_ps(product[i][1], factor));
      _mm512_store_si512(bytes[i], _mm512_shuffle_epi8(_mm512_packus_epi32(a, c), split));
    }
  }
};

// The sums of 32 channels of a group. Low and high bytes are summed apart.
template <int kBits, int kH>
void group_sums(const BlockValues& b, int64_t g, const uint8_t (*bytes)[64], const float* scale, const float* bias,
                Ahead& ahead) {
  using Weights = BlockWeights<kH>;
  const uint8_t* codes = b.block + g * kKiviRows * kKiviRows * kBits / 8;
  __m512i low[kH][2], high[kH][2];
  for (int h = 0; h < kH; ++h) {
    for (int i = 0; i < 2; ++i) low[h][i] = high[h][i] = _mm512_setzero_si512();
  }
  const __m512i mask = _mm512_set1_epi8((1 << kBits) - 1);
  // Four rows at a time.
  for (int64_t u = 0; u < 8; ++u) {
    ahead.prefetch();
    __m512i first, second;
    if constexpr (kBits == 2) {
      const __m512i x = twice(codes + 32 * u);
      first = _mm512_and_si512(_mm512_srlv_epi32(x, shifts(0, 2)), mask);
      second = _mm512_and_si512(_mm512_srlv_epi32(x, shifts(4, 6)), mask);
    } else {
      // Bytes hold the channels i and i + 8 of the rows 0 0 1 1, then 2 2 3 3; wanted are those of 0 2 1 3.
      const __m512i x = twice(codes + 64 * u), y = twice(codes + 64 * u + 32);
      const __m512i even = _mm512_set1_epi16(0xff);
      const __m512i lower = _mm512_ternarylogic_epi32(even, x, _mm512_slli_epi16(y, 8), 0xca);
      const __m512i upper = _mm512_ternarylogic_epi32(even, _mm512_srli_epi16(x, 8), y, 0xca);
      first = _mm512_and_si512(_mm512_srlv_epi32(lower, shifts(0, 4)), mask);
      second = _mm512_and_si512(_mm512_srlv_epi32(upper, shifts(0, 4)), mask);
    }
#pragma GCC unroll 4
    for (int h = 0; h < kH; ++h) {
      const __m512i lows = word(Weights::low(bytes[h], u)), highs = word(Weights::high(bytes[h], u));
      low[h][0] = _mm512_dpbusd_epi32(low[h][0], lows, first);
      low[h][1] = _mm512_dpbusd_epi32(low[h][1], lows, second);
      high[h][0] = _mm512_dpbusd_epi32(high[h][0], highs, first);
      high[h][1] = _mm512_dpbusd_epi32(high[h][1], highs, second);
      for (int i = 0; i < 2; ++i) settle(low[h][i]), settle(high[h][i]);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < kH; ++h) {
    float* at = b.sums + h * b.stride + g * kKiviRows;
    const __m512 step = _mm512_set1_ps(scale[h]), offset = _mm512_set1_ps(bias[h]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m512i total = _mm512_add_epi32(_mm512_slli_epi32(high[h][i], 8), low[h][i]);
      const __m512 old = _mm512_add_ps(_mm512_loadu_ps(at + 16 * i), offset);
      _mm512_storeu_ps(at + 16 * i, _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), step, old));
    }
  }
}

// scales: of `dim` halves, a multiple of 32.
bool any_sign(const uint8_t* scales, int64_t dim) {
  __m256i all = _mm256_setzero_si256();
  for (int64_t c = 0; c < dim; c += 16) {
    all = _mm256_or_si256(all, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + 2 * c)));
  }
  return _mm256_movepi16_mask(all) != 0;
}

template <int kBits, int kH>
void values_of(const BlockValues* b, int n) {
  const int64_t groups = b->dim / kKiviRows, code_bytes = b->dim * kKiviRows * kBits / 8;
  BlockWeights<kH> w[kBlocksAtOnce];
  for (int i = 0; i < n; ++i) {
    if (any_sign(b[i].block + code_bytes, b[i].dim)) {
      avx2::block_value_products(b + i, 1);
      continue;
    }
    Ahead ahead(b[i].ahead, b[i].ahead_bytes, groups * 8);
    for (int64_t g0 = 0; g0 < groups; g0 += kGroupsAtOnce) {
      const int64_t count = groups - g0 < kGroupsAtOnce ? groups - g0 : kGroupsAtOnce;
      const uint8_t* scales = b[i].block + code_bytes + 2 * g0 * kKiviRows;
      w[i].assign(b[i], scales, scales + 2 * b[i].dim, count);
      for (int64_t g = 0; g < count; ++g) {
        group_sums<kBits, kH>(b[i], g0 + g, w[i].bytes + g * kH, w[i].scale + g * kH, w[i].bias + g * kH, ahead);
      }
    }
  }
}

template <int kBits>
void values(const BlockValues* b, int n) {
  with_heads(b->heads, [&](auto heads) { values_of<kBits, heads>(b, n); });
}

}  // namespace

void block_key_products(const BlockKeys* b, int n) { b->type == KvType::kKivi2 ? keys<2>(b, n) : keys<4>(b, n); }

void block_value_products(const BlockValues* b, int n) {
  b->type == KvType::kKivi2 ? values<2>(b, n) : values<4>(b, n);
}

}  // namespace longkv::avx512vnni
