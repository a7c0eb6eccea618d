#include "kv/keep/attention_step.h"

#include <cmath>

namespace longkv {

const std::vector<float>& StepWeights::of(const KeepStepInput& input, int kv_head, const KvHeadView& head,
                                          int group_size) {
  weights_.resize(size_t(group_size * head.rows));
  const RowRange all{0, head.rows};
  AttendUnit unit;
  unit.q = input.q + int64_t(kv_head) * group_size * head.dim_k;
  unit.n_q = group_size;
  unit.kv = head;
  unit.ranges = {&all, 1};
  attend_scores(unit, input.params, weights_.data(), *input.pool);
  for (int j = 0; j < group_size; ++j) {
    const float lse = input.lse[size_t(kv_head) * size_t(group_size) + size_t(j)];
    float* row = weights_.data() + j * head.rows;
    for (int64_t r = 0; r < head.rows; ++r) row[r] = std::exp(row[r] - lse);
  }
  return weights_;
}

}  // namespace longkv
