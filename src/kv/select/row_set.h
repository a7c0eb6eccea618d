// Arithmetic on ascending, disjoint row ranges.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "kv/types.h"

namespace longkv {

// Collects ranges that arrive with ascending begins; clips them to the visible rows and joins what overlaps or touches.
class RowSetBuilder {
 public:
  RowSetBuilder(RowRange visible, std::vector<RowRange>& out) : visible_(visible), out_(out) { out_.clear(); }

  void add(RowRange r) {
    r.begin = std::max(r.begin, visible_.begin);
    r.end = std::min(r.end, visible_.end);
    if (r.begin >= r.end) return;
    if (!out_.empty() && r.begin <= out_.back().end) {
      out_.back().end = std::max(out_.back().end, r.end);
    } else {
      out_.push_back(r);
    }
  }

 private:
  RowRange visible_;
  std::vector<RowRange>& out_;
};

inline int64_t row_count(std::span<const RowRange> ranges) {
  int64_t n = 0;
  for (const RowRange& r : ranges) n += r.end - r.begin;
  return n;
}

// a becomes the union of a and b; `scratch` keeps its memory between calls.
inline void unite_ranges(std::vector<RowRange>& a, std::span<const RowRange> b, std::vector<RowRange>& scratch) {
  scratch.clear();
  size_t i = 0, j = 0;
  while (i < a.size() || j < b.size()) {
    const bool from_a = j == b.size() || (i < a.size() && a[i].begin <= b[j].begin);
    const RowRange r = from_a ? a[i++] : b[j++];
    if (!scratch.empty() && r.begin <= scratch.back().end) {
      scratch.back().end = std::max(scratch.back().end, r.end);
    } else {
      scratch.push_back(r);
    }
  }
  a.swap(scratch);
}

}  // namespace longkv
