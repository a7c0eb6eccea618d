#include "prefill/choose.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "kv/layout.h"
#include "kv/select/topk.h"

namespace longkv {

void cover(std::span<const float> scores, double share, std::vector<uint64_t>& scratch, std::vector<int64_t>& picked) {
  // One number orders by score, then by index.
  scratch.resize(scores.size());
  double total = 0;
  for (size_t i = 0; i < scores.size(); ++i) {
    scratch[i] = uint64_t(score_key(scores[i])) << 32 | (0xffffffffu - uint32_t(i));
    total += scores[i];
  }
  const auto score_of = [&](uint64_t key) { return double(scores[size_t(0xffffffffu - uint32_t(key))]); };
  const double wanted = share * total;
  // Halving what is undecided: the larger half is either needed whole, or holds the boundary.
  auto begin = scratch.begin(), end = scratch.end();
  double held = 0;
  while (begin != end) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, std::greater<>());
    double half = 0;
    for (auto it = begin; it <= middle; ++it) half += score_of(*it);
    if (held + half >= wanted) {
      // `middle` itself is needed only if what is above it does not suffice.
      if (held + half - score_of(*middle) < wanted) {
        begin = end = middle + 1;
        break;
      }
      end = middle;
    } else {
      held += half;
      begin = middle + 1;
    }
  }
  picked.clear();
  for (auto it = scratch.begin(); it != begin; ++it) picked.push_back(int64_t(0xffffffffu - uint32_t(*it)));
  std::sort(picked.begin(), picked.end());
}

void ranges_of(std::span<const int64_t> ascending, std::vector<RowRange>& out) {
  out.clear();
  for (const int64_t i : ascending) append_range(out, {i, i + 1});
}

}  // namespace longkv
