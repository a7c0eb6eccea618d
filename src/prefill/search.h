// Offline search for MInference's assignment: which pattern each query head gets.
//
// Kernel-aware, as in the paper: the sizes of every candidate are first set so that all compute the same number of
// (query, key) pairs with the real lists, block rounding included; then each head takes the candidate whose output is
// closest to full attention.
#pragma once

#include <cstdint>
#include <vector>

#include "base/threads.h"
#include "kv/types.h"
#include "prefill/attention.h"
#include "prefill/pattern.h"

namespace longkv {

class AssignmentSearch {
 public:
  // budget: rows that a query attends on average.
  AssignmentSearch(const KvShape& shape, int64_t budget, ThreadPool& pool);

  // Chooses for a layer from a chunk whose dense output is in chunk.out; the later in a long prompt, the better.
  void choose(int layer, const PrefillAttendArgs& chunk);

  const PatternAssignment& assignment() const { return assignment_; }
  // |candidate's output - dense output| / |dense output| of the choice: [layers][query heads].
  const std::vector<std::vector<double>>& errors() const { return errors_; }
  // Pairs computed by the choice, of those that are causal.
  const std::vector<std::vector<PrefillPairs>>& pairs() const { return pairs_; }

 private:
  // Sizes of one candidate for every query head so that none exceeds the budget; a head that must is left dense.
  std::vector<HeadPattern> fit(const HeadPattern& candidate, const PrefillAttendArgs& chunk);
  std::vector<PrefillPairs> cost(const std::vector<HeadPattern>& heads, const PrefillAttendArgs& chunk);
  std::vector<double> errors_of(const std::vector<HeadPattern>& heads, const PrefillAttendArgs& chunk);

  KvShape shape_;
  int64_t budget_;
  ThreadPool& pool_;
  PrefillAttention attention_;
  std::vector<float> out_;
  PatternAssignment assignment_;
  std::vector<std::vector<double>> errors_;
  std::vector<std::vector<PrefillPairs>> pairs_;
};

}  // namespace longkv
