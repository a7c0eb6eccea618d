#include "kv/select/topk.h"

#include <algorithm>

namespace longkv {

void top_k(const float* scores, int64_t n, int64_t k, std::vector<uint64_t>& scratch, std::vector<int64_t>& picked) {
  k = std::clamp<int64_t>(k, 0, n);
  picked.resize(size_t(k));
  if (k == n) {
    for (int64_t i = 0; i < n; ++i) picked[size_t(i)] = i;
    return;
  }
  // One 64-bit number per score, smaller is better: the inverted key above the index. All are different, so the k
  // smallest are one well-defined set whatever the algorithm. Indices stay below 2^32: an index has at most one block
  // per row.
  scratch.resize(size_t(n));
  for (int64_t i = 0; i < n; ++i) scratch[size_t(i)] = (uint64_t(~score_key(scores[i])) << 32) | uint64_t(i);
  std::nth_element(scratch.begin(), scratch.begin() + k, scratch.end());
  for (int64_t i = 0; i < k; ++i) picked[size_t(i)] = int64_t(scratch[size_t(i)] & 0xffffffffu);
  std::sort(picked.begin(), picked.end());
}

}  // namespace longkv
