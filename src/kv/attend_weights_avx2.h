// Weights of a tile of values rounded to int16, for AVX2 bodies. Included by NAME_avx2.cc files only.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>

#include "kv/attend_kernel.h"

namespace longkv::avx2 {
namespace {

// The largest of eight magnitudes, which compare like integers; NaN lies above infinity there.
inline float largest_magnitude(__m256i bits) {
  __m128i t = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0x4e));
  t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(t));
}

inline __m256i magnitude_bits(__m256 x) {
  return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
}

// One head's weights of the rows of a tile: p * row scale ~ scale * q, |q| <= 32767.
struct TileWeights {
  alignas(32) int16_t q[kAttendTileMax];
  float scale;  // NaN when a weight is not finite: it then reaches every channel that the weights are used for
  int32_t total;

  // padded: a multiple of 8.
  void assign(const float* p, const float* row_scale, int64_t padded) {
    alignas(32) float w[kAttendTileMax];
    __m256i top = _mm256_setzero_si256();
    for (int64_t i = 0; i < padded; i += 8) {
      const __m256 x = _mm256_mul_ps(_mm256_loadu_ps(p + i), _mm256_loadu_ps(row_scale + i));
      top = _mm256_max_epi32(top, magnitude_bits(x));
      _mm256_store_ps(w + i, x);
    }
    round(w, largest_magnitude(top), padded);
  }

  // amax: the largest magnitude of w, NaN above all.
  void round(const float* w, float amax, int64_t padded) {
    if (!(amax <= std::numeric_limits<float>::max()) || amax < 0x1p-100f) {
      scale = amax < 0x1p-100f ? 0.0f : std::numeric_limits<float>::quiet_NaN();
      total = 0;
      std::memset(q, 0, sizeof(q));
      return;
    }
    scale = amax / 32767.0f;
    const __m256 inverse = _mm256_set1_ps(32767.0f / amax);
    __m256i sum = _mm256_setzero_si256();
    for (int64_t i = 0; i < padded; i += 8) {
      const __m256i rounded = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(w + i), inverse));
      sum = _mm256_add_epi32(sum, rounded);
      _mm_store_si128(reinterpret_cast<__m128i*>(q + i),
                      _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
    }
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    total = _mm_cvtsi128_si32(s);
  }

  // Weights of rows r and r + 1 (r even) in every 32-bit lane.
  __m256i pair(int64_t r) const {
    int32_t two;
    std::memcpy(&two, q + r, sizeof(two));
    return _mm256_set1_epi32(two);
  }
};

inline void add_scaled(__m256i sums, __m256 scale, float* at) {
  _mm256_storeu_ps(at, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), scale, _mm256_loadu_ps(at)));
}

}  // namespace
}  // namespace longkv::avx2
