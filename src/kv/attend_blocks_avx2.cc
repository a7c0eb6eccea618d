// AVX2 bodies of attend_blocks.h; they serve the levels avx2 and avx512.
#include <immintrin.h>

#include <cstring>
#include <limits>

#include "kv/attend_blocks.h"
#include "kv/attend_heads.h"
#include "kv/attend_weights_avx2.h"
#include "kv/codec/kivi.h"

namespace longkv::avx2 {

namespace {

constexpr int64_t kMaxDim = 1024;
// Channels whose 16-bit sums of products are widened together: 4 * 2 * 127 * levels per step of four must stay below
// 2^15 over key_step(bits) / 4 steps.
constexpr int64_t key_step(int bits) { return bits == 2 ? 128 : 32; }

inline __m256i load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256 load_halves(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline float lane_sum(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

// A query head folded with the scales of a block: q * scale ~ scale * value, and sum q * minimum.
struct FoldedQuery {
  alignas(32) int8_t value[kMaxDim];
  float scale;
  float bias;
};

// Scales and minima are widened once for all heads; the heads' sums across lanes overlap.
template <int kH>
void fold(const BlockKeys& b, const uint8_t* scales, const uint8_t* minima, FoldedQuery* out) {
  alignas(32) float folded[kH][kMaxDim];
  __m256 bias[kH];
  __m256i top[kH];
  for (int h = 0; h < kH; ++h) {
    bias[h] = _mm256_setzero_ps();
    top[h] = _mm256_setzero_si256();
  }
  const int64_t padded = (b.dim + 31) / 32 * 32;
  for (int64_t c = 0; c < b.dim; c += 8) {
    const __m256 scale = load_halves(scales + 2 * c), minimum = load_halves(minima + 2 * c);
#pragma GCC unroll 4
    for (int h = 0; h < kH; ++h) {
      const __m256 x = _mm256_loadu_ps(b.q + h * b.q_stride + c), f = _mm256_mul_ps(x, scale);
      bias[h] = _mm256_fmadd_ps(x, minimum, bias[h]);
      top[h] = _mm256_max_epi32(top[h], magnitude_bits(f));
      _mm256_store_ps(folded[h] + c, f);
    }
  }
  for (int h = 0; h < kH; ++h) {
    for (int64_t c = b.dim; c < padded; c += 8) _mm256_store_ps(folded[h] + c, _mm256_setzero_ps());
    out[h].bias = lane_sum(bias[h]);
    out[h].scale = largest_magnitude(top[h]);
  }
  for (int h = 0; h < kH; ++h) {
    const float amax = out[h].scale;
    // NaN and infinity compare above every finite number as bits, and fail this comparison.
    const bool finite = amax <= std::numeric_limits<float>::max();
    const float inverse = finite && amax >= 0x1p-100f ? 127.0f / amax : 0.0f;
    out[h].scale = !finite ? std::numeric_limits<float>::quiet_NaN() : inverse == 0.0f ? 0.0f : amax / 127.0f;
    const __m256 factor = _mm256_set1_ps(inverse);
    for (int64_t c = 0; c < padded; c += 32) {
      __m256i w[4];
      for (int i = 0; i < 4; ++i) {
        w[i] = inverse == 0.0f ? _mm256_setzero_si256()
                               : _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(folded[h] + c + 8 * i), factor));
      }
      const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(w[0], w[1]), _mm256_packs_epi32(w[2], w[3]));
      // Packing works in 128-bit halves: words of four channels come out as 0 2 4 6 1 3 5 7.
      const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      _mm256_store_si256(reinterpret_cast<__m256i*>(out[h].value + c), _mm256_permutevar8x32_epi32(bytes, order));
    }
  }
}

inline __m256i four_channels(const int8_t* value) {
  int32_t four;
  std::memcpy(&four, value, sizeof(four));
  return _mm256_set1_epi32(four);
}

// Ends the computation of a and b here, so that GCC keeps sums in registers.
inline void settle(__m256i& a, __m256i& b) { asm volatile("" : "+x"(a), "+x"(b)); }

// Line `line` of the block that is wanted next. Requests are spread over the products: a burst of them waits for free
// buffers.
inline void prefetch(const uint8_t* ahead, int64_t bytes, int64_t line) {
  if (ahead != nullptr && line * 64 < bytes)
    _mm_prefetch(reinterpret_cast<const char*>(ahead + line * 64), _MM_HINT_T0);
}

// Sixteen rows of a block: with 2 bits those of bits 4 * kHalf and up, with 4 bits those of vector kHalf.
template <int kBits, int kH, int kHalf>
void sixteen_scores(const BlockKeys& b, const FoldedQuery* q) {
  constexpr int64_t kVectors = kBits / 2;
  constexpr int kShift = kBits == 2 ? 4 * kHalf : 0;
  const __m256i mask = _mm256_set1_epi8((1 << kBits) - 1), ones = _mm256_set1_epi16(1);
  const uint8_t* words = b.block + (kBits == 4 ? 32 * kHalf : 0);
  __m256i total[kH][2] = {};
  for (int64_t c0 = 0; c0 < b.dim; c0 += key_step(kBits)) {
    const int64_t end = c0 + key_step(kBits) < b.dim ? c0 + key_step(kBits) : b.dim;
    __m256i sum[kH][2] = {};
    for (int64_t c = c0; c < end; c += 4) {
      prefetch(b.ahead, b.ahead_bytes, kHalf * (b.dim / 4) + c / 4);
      const __m256i x = load(words + c / 4 * kVectors * 32);
      const __m256i first = _mm256_and_si256(_mm256_srli_epi16(x, kShift), mask);
      const __m256i second = _mm256_and_si256(_mm256_srli_epi16(x, kShift + kBits), mask);
#pragma GCC unroll 4
      for (int h = 0; h < kH; ++h) {
        const __m256i f = four_channels(q[h].value + c);
        sum[h][0] = _mm256_add_epi16(sum[h][0], _mm256_maddubs_epi16(first, f));
        sum[h][1] = _mm256_add_epi16(sum[h][1], _mm256_maddubs_epi16(second, f));
        settle(sum[h][0], sum[h][1]);
      }
    }
    for (int h = 0; h < kH; ++h) {
      total[h][0] = _mm256_add_epi32(total[h][0], _mm256_madd_epi16(sum[h][0], ones));
      total[h][1] = _mm256_add_epi32(total[h][1], _mm256_madd_epi16(sum[h][1], ones));
    }
  }
  for (int h = 0; h < kH; ++h) {
    const __m256 scale = _mm256_set1_ps(q[h].scale), bias = _mm256_set1_ps(q[h].bias);
    float* s = b.s + h * b.s_stride + 16 * kHalf;
    _mm256_storeu_ps(s, _mm256_fmadd_ps(_mm256_cvtepi32_ps(total[h][0]), scale, bias));
    _mm256_storeu_ps(s + 8, _mm256_fmadd_ps(_mm256_cvtepi32_ps(total[h][1]), scale, bias));
  }
}

template <int kBits, int kH>
void keys_of(const BlockKeys* b, int n) {
  FoldedQuery q[kBlocksAtOnce][kH];
  for (int i = 0; i < n; ++i) {
    const uint8_t* scales = b[i].block + b[i].dim * kKiviRows * kBits / 8;
    fold<kH>(b[i], scales, scales + 2 * b[i].dim, q[i]);
  }
  for (int i = 0; i < n; ++i) {
    sixteen_scores<kBits, kH, 0>(b[i], q[i]);
    sixteen_scores<kBits, kH, 1>(b[i], q[i]);
  }
}

template <int kBits>
void keys(const BlockKeys* b, int n) {
  with_heads(b->heads, [&](auto heads) { keys_of<kBits, heads>(b, n); });
}

// Sixteen channels of a group (kPart 0: 0-15, 1: 16-31).
template <int kBits, int kH, int kPart>
void sixteen_channels(const BlockValues& b, int64_t g, const TileWeights* w, const float* bias) {
  const uint8_t* codes = b.block + g * kKiviRows * kKiviRows * kBits / 8;
  float* sums = b.sums + g * kKiviRows;
  const int64_t stride = b.stride;
  constexpr int kPairs = 4 / kBits;  // row pairs of a vector
  const __m256i mask = _mm256_set1_epi16((1 << kBits) - 1);
  __m256i sum[kH][2] = {};
  for (int64_t u = 0; u < 16 / kPairs; ++u) {
    if (kPart == 0) prefetch(b.ahead, b.ahead_bytes, g * (16 / kPairs) + u);
    const __m256i x = load(codes + 32 * u);
#pragma GCC unroll 2
    for (int m = 0; m < kPairs; ++m) {
      const int shift = kBits * (4 * m + 2 * kPart);
      const __m256i first = _mm256_and_si256(_mm256_srli_epi16(x, shift), mask);
      const __m256i second = _mm256_and_si256(_mm256_srli_epi16(x, shift + kBits), mask);
#pragma GCC unroll 4
      for (int h = 0; h < kH; ++h) {
        const __m256i weight = w[h].pair(2 * (kPairs * u + m));
        sum[h][0] = _mm256_add_epi32(sum[h][0], _mm256_madd_epi16(first, weight));
        sum[h][1] = _mm256_add_epi32(sum[h][1], _mm256_madd_epi16(second, weight));
        settle(sum[h][0], sum[h][1]);
      }
    }
  }
  for (int h = 0; h < kH; ++h) {
    const __m256 scale = _mm256_set1_ps(w[h].scale), offset = _mm256_set1_ps(bias[h]);
    float* at = sums + h * stride + 16 * kPart;
    for (int i = 0; i < 2; ++i) {
      const __m256 old = _mm256_add_ps(_mm256_loadu_ps(at + 8 * i), offset);
      _mm256_storeu_ps(at + 8 * i, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[h][i]), scale, old));
    }
  }
}

// The weights of a block's groups for all heads: products with the rows' scales, and what is made of them.
constexpr int64_t kGroupsAtOnce = 4;
template <int kH>
struct BlockWeights {
  alignas(32) float product[kGroupsAtOnce][kH][kKiviRows];
  float amax[kGroupsAtOnce][kH];
  float bias[kGroupsAtOnce][kH];  // sums of weight * minimum
  TileWeights rounded[kGroupsAtOnce][kH];

  // scales, minima: of the first of n groups.
  void multiply(const BlockValues& b, const uint8_t* scales, const uint8_t* minima, int64_t n) {
    for (int64_t g = 0; g < n; ++g) {
      __m256 sum[kH];
      __m256i top[kH];
      for (int h = 0; h < kH; ++h) {
        sum[h] = _mm256_setzero_ps();
        top[h] = _mm256_setzero_si256();
      }
      for (int64_t r = 0; r < kKiviRows; r += 8) {
        const int64_t at = 2 * (g * kKiviRows + r);
        const __m256 scale = load_halves(scales + at), minimum = load_halves(minima + at);
#pragma GCC unroll 4
        for (int h = 0; h < kH; ++h) {
          const __m256 x = _mm256_loadu_ps(b.p + h * b.p_stride + r);
          const __m256 counts = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_UQ);
          const __m256 f = _mm256_mul_ps(x, _mm256_and_ps(scale, counts));
          sum[h] = _mm256_fmadd_ps(x, _mm256_and_ps(minimum, counts), sum[h]);
          top[h] = _mm256_max_epi32(top[h], magnitude_bits(f));
          _mm256_store_ps(product[g][h] + r, f);
        }
      }
      for (int h = 0; h < kH; ++h) {
        amax[g][h] = largest_magnitude(top[h]);
        bias[g][h] = lane_sum(sum[h]);
      }
    }
  }

  void round(int64_t n) {
    for (int64_t g = 0; g < n; ++g) {
      for (int h = 0; h < kH; ++h) rounded[g][h].round(product[g][h], amax[g][h], kKiviRows);
    }
  }
};

// Weights of some groups, of all heads and of both blocks are formed side by side, since each is a chain of latencies.
template <int kBits, int kH>
void values_of(const BlockValues* b, int n) {
  const int64_t groups = b->dim / kKiviRows, code_bytes = b->dim * kKiviRows * kBits / 8;
  BlockWeights<kH> w[kBlocksAtOnce];
  for (int64_t g0 = 0; g0 < groups; g0 += kGroupsAtOnce) {
    const int64_t count = groups - g0 < kGroupsAtOnce ? groups - g0 : kGroupsAtOnce;
    for (int i = 0; i < n; ++i) {
      const uint8_t* scales = b[i].block + code_bytes + 2 * g0 * kKiviRows;
      w[i].multiply(b[i], scales, scales + 2 * b[i].dim, count);
    }
    for (int i = 0; i < n; ++i) w[i].round(count);
    for (int i = 0; i < n; ++i) {
      for (int64_t g = 0; g < count; ++g) {
        sixteen_channels<kBits, kH, 0>(b[i], g0 + g, w[i].rounded[g], w[i].bias[g]);
        sixteen_channels<kBits, kH, 1>(b[i], g0 + g, w[i].rounded[g], w[i].bias[g]);
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

}  // namespace longkv::avx2
