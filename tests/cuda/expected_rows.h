// Which rows a step that chooses blocks attends, by the rule in plain words.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "cuda/select.h"

namespace longkv::test {

// The rule of kv/select/selector.h in plain words: rows of a step, ascending.
inline std::vector<int64_t> expected_rows(const std::vector<double>& score, int64_t rows, int block,
                                          const card::ChoiceRules& rules) {
  std::vector<int64_t> out;
  if (rows <= rules.budget) {
    out.resize(size_t(rows));
    std::iota(out.begin(), out.end(), 0);
    return out;
  }
  const int64_t sink = std::min(rules.sink, rows);
  const int64_t tail = std::max(sink, std::min(rows - std::max<int64_t>(rules.local, 1), rows / block * block));
  const int64_t begin = sink / block, end = tail > sink ? (tail + block - 1) / block : begin;
  std::vector<int64_t> order;
  for (int64_t b = begin; b < end; ++b) order.push_back(b);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return score[size_t(a)] > score[size_t(b)]; });
  const int64_t wanted = std::max<int64_t>(1, std::max<int64_t>(1, rules.budget - sink - (rows - tail)) / block);
  if (int64_t(order.size()) > wanted) order.resize(size_t(wanted));
  std::vector<bool> take(size_t(rows), false);
  for (int64_t r = 0; r < sink; ++r) take[size_t(r)] = true;
  for (int64_t r = tail; r < rows; ++r) take[size_t(r)] = true;
  for (int64_t b : order)
    for (int64_t r = b * block; r < std::min((b + 1) * block, rows); ++r) take[size_t(r)] = true;
  for (int64_t r = 0; r < rows; ++r)
    if (take[size_t(r)]) out.push_back(r);
  return out;
}

// Rows of a list's tiles; those of more than 16 rows, or out of order, as none.
inline std::vector<int64_t> rows_of(const int32_t* tiles, int64_t count) {
  std::vector<int64_t> rows;
  for (int64_t t = 0; t < count; ++t) {
    if (tiles[2 * t + 1] > 16) return {};
    for (int64_t r = 0; r < tiles[2 * t + 1]; ++r) rows.push_back(tiles[2 * t] + r);
  }
  return std::is_sorted(rows.begin(), rows.end()) ? rows : std::vector<int64_t>();
}

}  // namespace longkv::test
