#include "kv/keep/score_keeper.h"

#include <limits>

#include "kv/keep/rank.h"

namespace longkv {

std::vector<char> forced_rows(const KeepSpec& spec, const KvHeadView& head) {
  std::vector<char> forced = newest_rows(head, spec.window);
  for (int64_t r = 0; r < head.rows; ++r) forced[size_t(r)] |= char(head.pos[r] < spec.sink);
  return forced;
}

Status ScoreKeeper::choose(const KeepInput& input, KeepChoice& choice) {
  const int64_t budget = layer_budget(input.layer, input.layers, input.tokens);
  const bool fits =
      std::all_of(input.heads.begin(), input.heads.end(), [&](const KvHeadView& h) { return h.rows <= budget; });
  RowScores scores(input.heads.size());
  for (size_t h = 0; h < scores.size(); ++h) scores[h].resize(size_t(input.heads[h].rows));
  if (!fits) score(input, scores);
  input.pool->run(int64_t(input.heads.size()), [&](int64_t task, int) {
    const KvHeadView& head = input.heads[size_t(task)];
    std::vector<float>& own = scores[size_t(task)];
    const std::vector<char> forced = forced_rows(spec_, head);
    for (size_t r = 0; r < own.size(); ++r) {
      if (forced[r] != 0) own[r] = std::numeric_limits<float>::infinity();
    }
    choice.rows[size_t(task)] = best_rows(own, head.pos, budget);
  });
  return {};
}

void reduce_group(KeepReduce reduce, const float* values, int64_t stride, int group, int64_t n, float* out) {
  std::copy_n(values, n, out);
  for (int j = 1; j < group; ++j) {
    const float* other = values + j * stride;
    for (int64_t i = 0; i < n; ++i)
      out[i] = reduce == KeepReduce::kMax ? std::max(out[i], other[i]) : out[i] + other[i];
  }
  if (reduce != KeepReduce::kMean) return;
  for (int64_t i = 0; i < n; ++i) out[i] /= float(group);
}

void pool_scores(KeepPool pool, int64_t kernel, int64_t n, float* scores) {
  const int64_t reach = kernel / 2;
  if (reach == 0) return;
  const std::vector<float> from(scores, scores + n);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t begin = std::max<int64_t>(0, i - reach), end = std::min(n, i + reach + 1);
    float value = pool == KeepPool::kMax ? -std::numeric_limits<float>::infinity() : 0.0f;
    for (int64_t j = begin; j < end; ++j) {
      value = pool == KeepPool::kMax ? std::max(value, from[size_t(j)]) : value + from[size_t(j)];
    }
    scores[i] = pool == KeepPool::kMax ? value : value / float(kernel);
  }
}

}  // namespace longkv
