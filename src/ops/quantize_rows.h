// Activations rounded to int8, once for all products that read them.
#pragma once

#include <cstdint>
#include <vector>

#include "base/threads.h"

namespace longkv {

inline constexpr int64_t kActivationGroup = 32;
// A second term has steps this many times smaller: the remainder of a first term, at most half a step, fills int8.
inline constexpr int kFineSteps = 254;

// A group has a second term where its squared scale exceeds this many times the mean of the row: an eighth of the
// groups of SmolLM2 and Gemma 3, with four fifths of the error, and half of any row at most.
inline constexpr double kFineFrom = 2.0;
// In place of kFineFrom: every group has one, so that rows keep 16 bits.
inline constexpr double kFineEverywhere = 0.0;

// `tokens` rows of `cols` values (a multiple of 32): x ~ scale * q with |q| <= 127, one scale per group of 32.
//
// A group's rounding error grows with its scale, and a few groups with outlying values carry most of a row's error.
// These get a second term, x ~ scale * q + fine_scale * fine_q, which products add like one more group of columns.
// Which groups do depends on the row alone.
struct QuantizedRows {
  int64_t tokens = 0;
  int64_t cols = 0;
  std::vector<int8_t> q;       // [tokens][cols]
  std::vector<float> scale;    // [tokens][cols / 32]
  std::vector<int16_t> sum16;  // [tokens][cols / 16], sums of q: the term that weight offsets multiply

  // Second terms, by group and then by token, so that products meet those of a group of weights together.
  std::vector<int32_t> fine_first;  // [cols / 32 + 1]: first term of every group, then the number of terms
  std::vector<int32_t> fine_token;  // [terms]
  std::vector<int8_t> fine_q;       // [terms][32]
  std::vector<float> fine_scale;    // [terms]
  std::vector<int16_t> fine_sum16;  // [terms][2]
  std::vector<int32_t> fine_term;   // [tokens][cols / 32]: the term of a token's group, or -1

  // What was rounded; as long as the caller keeps it.
  const float* source = nullptr;
  int64_t source_stride = 0;

  // Rounds x[tokens][cols] (row stride `stride` values). Buffers only grow.
  // Groups whose squared scale exceeds `fine_from` times the mean of the row get a second term.
  void assign(const float* x, int64_t tokens, int64_t cols, int64_t stride, ThreadPool& pool,
              double fine_from = kFineFrom);

  // For kernels that multiply 16-bit activations: rounds token `t` of the source to x ~ wide_scale * wide, with
  // wide_scale = scale / 254, [cols / 32] values, and |wide| <= 127 * 254 + 127, [cols] values.
  void widen(int64_t t, int16_t* wide, float* wide_scale) const;

 private:
  void add_fine_terms(ThreadPool& pool, double from);
};

#if defined(__x86_64__)
// One row of QuantizedRows::assign, for IsaLevel::kAvx512 and above.
void quantize_row_avx512(const float* x, int64_t cols, int8_t* q, float* scale, int16_t* sum16);
#endif

}  // namespace longkv
