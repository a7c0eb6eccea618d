// Which rows the queries of a prompt chunk attend under a sparse pattern, as lists that blocks of queries share.
//
// A list is ascending and disjoint, so every (query, row) pair that a pattern asks for is covered exactly once, however
// often columns, diagonals and blocks overlap. Causality is not a list's business: the attention kernel compares
// positions. Everything is counted in rows of one KV head, which are positions until rows are evicted.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv/layout.h"
#include "kv/types.h"

namespace longkv {

class RowLists {
 public:
  virtual ~RowLists() = default;
  // Queries that share a list; their blocks begin at multiples of it.
  virtual int64_t block_rows() const = 0;
  // Query heads that share a list: 1, or all of a KV head.
  virtual int heads_per_list() const = 0;
  // Rows for `queries` (part of one block) of the query heads from `head` on; every query finds at least itself.
  // Called by several threads at a time. `out` is replaced.
  virtual void rows(int head, RowRange queries, std::vector<RowRange>& out) const = 0;
};

// The first `sink` rows and those at most `window` - 1 before any of the queries (A-shape).
void a_shape_rows(int64_t sink, int64_t window, RowRange queries, std::vector<RowRange>& out);

// Columns that every query attends, and diagonals at given distances before each query; both as ascending disjoint
// ranges, columns of rows and diagonals of distances (vertical-slash).
void vertical_slash_rows(std::span<const RowRange> columns, std::span<const RowRange> distances, RowRange queries,
                         std::vector<RowRange>& out);

// Whole blocks by ascending number, and the queries' own rows.
void block_list_rows(std::span<const int64_t> blocks, int64_t block, RowRange queries, std::vector<RowRange>& out);

// (query, row) pairs of a list that are causal.
int64_t causal_pairs(std::span<const RowRange> rows, RowRange queries);
// ... of all rows from `first_row` on.
inline int64_t causal_pairs(int64_t first_row, RowRange queries) {
  const RowRange all{first_row, queries.end};
  return causal_pairs(std::span(&all, 1), queries);
}

}  // namespace longkv
