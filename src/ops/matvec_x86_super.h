// Int8 matrix-vector kernels for super-blocks of 256 values, for AVX2 and up. Included by one file per level;
// everything lies in an unnamed namespace because each inclusion is compiled with other flags.
//
// Four rows that lie far apart go together, as four streams of memory. A register holds one activation group of 32
// weights. The integer scales of its two halves of 16 multiply the 16-bit pair sums inside the same instruction that
// widens them, so that one conversion and one multiply-add with the activation's scale finish the group.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "ops/matvec_rows.h"
#include "quant/block_formats.h"

namespace longkv {
namespace {

// Bytes ahead of each row that are fetched: two threads on 4096 x 14336 read q4_K at 28 GB/s and q6_K at 29, against 22
// and 19 with the hardware's prefetchers alone.
inline constexpr int64_t kAhead = 1024;
inline constexpr int kGroups = kSuperBlock / int(kActivationGroup);

// value = d * (scale[i/16] * q) - m * min[i/16], both kinds of scale in integers.
struct SuperScales {
  __m256i even_odd;  // 16-bit scales of the halves 0, 2, .. 14 | 1, 3, .. 15
  __m256i min;       // 16-bit minima of the halves in natural order
  float d;
  float m;
};

inline float half_to_float(f16_t h) { return _cvtsh_ss(h.bits); }

inline uint32_t load32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

inline __m256i load256(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m128i load128(const void* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

// Sixteen 8-bit scales, signed, in the order even | odd.
inline __m256i even_odd16(__m128i scales) {
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(scales, order));
}

// Shifts bit kFrom of every byte to bit kTo and keeps the bits of kMask.
template <int kFrom, int kTo, int kMask>
inline __m256i move_bits(__m256i v) {
  if constexpr (kFrom > kTo) v = _mm256_srli_epi16(v, kFrom - kTo);
  if constexpr (kFrom < kTo) v = _mm256_slli_epi16(v, kTo - kFrom);
  return _mm256_and_si256(v, _mm256_set1_epi8(char(kMask)));
}

// q4_K and q5_K: eight scales and minima of six bits.
inline SuperScales scales_of_32(const uint8_t packed[12], f16_t d, f16_t dmin) {
  const uint32_t a = load32(packed), b = load32(packed + 4), c = load32(packed + 8);
  const uint32_t six = 0x3f3f3f3fu, four = 0x0f0f0f0fu, top = 0x30303030u;
  const __m128i all = _mm_setr_epi32(int(a & six), int((c & four) | ((a >> 2) & top)), int(b & six),
                                     int(((c >> 4) & four) | ((b >> 2) & top)));
  const __m256i scale = _mm256_broadcastsi128_si256(_mm_cvtepu8_epi16(all));
  const __m256i min = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(all, all));
  return {scale, min, half_to_float(d), half_to_float(dmin)};
}

struct Q2K {
  using Block = BlockQ2_K;
  static constexpr bool kSigned = false;
  static SuperScales scales(const Block& b) {
    const __m128i packed = load128(b.scales), mask = _mm_set1_epi8(15);
    const __m128i min = _mm_and_si128(_mm_srli_epi16(packed, 4), mask);
    return {even_odd16(_mm_and_si128(packed, mask)), _mm256_cvtepu8_epi16(min), half_to_float(b.d),
            half_to_float(b.dmin)};
  }
  template <int g>
  static __m256i quants(const Block& b) {
    return move_bits<2 * (g % 4), 0, 3>(load256(b.qs + 32 * (g / 4)));
  }
};

struct Q3K {  // quants 0 .. 7 with an offset of 4
  using Block = BlockQ3_K;
  static constexpr bool kSigned = false;
  static SuperScales scales(const Block& b) {
    const uint32_t low0 = load32(b.scales), low1 = load32(b.scales + 4), high = load32(b.scales + 8);
    const uint32_t four = 0x0f0f0f0fu, top = 0x30303030u;
    const __m128i biased =
        _mm_setr_epi32(int((low0 & four) | ((high << 4) & top)), int((low1 & four) | ((high << 2) & top)),
                       int(((low0 >> 4) & four) | (high & top)), int(((low1 >> 4) & four) | ((high >> 2) & top)));
    const __m128i scale = _mm_sub_epi8(biased, _mm_set1_epi8(32));
    const float d = half_to_float(b.d);
    return {even_odd16(scale), _mm256_cvtepi8_epi16(scale), d, 4.0f * d};
  }
  template <int g>
  static __m256i quants(const Block& b) {
    return _mm256_or_si256(move_bits<2 * (g % 4), 0, 3>(load256(b.qs + 32 * (g / 4))),
                           move_bits<g, 2, 4>(load256(b.hmask)));
  }
};

struct Q4K {
  using Block = BlockQ4_K;
  static constexpr bool kSigned = false;
  static SuperScales scales(const Block& b) { return scales_of_32(b.scales, b.d, b.dmin); }
  template <int g>
  static __m256i quants(const Block& b) {
    return move_bits<4 * (g % 2), 0, 15>(load256(b.qs + 32 * (g / 2)));
  }
};

struct Q5K {
  using Block = BlockQ5_K;
  static constexpr bool kSigned = false;
  static SuperScales scales(const Block& b) { return scales_of_32(b.scales, b.d, b.dmin); }
  template <int g>
  static __m256i quants(const Block& b) {
    return _mm256_or_si256(move_bits<4 * (g % 2), 0, 15>(load256(b.qs + 32 * (g / 2))),
                           move_bits<g, 4, 16>(load256(b.qh)));
  }
};

struct Q6K {  // quants 0 .. 63 with an offset of 32
  using Block = BlockQ6_K;
  static constexpr bool kSigned = false;
  static SuperScales scales(const Block& b) {
    const __m128i scale = load128(b.scales);
    const float d = half_to_float(b.d);
    return {even_odd16(scale), _mm256_cvtepi8_epi16(scale), d, 32.0f * d};
  }
  template <int g>
  static __m256i quants(const Block& b) {
    const int h = g / 4, s = g % 4;
    return _mm256_or_si256(move_bits<4 * (s / 2), 0, 15>(load256(b.ql + 64 * h + 32 * (s & 1))),
                           move_bits<2 * s, 4, 0x30>(load256(b.qh + 32 * h)));
  }
};

struct Iq4Xs {
  using Block = BlockIQ4_XS;
  static constexpr bool kSigned = true;
  static SuperScales scales(const Block& b) {
    const __m128i mask = _mm_set1_epi8(15);
    const __m128i packed = _mm_cvtsi32_si128(int(load32(b.scales_l)));
    const __m128i low = _mm_unpacklo_epi8(_mm_and_si128(packed, mask), _mm_and_si128(_mm_srli_epi16(packed, 4), mask));
    // Bits 2g and 2g + 1 of lane g go to its top, then down to bit 4.
    const __m128i high = _mm_mullo_epi16(_mm_set1_epi16(int16_t(b.scales_h[0] | b.scales_h[1] << 8)),
                                         _mm_setr_epi16(1 << 14, 1 << 12, 1 << 10, 1 << 8, 1 << 6, 1 << 4, 1 << 2, 1));
    const __m128i biased = _mm_or_si128(_mm_cvtepu8_epi16(low), _mm_slli_epi16(_mm_srli_epi16(high, 14), 4));
    const __m128i scale = _mm_sub_epi16(biased, _mm_set1_epi16(32));
    return {_mm256_broadcastsi128_si256(scale), _mm256_setzero_si256(), half_to_float(b.d), 0.0f};
  }
  template <int g>
  static __m256i quants(const Block& b) {
    const __m256i levels = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kIq4Values)));
    const __m128i packed = load128(b.qs + 16 * g);
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(packed), _mm_srli_epi16(packed, 4), 1);
    return _mm256_shuffle_epi8(levels, _mm256_and_si256(both, _mm256_set1_epi8(15)));
  }
};

// Calls f.template operator()<g>() for every group; bit positions must be constants.
template <class F>
inline void for_groups(F f) {
  [&]<int... g>(std::integer_sequence<int, g...>) { (f.template operator()<g>(), ...); }
  (std::make_integer_sequence<int, kGroups>());
}

template <class T>
inline __m256i pair_sums(__m256i w, __m256i x) {
  if constexpr (T::kSigned) return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  return _mm256_maddubs_epi16(w, x);
}

inline float sum_lanes(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

// kRows rows that start at `first` and lie `stride` bytes apart; writes result[row][token].
template <class T, int kRows, int kTokens>
inline void dot_super_blocks(const uint8_t* first, int64_t stride, const QuantizedRows& x, int64_t token,
                             float (&result)[kRows][kTokens]) {
  using Block = typename T::Block;
  const int64_t groups = x.cols / kActivationGroup;
  const int64_t blocks = x.cols / kSuperBlock;
  const int8_t* q = x.q.data() + token * x.cols;
  const float* scale = x.scale.data() + token * groups;
  const int16_t* sum16 = x.sum16.data() + token * 2 * groups;
  const int32_t* fine_term = x.fine_term.data() + token * groups;
  __m256 acc[kRows][kTokens];
  for (auto& row : acc) {
    for (auto& a : row) a = _mm256_setzero_ps();
  }
  for (int64_t i = 0; i < blocks; ++i) {
    const Block* block[kRows];
    SuperScales s[kRows];
    __m256 part[kRows][kTokens];
    for (int r = 0; r < kRows; ++r) {
      block[r] = reinterpret_cast<const Block*>(first + r * stride) + i;
      for (int64_t j = 0; j < int64_t(sizeof(Block)); j += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(block[r]) + kAhead + j, _MM_HINT_T0);
      }
      s[r] = T::scales(*block[r]);
      for (auto& p : part[r]) p = _mm256_setzero_ps();
    }
    for_groups([&]<int g>() {
      for (int t = 0; t < kTokens; ++t) {
        const __m256i xq = _mm256_loadu_si256(
            reinterpret_cast<const __m256i*>(q + t * x.cols + i * kSuperBlock + g * kActivationGroup));
        const __m256 xs = _mm256_broadcast_ss(scale + t * groups + i * kGroups + g);
        for (int r = 0; r < kRows; ++r) {
          const __m256i both =
              _mm256_shuffle_epi8(s[r].even_odd, _mm256_set1_epi16(int16_t(2 * g + 256 * (2 * g + 1))));
          const __m256i pairs = pair_sums<T>(T::template quants<g>(*block[r]), xq);
          part[r][t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, both)), xs, part[r][t]);
        }
        const int64_t f = fine_term[t * groups + i * kGroups + g];
        if (f < 0) continue;
        const __m256i fine_q =
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x.fine_q.data() + f * kActivationGroup));
        const __m256 fine_scale = _mm256_broadcast_ss(x.fine_scale.data() + f);
        for (int r = 0; r < kRows; ++r) {
          const __m256i both =
              _mm256_shuffle_epi8(s[r].even_odd, _mm256_set1_epi16(int16_t(2 * g + 256 * (2 * g + 1))));
          const __m256i pairs = pair_sums<T>(T::template quants<g>(*block[r]), fine_q);
          part[r][t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, both)), fine_scale, part[r][t]);
        }
      }
    });
    for (int t = 0; t < kTokens; ++t) {
      // Lane g of a product of 16-bit pairs belongs to group g.
      const __m256i sums = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sum16 + 2 * (t * groups + i * kGroups)));
      const __m256 xs = _mm256_loadu_ps(scale + t * groups + i * kGroups);
      for (int r = 0; r < kRows; ++r) {
        acc[r][t] = _mm256_fmadd_ps(_mm256_set1_ps(s[r].d), part[r][t], acc[r][t]);
        if constexpr (!T::kSigned) {
          const __m256 min = _mm256_cvtepi32_ps(_mm256_madd_epi16(s[r].min, sums));
          acc[r][t] = _mm256_fnmadd_ps(_mm256_set1_ps(s[r].m), _mm256_mul_ps(min, xs), acc[r][t]);
        }
      }
      if constexpr (!T::kSigned) {
        for (int g = 0; g < kGroups; ++g) {
          const int64_t f = fine_term[t * groups + i * kGroups + g];
          if (f < 0) continue;
          const __m256i lane = _mm256_cmpeq_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(g));
          const __m256i fine_sums = _mm256_and_si256(
              lane, _mm256_set1_epi32(int(load32(reinterpret_cast<const uint8_t*>(x.fine_sum16.data() + 2 * f)))));
          const __m256 fine_scale = _mm256_broadcast_ss(x.fine_scale.data() + f);
          for (int r = 0; r < kRows; ++r) {
            const __m256 min = _mm256_cvtepi32_ps(_mm256_madd_epi16(s[r].min, fine_sums));
            acc[r][t] = _mm256_fnmadd_ps(_mm256_set1_ps(s[r].m), _mm256_mul_ps(min, fine_scale), acc[r][t]);
          }
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kTokens; ++t) result[r][t] = sum_lanes(acc[r][t]);
  }
}

template <class T, int kTokens>
void super_rows(const Weight& w, const QuantizedRows& x, int64_t token, int64_t begin, int64_t end, float* y,
                int64_t y_stride) {
  constexpr int kRows = kTokens == 1 ? 4 : 1;
  const int64_t apart = (end - begin) / kRows;
  float result[kRows][kTokens];
  for (int64_t k = 0; k < apart; ++k) {
    dot_super_blocks<T, kRows, kTokens>(w.row(begin + k), apart * w.row_bytes, x, token, result);
    for (int r = 0; r < kRows; ++r) {
      for (int t = 0; t < kTokens; ++t) y[(token + t) * y_stride + begin + k + r * apart] = result[r][t];
    }
  }
  float last[1][kTokens];
  for (int64_t r = begin + kRows * apart; r < end; ++r) {
    dot_super_blocks<T, 1, kTokens>(w.row(r), 0, x, token, last);
    for (int t = 0; t < kTokens; ++t) y[(token + t) * y_stride + r] = last[0][t];
  }
}

}  // namespace
}  // namespace longkv
