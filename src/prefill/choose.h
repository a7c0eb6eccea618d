// Choosing by share: the fewest scores that make up a given part of their sum.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv/types.h"

namespace longkv {

// Writes to `picked` the ascending indices of the smallest set of scores, largest first and equal ones by index, whose
// sum reaches `share` (0 to 1) of the sum of all. Scores are not negative; a NaN among them picks everything.
// Expected time grows with the number of scores alone. `scratch` keeps its memory between calls.
void cover(std::span<const float> scores, double share, std::vector<uint64_t>& scratch, std::vector<int64_t>& picked);

// Ascending numbers as ranges.
void ranges_of(std::span<const int64_t> ascending, std::vector<RowRange>& out);

}  // namespace longkv
