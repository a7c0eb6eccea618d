// Pieces that the AVX-512 bodies of decode attention share. Included by NAME_avx512vnni.cc files only.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "base/immintrin.h"

namespace longkv::avx512vnni {
namespace {

// Per 128-bit block the sums (largest) of lanes i and i + 2, then of i and i + 1, then of the blocks 0 and 2, 1 and 3,
// then of both: one order for each of the four vectors, so that a head's bits do not depend on its place.
inline __m128 sums_of_four(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 four = _mm512_add_ps(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// As unsigned numbers.
inline __m128i largest_of_four(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_max_epu32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_max_epu32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i four = _mm512_max_epu32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_max_epu32(_mm512_castsi512_si256(four), _mm512_extracti64x4_epi64(four, 1));
  return _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// The step of rounding numbers whose largest magnitudes are `amax` to `levels` steps, and its inverse: NaN where one is
// not finite, 0 and 0 below 2^-100, where the inverse would not be finite.
struct Steps {
  __m128 scale, inverse;
};
inline Steps steps_of(__m128 amax, float levels) {
  const __m128 l = _mm_set1_ps(levels);
  const __mmask8 tiny = _mm_cmp_ps_mask(amax, _mm_set1_ps(0x1p-100f), _CMP_LT_OQ);
  const __mmask8 finite = _mm_cmp_ps_mask(amax, _mm_set1_ps(std::numeric_limits<float>::max()), _CMP_LE_OQ);
  const __m128 scale =
      _mm_mask_blend_ps(finite, _mm_set1_ps(std::numeric_limits<float>::quiet_NaN()), _mm_div_ps(amax, l));
  const auto usable = __mmask8(finite & ~tiny);
  return {_mm_mask_mov_ps(scale, tiny, _mm_setzero_ps()), _mm_maskz_div_ps(usable, l, amax)};
}

inline __m512 halves(__mmask16 lanes, const uint8_t* p) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, p)); }
inline __m512 halves(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// 32 bytes twice, and their 32-bit words shifted right: those of the first copy by `low`, of the second by `high` bits.
inline __m512i twice(const uint8_t* p) {
  return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m512i shifts(int low, int high) {
  return _mm512_inserti64x4(_mm512_set1_epi32(low), _mm256_set1_epi32(high), 1);
}

// Four bytes in every 32-bit lane.
inline __m512i word(const void* p) {
  int32_t w;
  std::memcpy(&w, p, sizeof(w));
  return _mm512_set1_epi32(w);
}

// Ends the computation of x here, so that GCC keeps sums in registers.
inline void settle(__m512i& x) { asm volatile("" : "+v"(x)); }

}  // namespace
}  // namespace longkv::avx512vnni
