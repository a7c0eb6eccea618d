// AVX-512 body of attend_narrow.h.
#include "base/immintrin.h"
#include "kv/attend_ahead.h"
#include "kv/attend_heads.h"
#include "kv/attend_narrow.h"

namespace longkv::avx512 {

namespace {

constexpr int64_t kRows = 16;
constexpr int64_t kStep = 16;  // channels turned at a time

// Channels c and c + 8 (c < 8) of a step of 16 rows: vector c holds in its 128-bit blocks rows 0-7 of c, rows 0-7 of
// c + 8, rows 8-15 of c, rows 8-15 of c + 8.
inline void turn(const uint8_t* const* row, int64_t at, __m512i (&t)[8]) {
  __m512i z[8], p[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const auto half = [&](int r) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row[r] + at)); };
    z[i] = _mm512_inserti64x4(_mm512_castsi256_si512(half(i)), half(i + 8), 1);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    p[i] = _mm512_unpacklo_epi16(z[2 * i], z[2 * i + 1]);
    p[4 + i] = _mm512_unpackhi_epi16(z[2 * i], z[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    const __m512i a = _mm512_unpacklo_epi32(p[i], p[i + 1]), b = _mm512_unpacklo_epi32(p[i + 2], p[i + 3]);
    const __m512i c = _mm512_unpackhi_epi32(p[i], p[i + 1]), d = _mm512_unpackhi_epi32(p[i + 2], p[i + 3]);
    t[i] = _mm512_unpacklo_epi64(a, b);
    t[i + 1] = _mm512_unpackhi_epi64(a, b);
    t[i + 2] = _mm512_unpacklo_epi64(c, d);
    t[i + 3] = _mm512_unpackhi_epi64(c, d);
  }
}

template <int kH>
void product_of(const NarrowKeyTile& tile) {
  const NarrowKeyTile t = tile;  // a copy that stores cannot alias
  const int64_t padded = (t.rows + 7) / 8 * 8, steps = t.dim / kStep;
  // Of a head channels c and c + 8 of each step, eight lanes each.
  __m512 q[kNarrowChannels / kStep * 8][kH];
  for (int64_t i = 0; i < steps * 8; ++i) {
    for (int h = 0; h < kH; ++h) {
      const float* at = t.q + h * t.q_stride + i / 8 * kStep + i % 8;
      q[i][h] = _mm512_mask_mov_ps(_mm512_set1_ps(at[0]), 0xff00, _mm512_set1_ps(at[8]));
    }
  }
  const uint8_t* last[kRows];
  for (int64_t r0 = 0; r0 < t.rows; r0 += kRows) {
    prefetch_rows<true>(t.ahead, r0, r0 + kRows);
    const uint8_t* const* row = t.row + r0;
    if (padded - r0 < kRows) {
      for (int64_t i = 0; i < kRows; ++i) last[i] = row[i % 8];
      row = last;
    }
    __m512 sum[kH][2];  // of rows 0-7 and of rows 8-15
    for (int h = 0; h < kH; ++h) sum[h][0] = sum[h][1] = _mm512_setzero_ps();
    for (int64_t g = 0; g < steps; ++g) {
      __m512i k[8];
      turn(row, g * kStep * 2, k);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const __m512 first = _mm512_cvtph_ps(_mm512_castsi512_si256(k[i]));
        const __m512 second = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(k[i], 1));
#pragma GCC unroll 4
        for (int h = 0; h < kH; ++h) {
          sum[h][0] = _mm512_fmadd_ps(first, q[g * 8 + i][h], sum[h][0]);
          sum[h][1] = _mm512_fmadd_ps(second, q[g * 8 + i][h], sum[h][1]);
        }
      }
    }
    const auto lanes = __mmask16(padded - r0 < kRows ? 0xffu : 0xffffu);
#pragma GCC unroll 4
    for (int h = 0; h < kH; ++h) {
      const __m512 low = _mm512_shuffle_f32x4(sum[h][0], sum[h][1], 0x44);
      const __m512 high = _mm512_shuffle_f32x4(sum[h][0], sum[h][1], 0xee);
      _mm512_mask_storeu_ps(t.s + h * t.s_stride + r0, lanes, _mm512_add_ps(low, high));
    }
  }
}

}  // namespace

void narrow_key_product(const NarrowKeyTile& tile) {
  with_heads(tile.heads, [&](auto heads) { product_of<heads>(tile); });
}

}  // namespace longkv::avx512
