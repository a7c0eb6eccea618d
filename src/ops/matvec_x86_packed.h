// Int8 matrix-vector kernels over packed rows, for AVX2 and up. Included by one file per level.
//
// A vector lane is a row, so scales of eight rows convert in one instruction and no sum across lanes remains. With one
// token, four groups of eight rows that lie far apart go together: four streams of memory, and every broadcast of
// activations serves 32 rows. On one core of a Zen 3 these kernels read q4_1 from the second-level cache at 27 GB/s,
// where the file's own layout gives 19. Results are the bits that the file's layout gives.
#pragma once

#include "ops/matvec_rows.h"
#include "ops/packed_x86.h"

namespace longkv {
namespace {

inline __m256i broadcast_four(const int8_t* q) {
  int32_t four;
  std::memcpy(&four, q, 4);
  return _mm256_set1_epi32(four);
}

// One block of activations: 32 values, their scale and the sums of their halves.
struct PackedInput {
  const int8_t* q;
  float scale;
  const int16_t* sum16;
};

// Dot products of a column of blocks of kGroups groups with the same block of kTokens inputs.
template <class T, int kGroups, int kTokens>
inline void packed_dots(const uint8_t* const (&p)[kGroups], const PackedInput (&x)[kTokens],
                        __m256i (&dot)[kGroups][kTokens]) {
#if defined(__AVX512VNNI__)
  for (auto& row : dot) {
    for (auto& d : row) d = _mm256_setzero_si256();
  }
  const auto step = [&]<int j>() {
    for (int g = 0; g < kGroups; ++g) {
      const PackedPair w = packed_levels<T, j>(p[g]);
      for (int t = 0; t < kTokens; ++t) {
        dot[g][t] = _mm256_dpbusd_epi32(dot[g][t], w.low, broadcast_four(x[t].q + 4 * j));
        dot[g][t] = _mm256_dpbusd_epi32(dot[g][t], w.high, broadcast_four(x[t].q + 16 + 4 * j));
      }
    }
  };
  [&]<int... j>(std::integer_sequence<int, j...>) { (step.template operator()<j>(), ...); }
  (std::make_integer_sequence<int, 4>());
#else
  // A 16-bit lane of `low` and of `high` takes 8 products, of both together 16: 16 * 15 * 127 and 8 * 31 * 127 fit.
  __m256i high[kGroups][kTokens];
  const auto step = [&]<int j>() {
    for (int g = 0; g < kGroups; ++g) {
      const PackedPair w = packed_levels<T, j>(p[g]);
      for (int t = 0; t < kTokens; ++t) {
        const __m256i a = _mm256_maddubs_epi16(w.low, broadcast_four(x[t].q + 4 * j));
        const __m256i b = _mm256_maddubs_epi16(w.high, broadcast_four(x[t].q + 16 + 4 * j));
        if constexpr (T::kFifth) {
          dot[g][t] = j == 0 ? a : _mm256_add_epi16(dot[g][t], a);
          high[g][t] = j == 0 ? b : _mm256_add_epi16(high[g][t], b);
        } else {
          const __m256i both = _mm256_add_epi16(a, b);
          dot[g][t] = j == 0 ? both : _mm256_add_epi16(dot[g][t], both);
        }
      }
    }
  };
  [&]<int... j>(std::integer_sequence<int, j...>) { (step.template operator()<j>(), ...); }
  (std::make_integer_sequence<int, 4>());
  const __m256i ones = _mm256_set1_epi16(1);
  for (int g = 0; g < kGroups; ++g) {
    for (int t = 0; t < kTokens; ++t) {
      dot[g][t] = _mm256_madd_epi16(dot[g][t], ones);
      if constexpr (T::kFifth) dot[g][t] = _mm256_add_epi32(dot[g][t], _mm256_madd_epi16(high[g][t], ones));
    }
  }
#endif
}

// Adds what a column of blocks contributes: one input for every token, or all inputs, which are terms, to `token`.
template <class T, int kGroups, int kInputs, int kTokens>
inline void add_packed(const uint8_t* const (&p)[kGroups], const PackedInput (&x)[kInputs], int token,
                       __m256 (&acc)[kGroups][kTokens]) {
  __m256i dot[kGroups][kInputs];
  packed_dots<T>(p, x, dot);
  for (int i = 0; i < kInputs; ++i) {
    const int t = kInputs == kTokens ? i : token;
    const __m256 scale = _mm256_set1_ps(x[i].scale);
    const int32_t sum = x[i].sum16[0] + x[i].sum16[1];
    for (int g = 0; g < kGroups; ++g) {
      const __m256 d = packed_halves(p[g]);
      if constexpr (T::kMin) {
        const __m256 value = _mm256_fmadd_ps(packed_halves(p[g] + 16), _mm256_set1_ps(float(sum)),
                                             _mm256_mul_ps(d, _mm256_cvtepi32_ps(dot[g][i])));
        acc[g][t] = _mm256_fmadd_ps(value, scale, acc[g][t]);
      } else {
        const __m256i centred = _mm256_sub_epi32(dot[g][i], _mm256_set1_epi32(T::kOffset * sum));
        acc[g][t] = _mm256_fmadd_ps(_mm256_mul_ps(d, scale), _mm256_cvtepi32_ps(centred), acc[g][t]);
      }
    }
  }
}

// Groups that start at `first` and lie `apart` bytes apart; result[group][token], lane = row.
template <class T, int kGroups, int kTokens>
inline void packed_groups(const uint8_t* first, int64_t apart, const QuantizedRows& x, int64_t token,
                          __m256 (&acc)[kGroups][kTokens]) {
  const int64_t blocks = x.cols / kSmallBlock;
  const int8_t* q = x.q.data() + token * x.cols;
  const float* scale = x.scale.data() + token * blocks;
  const int16_t* sum16 = x.sum16.data() + token * 2 * blocks;
  const int32_t* fine_term = x.fine_term.data() + token * blocks;
  const uint8_t* p[kGroups];
  for (int g = 0; g < kGroups; ++g) p[g] = first + g * apart;
  for (auto& row : acc) {
    for (auto& a : row) a = _mm256_setzero_ps();
  }
  for (int64_t b = 0; b < blocks; ++b) {
    const auto term = [&](int64_t f) {
      return PackedInput{x.fine_q.data() + f * kSmallBlock, x.fine_scale[size_t(f)], x.fine_sum16.data() + 2 * f};
    };
    PackedInput in[kTokens];
    for (int t = 0; t < kTokens; ++t) {
      const int64_t at = t * blocks + b;
      in[t] = {q + at * kSmallBlock, scale[at], sum16 + 2 * at};
    }
    if constexpr (kTokens == 1) {
      // Both terms of a group meet weights that are unpacked once: in the output matrix every group has two.
      if (const int64_t f = fine_term[b]; f >= 0) {
        const PackedInput both[2] = {in[0], term(f)};
        add_packed<T>(p, both, 0, acc);
      } else {
        add_packed<T>(p, in, 0, acc);
      }
    } else {
      add_packed<T>(p, in, 0, acc);
      for (int t = 0; t < kTokens; ++t) {
        if (const int64_t f = fine_term[t * blocks + b]; f >= 0) {
          const PackedInput fine[1] = {term(f)};
          add_packed<T>(p, fine, t, acc);
        }
      }
    }
    for (int g = 0; g < kGroups; ++g) p[g] += T::kBytes;
  }
}

template <class T, int kTokens>
void packed_rows(const Weight& w, const QuantizedRows& x, int64_t token, int64_t begin, int64_t end, float* y,
                 int64_t y_stride) {
  constexpr int kStreams = 4 / kTokens;
  const int64_t group_bytes = kPackedRows * w.row_bytes;
  const int64_t first = begin / kPackedRows, groups = (end - begin + kPackedRows - 1) / kPackedRows;
  const int64_t apart = groups / kStreams;
  const auto write = [&](int64_t group, int t, __m256 lanes) {
    float* out = y + (token + t) * y_stride + group * kPackedRows;
    const int64_t rows = end - group * kPackedRows;
    if (rows >= kPackedRows) return _mm256_storeu_ps(out, lanes);
    alignas(32) float values[kPackedRows];
    _mm256_store_ps(values, lanes);
    std::memcpy(out, values, size_t(rows) * sizeof(float));
  };
  __m256 many[kStreams][kTokens];
  for (int64_t k = 0; k < apart; ++k) {
    packed_groups<T>(w.packed + (first + k) * group_bytes, apart * group_bytes, x, token, many);
    for (int s = 0; s < kStreams; ++s) {
      for (int t = 0; t < kTokens; ++t) write(first + k + s * apart, t, many[s][t]);
    }
  }
  __m256 one[1][kTokens];
  for (int64_t k = kStreams * apart; k < groups; ++k) {
    packed_groups<T>(w.packed + (first + k) * group_bytes, 0, x, token, one);
    for (int t = 0; t < kTokens; ++t) write(first + k, t, one[0][t]);
  }
}

}  // namespace
}  // namespace longkv
