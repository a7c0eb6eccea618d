// Ranking of rows by score: shared by the methods.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kv/state.h"
#include "kv/types.h"

namespace longkv {

// The k best of the rows with scores[row], ascending; ties go to the newer row (larger position), so that the choice is
// one well-defined set. NaN ranks last. pos: [n], or nullptr where rows are in the order of their positions.
std::vector<int64_t> best_rows(std::span<const float> scores, const int32_t* pos, int64_t k);

// The row of least score; ties go to the older row.
int64_t worst_row(std::span<const float> scores, const int32_t* pos);

// The oldest row at position `from` or later; -1: none.
int64_t oldest_row(const KvHeadView& head, int64_t from);

// The n newest rows of a head (largest positions) as a mask over its rows.
std::vector<char> newest_rows(const KvHeadView& head, int64_t n);

// Rows [0, n), ascending.
std::vector<int64_t> all_rows(int64_t n);
// The rows of a mask, ascending.
std::vector<int64_t> rows_of_mask(std::span<const char> mask);

// Saves or restores budgets of rows, one a layer.
void visit_budgets(KvState& state, std::vector<int64_t>& budgets);

}  // namespace longkv
