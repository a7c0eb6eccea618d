// Int8 prompt kernel for AVX2: 16 rows by up to 6 tokens.
//
// kGroup32 and kGroup16: vpmaddubsw multiplies unsigned levels by signed activations and adds pairs in 16 bits. Over a
// whole group these sums stay in 16 bits: additions wrap, so only the final value must fit, and sum (u - zero) q over
// the 16 (or 8) products of a lane is at most 16 * 16 * 127 (8 * 32 * 127) = 32512. `zero` enters as the start value
// of the lane. One widening per group is left instead of one per vpmaddubsw.
// kByte: 8-bit levels would saturate vpmaddubsw; both operands have 16 bits and vpmaddwd sums in 32, where 32 products
// of 128 by the greatest wide activation, 127 * 255, fit. The activations' precision costs nothing here.
#include "ops/matmul_x86-inl.h"

namespace longkv {

namespace {

constexpr int kTokens = 6;

inline __m256i broadcast32(const void* p) { return _mm256_set1_epi32(load32(p)); }

// Ends the computation of a and b here. GCC otherwise gathers the products of all tokens before it adds them, needs
// more registers than there are and spills sums in the inner loop (measured: half the speed).
inline void settle(__m256i& a, __m256i& b) { asm volatile("" : "+x"(a), "+x"(b)); }

// kGroup32, kGroup16: as ByteInterleave. kByte: [column / 2][16 rows][2 columns] of 16 bits.
struct Avx2Interleave {
  static void store(const uint8_t* levels, int columns, const PanelType& type, uint8_t* dst, int64_t group) {
    if (type.form != PanelForm::kByte) return ByteInterleave::store(levels, columns, type, dst, group);
    dst += group * 32 * kTileRows * 2;
    __m256i rows[8];
    for (int c = 0; c < columns; c += 16) {
      for (int half = 0; half < 2; ++half) {
        for (int r = 0; r < 8; ++r) {
          const uint8_t* src = levels + (half * 8 + r) * columns + c;
          rows[r] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
        }
        transpose8x8(rows);
        for (int i = 0; i < 8; ++i) longkv::store(dst + i * 64 + half * 32, rows[i]);
      }
      dst += 512;
    }
  }
};

// Per lane: 16-bit sums of u * q over `quads` steps of four columns, started with `start`.
template <int T>
inline void accumulate_bytes(const uint8_t* w, const int8_t* q, int64_t q_stride, int quads, __m256i (&s)[T][2]) {
#pragma GCC unroll 8
  for (int i = 0; i < quads; ++i) {
    const __m256i w0 = load(w + i * 64), w1 = load(w + i * 64 + 32);
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t) {
      const __m256i x = broadcast32(q + t * q_stride + 4 * i);
      s[t][0] = _mm256_add_epi16(s[t][0], _mm256_maddubs_epi16(w0, x));
      s[t][1] = _mm256_add_epi16(s[t][1], _mm256_maddubs_epi16(w1, x));
      settle(s[t][0], s[t][1]);
    }
  }
}

template <int T>
inline void load_start(const int16_t* x_zero, int64_t stride, __m256i (&s)[T][2]) {
#pragma GCC unroll 6
  for (int t = 0; t < T; ++t) {
    s[t][0] = s[t][1] = x_zero == nullptr ? _mm256_setzero_si256() : broadcast32(x_zero + t * stride);
  }
}

// 32-bit dot products of group g.
template <PanelForm form, bool zero, int T>
inline void group_dots(const Int8Tile& a, int64_t t0, int64_t g, __m256i (&s)[T][2]) {
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (form == PanelForm::kByte) {
    const uint8_t* w = a.panel.levels + g * 32 * kTileRows * 2;
    const int16_t* q = a.q16 + t0 * a.q_stride + 32 * g;
    load_start<T>(nullptr, 0, s);
#pragma GCC unroll 4
    for (int i = 0; i < 16; ++i) {
      const __m256i w0 = load(w + i * 64), w1 = load(w + i * 64 + 32);
#pragma GCC unroll 6
      for (int t = 0; t < T; ++t) {
        const __m256i x = broadcast32(q + t * a.q_stride + 2 * i);
        s[t][0] = _mm256_add_epi32(s[t][0], _mm256_madd_epi16(w0, x));
        s[t][1] = _mm256_add_epi32(s[t][1], _mm256_madd_epi16(w1, x));
        settle(s[t][0], s[t][1]);
      }
    }
  } else if constexpr (form == PanelForm::kGroup32) {
    const uint8_t* w = a.panel.levels + g * 32 * kTileRows;
    const int8_t* q = a.q + t0 * a.q_stride + 32 * g;
    load_start<T>(zero ? a.x_zero + t0 * a.x_zero_stride + 2 * g : nullptr, a.x_zero_stride, s);
    accumulate_bytes<T>(w, q, a.q_stride, 8, s);
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t) {
      s[t][0] = _mm256_madd_epi16(s[t][0], ones);
      s[t][1] = _mm256_madd_epi16(s[t][1], ones);
    }
  } else {
    __m256i first[T][2];
    for (int half = 0; half < 2; ++half) {
      const int64_t g16 = 2 * g + half;
      load_start<T>(zero ? a.x_zero + t0 * a.x_zero_stride + 2 * g16 : nullptr, a.x_zero_stride, s);
      accumulate_bytes<T>(a.panel.levels + g16 * 16 * kTileRows, a.q + t0 * a.q_stride + 16 * g16, a.q_stride, 4, s);
      const __m256i scale0 = load(a.panel.scale16 + g16 * 32), scale1 = load(a.panel.scale16 + g16 * 32 + 16);
#pragma GCC unroll 6
      for (int t = 0; t < T; ++t) {
        s[t][0] = _mm256_madd_epi16(s[t][0], scale0);
        s[t][1] = _mm256_madd_epi16(s[t][1], scale1);
        if (half == 0) {
          first[t][0] = s[t][0];
          first[t][1] = s[t][1];
        } else {
          s[t][0] = _mm256_add_epi32(s[t][0], first[t][0]);
          s[t][1] = _mm256_add_epi32(s[t][1], first[t][1]);
        }
      }
    }
  }
}

template <PanelForm form, bool zero, int offsets, int T>
void multiply_tokens(const Int8Tile& tile, int64_t t0) {
  const Int8Tile a = tile;  // a copy that no store can alias
  // fp32 sums live in memory: registers are needed for the integer ones, and these are touched once per group.
  alignas(32) float acc[T][kTileRows];
  for (int t = 0; t < T; ++t) {
    const float* y = a.row(t0 + t);
    for (int v = 0; v < 2; ++v) {
      _mm256_store_ps(acc[t] + 8 * v, a.accumulate ? _mm256_loadu_ps(y + 8 * v) : _mm256_setzero_ps());
    }
  }
  const float* x_scale = a.x_scale + t0 * a.x_scale_stride;
  const float* x_sum = offsets == 0 ? nullptr : a.x_sum + t0 * a.x_sum_stride;
  for (int64_t g = 0; g < a.groups; ++g) {
    __m256i s[T][2];
    group_dots<form, zero, T>(a, t0, g, s);
    asm volatile("" : : "r"(acc) : "memory");  // or GCC keeps a second copy of acc among its spills
    const __m256 scale0 = _mm256_loadu_ps(a.panel.scale + g * kTileRows);
    const __m256 scale1 = _mm256_loadu_ps(a.panel.scale + g * kTileRows + 8);
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t) {
      const __m256 xs = _mm256_broadcast_ss(x_scale + t * a.x_scale_stride + g);
      __m256 y0 = _mm256_load_ps(acc[t]), y1 = _mm256_load_ps(acc[t] + 8);
      y0 = _mm256_fmadd_ps(_mm256_cvtepi32_ps(s[t][0]), _mm256_mul_ps(scale0, xs), y0);
      y1 = _mm256_fmadd_ps(_mm256_cvtepi32_ps(s[t][1]), _mm256_mul_ps(scale1, xs), y1);
      for (int o = 0; o < offsets; ++o) {
        const float* offset = a.panel.offset + (g * offsets + o) * kTileRows;
        const __m256 sum = _mm256_broadcast_ss(x_sum + t * a.x_sum_stride + g * offsets + o);
        y0 = _mm256_fmadd_ps(sum, _mm256_loadu_ps(offset), y0);
        y1 = _mm256_fmadd_ps(sum, _mm256_loadu_ps(offset + 8), y1);
      }
      _mm256_store_ps(acc[t], y0);
      _mm256_store_ps(acc[t] + 8, y1);
    }
  }
  for (int t = 0; t < T; ++t) {
    float* y = a.row(t0 + t);
    for (int v = 0; v < 2; ++v) _mm256_storeu_ps(y + 8 * v, _mm256_load_ps(acc[t] + 8 * v));
  }
}

template <PanelForm form, bool zero, int offsets>
void multiply_form(const Int8Tile& a) {
  int64_t t = 0;
  for (; t + kTokens <= a.tokens; t += kTokens) multiply_tokens<form, zero, offsets, kTokens>(a, t);
  switch (a.tokens - t) {
    case 1: return multiply_tokens<form, zero, offsets, 1>(a, t);
    case 2: return multiply_tokens<form, zero, offsets, 2>(a, t);
    case 3: return multiply_tokens<form, zero, offsets, 3>(a, t);
    case 4: return multiply_tokens<form, zero, offsets, 4>(a, t);
    case 5: return multiply_tokens<form, zero, offsets, 5>(a, t);
    default: return;
  }
}

void multiply_avx2(const Int8Tile& a) {
  const bool zero = a.type->zero != 0;
  switch (a.type->form) {
    case PanelForm::kByte: return multiply_form<PanelForm::kByte, false, 0>(a);
    case PanelForm::kGroup16:
      return zero ? multiply_form<PanelForm::kGroup16, true, 0>(a) : multiply_form<PanelForm::kGroup16, false, 2>(a);
    case PanelForm::kGroup32:
      if (!zero) return multiply_form<PanelForm::kGroup32, false, 1>(a);
      return a.type->offset_group == 0 ? multiply_form<PanelForm::kGroup32, true, 0>(a)
                                       : multiply_form<PanelForm::kGroup32, true, 1>(a);
  }
}

// -zero * sum of q over columns 0, 1 and over 2, 3 of every four.
void zero_terms_avx2(const int8_t* q, const int16_t*, int64_t columns, int group, int zero, int16_t* x_zero) {
  const __m256i ones = _mm256_set1_epi8(1), factor = _mm256_set1_epi16(int16_t(-zero));
  for (int64_t c = 0; c < columns; c += 32) {
    // 32-bit elements of two 16-bit sums each: columns 0, 1 and 2, 3 of four; then summed over the 16 columns of a
    // lane.
    __m256i sums = _mm256_maddubs_epi16(ones, load(q + c));
    sums = _mm256_add_epi16(sums, _mm256_shuffle_epi32(sums, 0x4e));
    sums = _mm256_add_epi16(sums, _mm256_shuffle_epi32(sums, 0xb1));
    const __m256i scaled = _mm256_mullo_epi16(sums, factor);
    __m128i low = _mm256_castsi256_si128(scaled);
    const __m128i high = _mm256_extracti128_si256(scaled, 1);
    if (group == 16) {
      _mm_storel_epi64(reinterpret_cast<__m128i*>(x_zero), _mm_unpacklo_epi32(low, high));
      x_zero += 4;
    } else {
      low = _mm_add_epi16(low, high);
      std::memcpy(x_zero, &low, 4);
      x_zero += 2;
    }
  }
}

}  // namespace

const Int8Level& int8_level_avx2() {
  static constexpr Int8Level kLevel{.name = "avx2",
                                    .wide = true,
                                    .zero_terms = zero_terms_avx2,
                                    .decode = decode_x86<Avx2Interleave>,
                                    .multiply = multiply_avx2};
  return kLevel;
}

}  // namespace longkv
