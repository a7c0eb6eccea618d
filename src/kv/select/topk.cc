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
  // Most scores are settled by the leading bits of their key: those above the bin where the k-th one lies are picked as
  // they come, those below it never, and only the bin itself is ordered.
  constexpr int kBins = 1 << 11, kShift = 32 - 11;
  int64_t counts[kBins] = {};
  for (int64_t i = 0; i < n; ++i) ++counts[score_key(scores[i]) >> kShift];
  uint32_t bin = kBins - 1;
  int64_t above = 0;
  while (above + counts[bin] < k) above += counts[bin--];
  // One 64-bit number per score of the bin, smaller is better: the inverted key above the index. All are different, so
  // the best are one well-defined set whatever the algorithm. Indices stay below 2^32: an index has at most one block
  // per row.
  scratch.clear();
  int64_t at = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t key = score_key(scores[i]);
    if (key >> kShift > bin) picked[size_t(at++)] = i;
    if (key >> kShift == bin) scratch.push_back((uint64_t(~key) << 32) | uint64_t(i));
  }
  const auto wanted = scratch.begin() + (k - above);
  std::nth_element(scratch.begin(), wanted, scratch.end());
  for (auto it = scratch.begin(); it != wanted; ++it) picked[size_t(at++)] = int64_t(*it & 0xffffffffu);
  std::sort(picked.begin() + above, picked.end());
  // Two ascending runs become one; the first waits in `scratch`, so that nothing is overwritten before it is read.
  scratch.resize(size_t(above));
  for (int64_t i = 0; i < above; ++i) scratch[size_t(i)] = uint64_t(picked[size_t(i)]);
  int64_t i = 0, j = above;
  for (int64_t out = 0; i < above; ++out) {
    const bool second = j < k && picked[size_t(j)] < int64_t(scratch[size_t(i)]);
    picked[size_t(out)] = second ? picked[size_t(j++)] : int64_t(scratch[size_t(i++)]);
  }
}

}  // namespace longkv
