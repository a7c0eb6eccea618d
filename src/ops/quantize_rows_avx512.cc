// Rounding of activations for AVX-512: sixteen groups share what is computed once a group. The bits are those of
// quantize_rows.cc: maxima and integer sums do not depend on their order, everything else is the same operations.
#include <cstring>

#include "base/immintrin.h"
#include "ops/quantize_rows.h"

namespace longkv {

namespace {

constexpr int kGroups = 16;

// Lane i of the result is the greatest lane of v[i].
inline __m512i max_of_each(const __m512i (&v)[kGroups]) {
  __m512i pairs[8], fours[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    pairs[i] =
        _mm512_max_epi32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // in every quarter, lane j belongs to v[4 i + j]
    fours[i] = _mm512_max_epi32(_mm512_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]),
                                _mm512_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
  }
  const auto fold = [](__m512i a, __m512i b) {
    return _mm512_max_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
  };
  return fold(fold(fours[0], fours[1]), fold(fours[2], fours[3]));
}

// Sums of 16 bytes each, of the first `bytes` (at most 128) of q.
inline void sum_bytes(const int8_t* q, int64_t bytes, int16_t* sum16) {
  const auto mask = [](int64_t n) { return n >= 64 ? ~__mmask64(0) : n <= 0 ? 0 : (__mmask64(1) << n) - 1; };
  const auto sums = [&](int64_t at) {  // of eight bytes moved to unsigned by 128
    const __m512i v = _mm512_maskz_loadu_epi8(mask(bytes - at), q + at);
    return _mm512_sad_epu8(_mm512_xor_si512(v, _mm512_set1_epi8(char(0x80))), _mm512_setzero_si512());
  };
  const __m512i a = sums(0), b = sums(64);
  const __m512i both = _mm512_add_epi64(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  const __m128i all = _mm512_cvtepi64_epi16(_mm512_permutexvar_epi64(order, both));
  alignas(16) int16_t values[8];
  _mm_store_si128(reinterpret_cast<__m128i*>(values), _mm_sub_epi16(all, _mm_set1_epi16(16 * 128)));
  std::memcpy(sum16, values, size_t(bytes < 128 ? bytes / 16 : 8) * sizeof(int16_t));
}

// Groups [0, n), n <= 16.
inline void quantize_groups(const float* x, int n, int8_t* q, float* scale) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i largest[kGroups];
#pragma GCC unroll 16
  for (int g = 0; g < kGroups; ++g) {
    if (g < n) {
      const __m512i a = _mm512_and_si512(_mm512_castps_si512(_mm512_loadu_ps(x + 32 * g)), magnitude);
      const __m512i b = _mm512_and_si512(_mm512_castps_si512(_mm512_loadu_ps(x + 32 * g + 16)), magnitude);
      largest[g] = _mm512_max_epi32(a, b);
    } else {
      largest[g] = _mm512_setzero_si512();
    }
  }
  // Magnitudes compare like integers, and NaN lies above infinity there.
  const __m512i bits = max_of_each(largest);
  const __m512 amax = _mm512_castsi512_ps(bits), most = _mm512_set1_ps(127.0f);
  const __mmask16 finite = _mm512_cmplt_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
  const __mmask16 usual = finite & _mm512_cmp_ps_mask(amax, _mm512_set1_ps(0x1p-120f), _CMP_GE_OQ);
  const __m512 nan = _mm512_maskz_mov_ps(__mmask16(~finite), _mm512_set1_ps(__builtin_nanf("")));
  const __m512 scales = _mm512_mask_div_ps(nan, usual, amax, most);
  alignas(64) float inverse[kGroups];
  _mm512_store_ps(inverse, _mm512_maskz_div_ps(usual, most, amax));
  _mm512_mask_storeu_ps(scale, __mmask16((1u << n) - 1), scales);
  for (int g = 0; g < n; ++g) {
    const __mmask16 kept = (usual >> g & 1) != 0 ? 0xffff : 0;
    const __m512 by = _mm512_set1_ps(inverse[g]);
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m512 v = _mm512_mul_ps(_mm512_loadu_ps(x + 32 * g + 16 * h), by);
      const __m128i rounded = _mm512_cvtsepi32_epi8(_mm512_maskz_cvtps_epi32(kept, v));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 32 * g + 16 * h), rounded);
    }
  }
}

}  // namespace

void quantize_row_avx512(const float* x, int64_t cols, int8_t* q, float* scale, int16_t* sum16) {
  const int64_t groups = cols / kActivationGroup;
  for (int64_t g = 0; g < groups; g += kGroups) {
    const int n = int(groups - g < kGroups ? groups - g : kGroups);
    quantize_groups(x + g * kActivationGroup, n, q + g * kActivationGroup, scale + g);
    for (int64_t i = 0; i < n; i += 4) {
      sum_bytes(q + (g + i) * kActivationGroup, (n - i) * kActivationGroup, sum16 + 2 * (g + i));
    }
  }
}

}  // namespace longkv
