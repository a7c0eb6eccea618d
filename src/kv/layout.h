// Arithmetic between positions, rows, blocks and bytes of the KV cache. It lives here and nowhere else.
//
// Block b of size B holds rows [b * B, (b + 1) * B); the last block may be open (not yet full). All counts are 64-bit.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv/types.h"

namespace longkv {

// Block that holds a row.
constexpr int64_t block_of(int64_t row, int64_t block) { return row / block; }
// Blocks that hold the first `rows` rows, the open one included.
constexpr int64_t blocks_for(int64_t rows, int64_t block) { return (rows + block - 1) / block; }
// Blocks that are full.
constexpr int64_t full_blocks(int64_t rows, int64_t block) { return rows / block; }
// Rows of block b, cut at `rows`, where the cache ends.
constexpr RowRange rows_of(int64_t b, int64_t block, int64_t rows) {
  const int64_t begin = b * block < rows ? b * block : rows;
  const int64_t end = begin + block < rows ? begin + block : rows;
  return {begin, end};
}
// Blocks that a range touches: [begin, end) in blocks.
constexpr RowRange blocks_of(RowRange r, int64_t block) {
  return r.begin >= r.end ? RowRange{r.begin / block, r.begin / block}
                          : RowRange{r.begin / block, blocks_for(r.end, block)};
}

constexpr int64_t count_of(RowRange r) { return r.end > r.begin ? r.end - r.begin : 0; }
int64_t count_rows(std::span<const RowRange> ranges);

// Byte offset of a row: the only place where a row index meets a stride.
constexpr int64_t row_offset(int64_t row, int64_t stride) { return row * stride; }

// Rows that the query at `position` may see: its own and those before it, at most `window` of them (0 = all).
constexpr RowRange visible_rows(int64_t position, int64_t window) {
  const int64_t begin = window > 0 && position + 1 > window ? position + 1 - window : 0;
  return {begin, position + 1};
}
// First row that any query at or after `next_position` can see.
constexpr int64_t first_visible_row(int64_t next_position, int64_t window) {
  return visible_rows(next_position, window).begin;
}

// Appends r to an ascending list, growing the last range when r touches or overlaps it; empty ranges are dropped.
void append_range(std::vector<RowRange>& ranges, RowRange r);
// Row ranges of ascending block ids, adjacent blocks joined, cut to [first_row, rows). `out` is replaced.
void ranges_of_blocks(std::span<const int64_t> blocks, int64_t block, int64_t first_row, int64_t rows,
                      std::vector<RowRange>& out);
// Union of two ascending disjoint lists; `out` is replaced and must be neither of them.
void unite_ranges(std::span<const RowRange> a, std::span<const RowRange> b, std::vector<RowRange>& out);
// The part of an ascending list inside `bounds`; `out` is replaced and must not be `ranges`.
void clip_ranges(std::span<const RowRange> ranges, RowRange bounds, std::vector<RowRange>& out);
// True if the ranges are non-empty, ascending, disjoint and inside `bounds`.
bool ranges_valid(std::span<const RowRange> ranges, RowRange bounds);

}  // namespace longkv
