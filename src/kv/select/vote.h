// Preselection: the last queries of the prompt vote for the blocks that decoding may choose from (SnapKV's vote).
//
// It is a candidate mask, not an eviction: every row stays in the cache, blocks created later are always candidates,
// and the next prompt votes anew over all blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "kv/types.h"

namespace longkv {

struct VoteMask {
  std::vector<RowRange> blocks;  // voted blocks as block ranges, ascending
  int64_t voted_end = 0;         // blocks from here on are always candidates; 0: no vote, all are
  bool active() const { return voted_end > 0; }
};

// mass: [heads] rows of `rows` values, row j at mass + j * stride: attention mass per cache row. Adds the heads, takes
// the mean of `kernel` neighbouring rows (fewer at the ends), scores a block by its largest row and keeps the `count`
// best blocks; ties go to the lower block. Blocks that reach into the observation window (the last `queries` rows)
// are not voted on. With at most `count` blocks to vote on the mask is inactive.
VoteMask vote_blocks(const float* mass, int64_t stride, int heads, int64_t rows, int64_t block, int64_t count,
                     int64_t queries, int64_t kernel);

// After the cache was cut to `rows`: blocks that are no longer complete may hold other rows later.
void truncate_vote(VoteMask& mask, int64_t complete_blocks);

}  // namespace longkv
