// Activations rounded to int8, once for all products that read them.
#pragma once

#include <cstdint>
#include <vector>

#include "base/threads.h"

namespace longkv {

inline constexpr int64_t kActivationGroup = 32;

// `tokens` rows of `cols` values (a multiple of 32): x ~ scale * q with |q| <= 127, one scale per group of 32.
struct QuantizedRows {
  int64_t tokens = 0;
  int64_t cols = 0;
  std::vector<int8_t> q;       // [tokens][cols]
  std::vector<float> scale;    // [tokens][cols / 32]
  std::vector<int16_t> sum16;  // [tokens][cols / 16], sums of q: the term that weight offsets multiply

  // Rounds x[tokens][cols] (row stride `stride` values). Buffers only grow.
  void assign(const float* x, int64_t tokens, int64_t cols, int64_t stride, ThreadPool& pool);
};

}  // namespace longkv
