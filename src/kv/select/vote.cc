#include "kv/select/vote.h"

#include <algorithm>

#include "kv/select/topk.h"

namespace longkv {

VoteMask vote_blocks(const float* mass, int64_t stride, int heads, int64_t rows, int64_t block, int64_t count,
                     int64_t queries, int64_t kernel) {
  VoteMask mask;
  const int64_t blocks = std::max<int64_t>(0, rows - queries) / block;
  if (blocks <= count) return mask;

  std::vector<float> sum(size_t(rows), 0.0f);
  for (int j = 0; j < heads; ++j) {
    for (int64_t r = 0; r < rows; ++r) {
      const float m = mass[j * stride + r];
      if (m > 0) sum[size_t(r)] += m;  // a NaN would spread through the prefix sums
    }
  }
  // Prefix sums in double: a running fp32 sum over a million rows would lose the small masses that decide.
  std::vector<double> prefix(size_t(rows) + 1, 0.0);
  for (int64_t r = 0; r < rows; ++r) prefix[size_t(r) + 1] = prefix[size_t(r)] + double(sum[size_t(r)]);
  const int64_t before = (kernel - 1) / 2, after = kernel / 2;
  std::vector<float> score(size_t(blocks), 0.0f);
  for (int64_t r = 0; r < blocks * block; ++r) {
    const int64_t lo = std::max<int64_t>(0, r - before), hi = std::min(rows, r + after + 1);
    const float pooled = float((prefix[size_t(hi)] - prefix[size_t(lo)]) / double(hi - lo));
    float& best = score[size_t(r / block)];
    best = std::max(best, pooled);
  }
  std::vector<uint64_t> scratch;
  std::vector<int64_t> picked;
  top_k(score.data(), blocks, count, scratch, picked);
  for (int64_t b : picked) {
    if (!mask.blocks.empty() && mask.blocks.back().end == b) {
      ++mask.blocks.back().end;
    } else {
      mask.blocks.push_back({b, b + 1});
    }
  }
  mask.voted_end = blocks;
  return mask;
}

void truncate_vote(VoteMask& mask, int64_t complete_blocks) {
  if (complete_blocks >= mask.voted_end) return;
  mask.voted_end = complete_blocks;
  while (!mask.blocks.empty() && mask.blocks.back().begin >= complete_blocks) mask.blocks.pop_back();
  if (!mask.blocks.empty()) mask.blocks.back().end = std::min(mask.blocks.back().end, complete_blocks);
}

}  // namespace longkv
