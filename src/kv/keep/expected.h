// Expected Attention (arXiv 2510.00636): the softmax weight that a row can expect under a Gaussian model of queries to
// come, made of the prompt's own.
#pragma once

#include "kv/keep/score_keeper.h"

namespace longkv {

// Per query head, mu and Sigma of the un-rotated queries behind the sinks, turned by the mean rotation of the next
// `future` positions:
//   log e_j = s mu.k_j + s^2 k_j' Sigma k_j / 2,   p = softmax over rows that are no sinks, mean over the group,
//   score_j = (p_j + epsilon) * ||v_j||.
class ExpectedKeeper : public ScoreKeeper {
 public:
  using ScoreKeeper::ScoreKeeper;
  KeepNeeds needs() const override {
    KeepNeeds needs = ScoreKeeper::needs();
    needs.statistics_from = spec_.sink;
    needs.rotate = true;
    return needs;
  }
  void score(const KeepInput& input, RowScores& scores) override;

 private:
  std::vector<double> mean_rotation(const KeepInput& input) const;
};

}  // namespace longkv
