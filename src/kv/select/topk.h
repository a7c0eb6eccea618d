// The k best of n scores.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace longkv {

// Orders floats as unsigned numbers: larger score, larger key. NaN ranks with -inf, so it never breaks the order.
inline uint32_t score_key(float score) {
  if (score != score) score = -__builtin_inff();
  const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);  // -0 becomes +0
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Writes to `picked` the indices of the k largest scores, ascending; equal scores go to the lower index. k >= n picks
// all. `scratch` keeps its memory between calls.
void top_k(const float* scores, int64_t n, int64_t k, std::vector<uint64_t>& scratch, std::vector<int64_t>& picked);

}  // namespace longkv
