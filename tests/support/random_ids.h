// Ids of no text, the same ones for a seed.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace longkv::test {

inline std::vector<int32_t> random_ids(int64_t n, int64_t vocab, uint32_t seed = 1) {
  std::mt19937 rng(seed);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < n; ++i) ids.push_back(int32_t(rng() % uint64_t(vocab)));
  return ids;
}

}  // namespace longkv::test
