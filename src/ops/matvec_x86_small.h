// Int8 matrix-vector kernels for weight blocks of 32 values, for AVX2 and up. Included by one file per level;
// everything lies in an unnamed namespace because each inclusion is compiled with other flags.
//
// Eight rows go together, one block column at a time, and a vector lane is a row: scales of eight rows convert in one
// instruction, activations are loaded once for eight rows, and no sum across lanes remains at the end of a row.
// Rows i and i + 4 share a register during the dot product: values 0-15 of both blocks, then values 16-31 of both.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "ops/matvec_rows.h"
#include "quant/block_formats.h"

namespace longkv {
namespace {

struct Halves {
  __m256i low;   // values 0-15 of row i | values 0-15 of row i + 4
  __m256i high;  // values 16-31 of both
};

inline __m256i load_two(const uint8_t* a, const uint8_t* b) {
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), _mm_loadu_si128(reinterpret_cast<const __m128i*>(b)), 1);
}

inline Halves split_nibbles(__m256i packed) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(packed, mask), _mm256_and_si256(_mm256_srli_epi16(packed, 4), mask)};
}

// Sets bit 4 of every value from the 32 bits that start at byte kAt of each 128-bit lane of `bits`.
template <int kAt>
inline Halves add_fifth_bit(Halves v, __m256i bits) {
  const char a = kAt, b = kAt + 1, c = kAt + 2, d = kAt + 3;
  const __m256i spread_low = _mm256_setr_epi8(a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b,  //
                                              a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b);
  const __m256i spread_high = _mm256_setr_epi8(c, c, c, c, c, c, c, c, d, d, d, d, d, d, d, d,  //
                                               c, c, c, c, c, c, c, c, d, d, d, d, d, d, d, d);
  const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201ull));
  const __m256i sixteen = _mm256_set1_epi8(16);
  const auto fifth = [&](__m256i spread) {
    const __m256i chosen = _mm256_and_si256(_mm256_shuffle_epi8(bits, spread), bit);
    return _mm256_and_si256(_mm256_cmpeq_epi8(chosen, bit), sixteen);
  };
  return {_mm256_or_si256(v.low, fifth(spread_low)), _mm256_or_si256(v.high, fifth(spread_high))};
}

// Weight types. kOffset: subtracted from the unsigned quants; kMin: the block has an own minimum; kLargest: largest
// unsigned quant, which decides how long sums fit 16 bits. kSigned: quants() gives signed bytes instead.
struct Q4_0 {
  using Block = BlockQ4_0;
  static constexpr int kOffset = 8, kLargest = 15;
  static constexpr bool kMin = false, kSigned = false;
  static Halves quants(const uint8_t* a, const uint8_t* b) { return split_nibbles(load_two(a + 2, b + 2)); }
};
struct Q4_1 {
  using Block = BlockQ4_1;
  static constexpr int kOffset = 0, kLargest = 15;
  static constexpr bool kMin = true, kSigned = false;
  static Halves quants(const uint8_t* a, const uint8_t* b) { return split_nibbles(load_two(a + 4, b + 4)); }
};
struct Q5_0 {
  using Block = BlockQ5_0;
  static constexpr int kOffset = 16, kLargest = 31;
  static constexpr bool kMin = false, kSigned = false;
  static Halves quants(const uint8_t* a, const uint8_t* b) {
    return add_fifth_bit<2>(split_nibbles(load_two(a + 6, b + 6)), load_two(a, b));
  }
};
struct Q5_1 {
  using Block = BlockQ5_1;
  static constexpr int kOffset = 0, kLargest = 31;
  static constexpr bool kMin = true, kSigned = false;
  static Halves quants(const uint8_t* a, const uint8_t* b) {
    return add_fifth_bit<4>(split_nibbles(load_two(a + 8, b + 8)), load_two(a, b));
  }
};
struct Q8_0 {
  using Block = BlockQ8_0;
  static constexpr int kOffset = 0, kLargest = 128;
  static constexpr bool kMin = false, kSigned = true;
  static Halves quants(const uint8_t* a, const uint8_t* b) {
    return {load_two(a + 2, b + 2), load_two(a + 18, b + 18)};
  }
};
struct Iq4Nl {
  using Block = BlockIQ4_NL;
  static constexpr int kOffset = 0, kLargest = 127;
  static constexpr bool kMin = false, kSigned = true;
  static Halves quants(const uint8_t* a, const uint8_t* b) {
    const __m256i levels = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kIq4Values)));
    const Halves v = split_nibbles(load_two(a + 2, b + 2));
    return {_mm256_shuffle_epi8(levels, v.low), _mm256_shuffle_epi8(levels, v.high)};
  }
};

// Sums of four register quarters: lane by lane [a, a, a, a], [b...], [c...], [d...] become [a, b, c, d] (dwords).
template <class Add>
inline __m256i fold(__m256i a, __m256i b, Add add) {
  return add(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}
template <class Add>
inline __m256i fold_again(__m256i ab, __m256i cd, Add add) {
  const __m256 x = _mm256_castsi256_ps(ab), y = _mm256_castsi256_ps(cd);
  return add(_mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88)), _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xdd)));
}
inline constexpr auto kAdd16 = [](__m256i a, __m256i b) { return _mm256_add_epi16(a, b); };
inline constexpr auto kAdd32 = [](__m256i a, __m256i b) { return _mm256_add_epi32(a, b); };

inline __m256i broadcast16(const int8_t* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Partial sums of a pair of blocks: dwords for kSigned, 16-bit sums of four products otherwise.
template <class T>
inline __m256i pair_dot(const Halves& w, __m256i x_low, __m256i x_high) {
  if constexpr (T::kSigned) {
    // |w| as unsigned times x with w's sign: |w| = 128 is right too, and 2 * 128 * 127 still fits 16 bits.
    const auto dwords = [](__m256i v, __m256i x) {
      return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(v), _mm256_sign_epi8(x, v)), _mm256_set1_epi16(1));
    };
    return _mm256_add_epi32(dwords(w.low, x_low), dwords(w.high, x_high));
  } else {
    return _mm256_add_epi16(_mm256_maddubs_epi16(w.low, x_low), _mm256_maddubs_epi16(w.high, x_high));
  }
}

// Dot products of eight blocks with one activation block: lane r is row r. pair(i) gives the blocks of rows i and i
// + 4.
template <class T, class Pair>
inline __m256i dot_rows(const Pair& pair, const int8_t* x) {
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256i x_low = broadcast16(x), x_high = broadcast16(x + 16);
  const __m256i p0 = pair_dot<T>(pair(0), x_low, x_high), p1 = pair_dot<T>(pair(1), x_low, x_high);
  if constexpr (T::kSigned) {
    const __m256i ab = fold(p0, p1, kAdd32);
    const __m256i p2 = pair_dot<T>(pair(2), x_low, x_high), p3 = pair_dot<T>(pair(3), x_low, x_high);
    return fold_again(ab, fold(p2, p3, kAdd32), kAdd32);
  } else {
    // A 16-bit lane holds 4 products in p, 8 after one fold and 16 after two.
    const __m256i ab = fold(p0, p1, kAdd16);
    const __m256i p2 = pair_dot<T>(pair(2), x_low, x_high), p3 = pair_dot<T>(pair(3), x_low, x_high);
    const __m256i cd = fold(p2, p3, kAdd16);
    if constexpr (16 * T::kLargest * 127 <= 32767) {
      return _mm256_madd_epi16(fold_again(ab, cd, kAdd16), ones);
    } else {
      static_assert(8 * T::kLargest * 127 <= 32767);
      return fold_again(_mm256_madd_epi16(ab, ones), _mm256_madd_epi16(cd, ones), kAdd32);
    }
  }
}

struct Scales {
  __m256 d;
  __m256 m;  // kMin only
};

template <class T>
inline Scales load_scales(const uint8_t* const (&p)[8]) {
  const auto half = [&](int r) {
    int16_t v;
    std::memcpy(&v, p[r], 2);
    return v;
  };
  const auto both = [&](int r) {
    int32_t v;
    std::memcpy(&v, p[r], 4);
    return v;
  };
  if constexpr (T::kMin) {
    const __m128i split = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m128i first = _mm_shuffle_epi8(_mm_setr_epi32(both(0), both(1), both(2), both(3)), split);
    const __m128i second = _mm_shuffle_epi8(_mm_setr_epi32(both(4), both(5), both(6), both(7)), split);
    return {_mm256_cvtph_ps(_mm_unpacklo_epi64(first, second)), _mm256_cvtph_ps(_mm_unpackhi_epi64(first, second))};
  } else {
    const __m128i d = _mm_setr_epi16(half(0), half(1), half(2), half(3), half(4), half(5), half(6), half(7));
    return {_mm256_cvtph_ps(d), _mm256_setzero_ps()};
  }
}

// The sum of one activation block in every lane, times `factor`.
inline __m256i block_sum(const int16_t* sum16, int factor) {
  int32_t both;
  std::memcpy(&both, sum16, 4);
  return _mm256_madd_epi16(_mm256_set1_epi32(both), _mm256_set1_epi16(int16_t(factor)));
}

// Eight rows that start at `first` and lie `row_bytes` apart; writes result[t] (lane = row).
template <class T, int kTokens>
inline void eight_rows(const uint8_t* first, int64_t row_bytes, const QuantizedRows& x, int64_t token, __m256* result) {
  const int64_t blocks = x.cols / kSmallBlock;
  const int8_t* q = x.q.data() + token * x.cols;
  const float* scale = x.scale.data() + token * blocks;
  const int16_t* sum16 = x.sum16.data() + token * 2 * blocks;
  const int32_t* fine_term = x.fine_term.data() + token * blocks;
  const uint8_t* p[8];
  for (int r = 0; r < 8; ++r) p[r] = first + r * row_bytes;
  __m256 acc[kTokens];
  for (int t = 0; t < kTokens; ++t) acc[t] = _mm256_setzero_ps();
  for (int64_t b = 0; b < blocks; ++b) {
    const Scales s = load_scales<T>(p);
    Halves kept[4];  // one token: unpacked where used, which spares registers
    if constexpr (kTokens > 1) {
      for (int i = 0; i < 4; ++i) kept[i] = T::quants(p[i], p[i + 4]);
    }
    const auto pair = [&](int i) {
      if constexpr (kTokens > 1) return kept[i];
      return T::quants(p[i], p[i + 4]);
    };
    const auto add = [&](const int8_t* xq, const float* x_scale, const int16_t* sums, __m256 to) {
      __m256i dot = dot_rows<T>(pair, xq);
      const __m256 xs = _mm256_broadcast_ss(x_scale);
      if constexpr (T::kMin) {
        const __m256 sum = _mm256_cvtepi32_ps(block_sum(sums, 1));
        const __m256 value = _mm256_fmadd_ps(s.m, sum, _mm256_mul_ps(s.d, _mm256_cvtepi32_ps(dot)));
        return _mm256_fmadd_ps(value, xs, to);
      } else {
        if constexpr (T::kOffset != 0) dot = _mm256_sub_epi32(dot, block_sum(sums, T::kOffset));
        return _mm256_fmadd_ps(_mm256_mul_ps(s.d, xs), _mm256_cvtepi32_ps(dot), to);
      }
    };
    for (int t = 0; t < kTokens; ++t) {
      const int64_t at = t * blocks + b;
      acc[t] = add(q + at * kSmallBlock, scale + at, sum16 + 2 * at, acc[t]);
      if (const int64_t f = fine_term[at]; f >= 0) [[unlikely]] {
        acc[t] = add(x.fine_q.data() + f * kSmallBlock, x.fine_scale.data() + f, x.fine_sum16.data() + 2 * f, acc[t]);
      }
    }
    for (int r = 0; r < 8; ++r) p[r] += sizeof(typename T::Block);
  }
  for (int t = 0; t < kTokens; ++t) result[t] = acc[t];
}

template <class T, int kTokens>
void small_rows(const Weight& w, const QuantizedRows& x, int64_t token, int64_t begin, int64_t end, float* y,
                int64_t y_stride) {
  __m256 result[kTokens];
  // Rows that are far apart make eight streams of memory, of which the hardware keeps more lines in flight than of one:
  // two threads read q8_0 of 49152 x 576 at 36 GB/s, against 12 with neighbouring rows, 25 with those and prefetching,
  // and 24 for a loop that only reads from front to back.
  const int64_t apart = (end - begin) / 8;
  for (int64_t k = 0; k < apart; ++k) {
    eight_rows<T, kTokens>(w.row(begin + k), apart * w.row_bytes, x, token, result);
    for (int t = 0; t < kTokens; ++t) {
      alignas(32) float lanes[8];
      _mm256_store_ps(lanes, result[t]);
      float* out = y + (token + t) * y_stride + begin + k;
      for (int i = 0; i < 8; ++i) out[i * apart] = lanes[i];
    }
  }
  for (int64_t r = begin + 8 * apart; r < end; ++r) {  // fewer than eight are left: the same row in all lanes
    eight_rows<T, kTokens>(w.row(r), 0, x, token, result);
    for (int t = 0; t < kTokens; ++t) y[(token + t) * y_stride + r] = _mm256_cvtss_f32(result[t]);
  }
}

}  // namespace
}  // namespace longkv
