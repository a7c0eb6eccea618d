// Int8 prompt kernel for AVX-512 with VNNI: 16 rows, one per 32-bit lane, by up to 12 tokens. vpdpbusd adds four
// products of unsigned levels and signed activations to a lane in 32 bits, so every form is multiplied as bytes.
#include "ops/matmul_x86-inl.h"

namespace longkv {

namespace {

constexpr int kTokens = 12;

// s[t] = -zero * sum(q) + sum(u * q) over `quads` steps of four columns.
template <int T>
inline void dots(const Int8Tile& a, int64_t t0, const uint8_t* w, int64_t col, int quads, const int32_t (&start)[T],
                 __m512i (&s)[T]) {
  const int8_t* q = a.q + t0 * a.q_stride + col;
#pragma GCC unroll 12
  for (int t = 0; t < T; ++t) s[t] = _mm512_set1_epi32(start[t]);
#pragma GCC unroll 8
  for (int i = 0; i < quads; ++i) {
    const __m512i levels = _mm512_loadu_si512(w + i * 64);
#pragma GCC unroll 12
    for (int t = 0; t < T; ++t) {
      s[t] = _mm512_dpbusd_epi32(s[t], levels, _mm512_set1_epi32(load32(q + t * a.q_stride + 4 * i)));
    }
  }
}

template <bool pairs, int offsets, int T>
void multiply_tokens(const Int8Tile& tile, int64_t t0) {
  const Int8Tile a = tile;  // a copy that no store can alias
  const int zero = byte_zero(*a.type);
  alignas(64) float acc[T][kTileRows];
  for (int t = 0; t < T; ++t) {
    const float* y = a.row(t0 + t);
    _mm512_store_ps(acc[t], a.accumulate ? _mm512_loadu_ps(y) : _mm512_setzero_ps());
  }
  for (int64_t g = 0; g < a.groups; ++g) {
    __m512i s[T];
    int32_t start[T];
    if constexpr (pairs) {
      __m512i half[2][T];
      for (int h = 0; h < 2; ++h) {
        const int64_t g16 = 2 * g + h;
        for (int t = 0; t < T; ++t) start[t] = -zero * a.x_sum16[(t0 + t) * a.x_sum16_stride + g16];
        dots<T>(a, t0, a.panel.levels + g16 * 16 * kTileRows, 16 * g16, 4, start, half[h]);
        // Every 16-bit scale is stored twice: the upper one, sign-extended, is the 32-bit scale of the lane.
        const __m512i scale = _mm512_srai_epi32(_mm512_loadu_si512(a.panel.scale16 + g16 * 2 * kTileRows), 16);
#pragma GCC unroll 12
        for (int t = 0; t < T; ++t) half[h][t] = _mm512_mullo_epi32(half[h][t], scale);
      }
      for (int t = 0; t < T; ++t) s[t] = _mm512_add_epi32(half[0][t], half[1][t]);
    } else {
      for (int t = 0; t < T; ++t) {
        const int16_t* sum16 = a.x_sum16 + (t0 + t) * a.x_sum16_stride + 2 * g;
        start[t] = -zero * (sum16[0] + sum16[1]);
      }
      dots<T>(a, t0, a.panel.levels + g * 32 * kTileRows, 32 * g, 8, start, s);
    }
    asm volatile("" : : "r"(acc) : "memory");  // or GCC keeps a second copy of acc among its spills
    const __m512 scale = _mm512_loadu_ps(a.panel.scale + g * kTileRows);
#pragma GCC unroll 12
    for (int t = 0; t < T; ++t) {
      const __m512 xs = _mm512_set1_ps(a.x_scale[(t0 + t) * a.x_scale_stride + g]);
      __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(s[t]), _mm512_mul_ps(scale, xs), _mm512_load_ps(acc[t]));
      for (int o = 0; o < offsets; ++o) {
        const __m512 x_sum = _mm512_set1_ps(a.x_sum[(t0 + t) * a.x_sum_stride + g * offsets + o]);
        sum = _mm512_fmadd_ps(x_sum, _mm512_loadu_ps(a.panel.offset + (g * offsets + o) * kTileRows), sum);
      }
      _mm512_store_ps(acc[t], sum);
    }
  }
  for (int t = 0; t < T; ++t) _mm512_storeu_ps(a.row(t0 + t), _mm512_load_ps(acc[t]));
}

template <bool pairs, int offsets>
void multiply_form(const Int8Tile& a) {
  int64_t t = 0;
  for (; t + kTokens <= a.tokens; t += kTokens) multiply_tokens<pairs, offsets, kTokens>(a, t);
  for (; t + 4 <= a.tokens; t += 4) multiply_tokens<pairs, offsets, 4>(a, t);
  for (; t < a.tokens; ++t) multiply_tokens<pairs, offsets, 1>(a, t);
}

void multiply_vnni(const Int8Tile& a) {
  const int offset_group = a.type->offset_group;
  if (a.type->form == PanelForm::kGroup16) {
    return offset_group == 0 ? multiply_form<true, 0>(a) : multiply_form<true, 2>(a);
  }
  return offset_group == 0 ? multiply_form<false, 0>(a) : multiply_form<false, 1>(a);
}

}  // namespace

const Int8Level& int8_level_avx512vnni() {
  static constexpr Int8Level kLevel{"avx512vnni", false, nullptr, decode_x86<ByteInterleave>, multiply_vnni};
  return kLevel;
}

}  // namespace longkv
