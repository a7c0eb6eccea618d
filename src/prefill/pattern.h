// Sparse patterns of prompt attention: each looks at a chunk once per layer and then answers which rows a block of
// queries attends.
#pragma once

#include <memory>
#include <vector>

#include "base/threads.h"
#include "longkv/status.h"
#include "prefill/attention.h"
#include "prefill/row_lists.h"
#include "prefill/spec.h"

namespace longkv {

class PrefillPattern : public RowLists {
 public:
  // Chooses for the queries of `chunk` in a layer, whose rows the heads already hold. Row lists are valid until the
  // next call. The queries and views must stay as they are until then.
  virtual void estimate(const PrefillAttendArgs& chunk, int layer, ThreadPool& pool) = 0;
};

// What one query head does under MInference's patterns.
struct HeadPattern {
  PrefillKind kind = PrefillKind::kDense;  // dense, a_shape, vertical_slash or block_sparse
  int64_t first = 0;                       // a_shape: sinks; vertical_slash: columns; block_sparse: blocks
  int64_t second = 0;                      // a_shape: window; vertical_slash: diagonals
  bool operator==(const HeadPattern&) const = default;
};

// [layers][query heads]
using PatternAssignment = std::vector<std::vector<HeadPattern>>;

// The same pattern for every head, of the sizes in `spec`.
PatternAssignment uniform_assignment(const PrefillSpec& spec, int layers, int heads);

std::unique_ptr<PrefillPattern> make_assigned_pattern(PatternAssignment assignment);
std::unique_ptr<PrefillPattern> make_flex_pattern(const PrefillSpec& spec);
std::unique_ptr<PrefillPattern> make_xattention_pattern(const PrefillSpec& spec);

}  // namespace longkv
