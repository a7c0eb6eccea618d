// How far the encoded rows of each layer reach (cuda/old.h), through prompts, decoded tokens and cuts. Arithmetic
// alone: what it says is done by CardOldRows.
//
// Where n rows are held the middle ends at old_end(n) in every layer, after a cut as well: so the last `window` rows
// lie in the ring as they came or, after a cut, as they read back, and summaries of blocks can be made of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cuda/old.h"

namespace longkv::card {

class OldBorder {
 public:
  OldBorder() = default;
  OldBorder(int layers, int64_t sink, int64_t window)
      : sink_(sink), window_(window), end_(sink), layers_(size_t(layers), sink) {}

  int64_t end() const { return end_; }
  // Of a layer: while a prompt is read, those that took its rows are ahead.
  int64_t end(int layer) const { return layers_[size_t(layer)]; }

  // A layer takes all of a prompt's `rows` rows: its middle grows from end(layer) to what is returned, and the rows
  // behind that go to the ring.
  int64_t take(int layer, int64_t rows) {
    int64_t& end = layers_[size_t(layer)];
    return end = std::max(end, old_end(rows, sink_, window_));
  }
  // All layers hold so many rows.
  void count(int64_t rows) { settle(std::max(end_, old_end(rows, sink_, window_))); }

  // For a cut to `rows` rows: where middles end that reach further. Rows of theirs from there on, of those that stay,
  // go back to the ring; then cut().
  int64_t end_of_cut(int64_t rows) const { return old_end(rows, sink_, window_); }
  void cut(int64_t rows) { settle(std::min(end_, end_of_cut(rows))); }

 private:
  void settle(int64_t end) {
    end_ = end;
    std::fill(layers_.begin(), layers_.end(), end);
  }

  int64_t sink_ = 0, window_ = 0, end_ = 0;
  std::vector<int64_t> layers_;
};

}  // namespace longkv::card
