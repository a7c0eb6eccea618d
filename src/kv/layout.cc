#include "kv/layout.h"

#include <algorithm>

namespace longkv {

int64_t count_rows(std::span<const RowRange> ranges) {
  int64_t n = 0;
  for (const RowRange& r : ranges) n += count_of(r);
  return n;
}

void append_range(std::vector<RowRange>& ranges, RowRange r) {
  if (r.begin >= r.end) return;
  if (!ranges.empty() && r.begin <= ranges.back().end) {
    ranges.back().end = std::max(ranges.back().end, r.end);
  } else {
    ranges.push_back(r);
  }
}

void ranges_of_blocks(std::span<const int64_t> blocks, int64_t block, int64_t first_row, int64_t rows,
                      std::vector<RowRange>& out) {
  out.clear();
  for (const int64_t b : blocks) {
    RowRange r = rows_of(b, block, rows);
    r.begin = std::max(r.begin, first_row);
    append_range(out, r);
  }
}

void unite_ranges(std::span<const RowRange> a, std::span<const RowRange> b, std::vector<RowRange>& out) {
  out.clear();
  size_t i = 0, j = 0;
  while (i < a.size() || j < b.size()) {
    const bool take_a = j == b.size() || (i < a.size() && a[i].begin <= b[j].begin);
    append_range(out, take_a ? a[i++] : b[j++]);
  }
}

void clip_ranges(std::span<const RowRange> ranges, RowRange bounds, std::vector<RowRange>& out) {
  out.clear();
  for (const RowRange& r : ranges) append_range(out, {std::max(r.begin, bounds.begin), std::min(r.end, bounds.end)});
}

bool ranges_valid(std::span<const RowRange> ranges, RowRange bounds) {
  int64_t end = bounds.begin;
  for (const RowRange& r : ranges) {
    if (r.begin < end || r.end <= r.begin || r.end > bounds.end) return false;
    end = r.end;
  }
  return true;
}

}  // namespace longkv
