// Row sets of a decode step: ascending ranges cut to what the query may see.
#pragma once

#include <algorithm>
#include <vector>

#include "kv/layout.h"

namespace longkv {

// Collects ranges that arrive with ascending begins; `out` is replaced.
class RowSetBuilder {
 public:
  RowSetBuilder(RowRange visible, std::vector<RowRange>& out) : visible_(visible), out_(out) { out_.clear(); }
  void add(RowRange r) { append_range(out_, {std::max(r.begin, visible_.begin), std::min(r.end, visible_.end)}); }

 private:
  RowRange visible_;
  std::vector<RowRange>& out_;
};

}  // namespace longkv
