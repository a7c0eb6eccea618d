// TOVA (arXiv 2401.06104): a state of fixed size; what the newest token attends least leaves, the same token in all
// heads of a layer. Deviation: the first tokens and the newest one are never dropped (sink=0 gives the published rule
// save for the newest token, which kvpress protects too).
#include <algorithm>

#include "kv/keep/attention_step.h"
#include "kv/keep/kinds.h"
#include "kv/keep/rank.h"

namespace longkv {

namespace {

class TovaKeeper : public Keeper {
 public:
  TovaKeeper(const KeepSpec& spec, const KvShape& shape)
      : spec_(spec), shape_(shape), budget_(size_t(shape.layers), spec.budget) {}

  KeepNeeds needs() const override {
    KeepNeeds needs;
    needs.fields.pos = true;
    needs.mass_queries = 1;
    needs.step = KeepStep::kAfterAttention;
    return needs;
  }

  Status choose(const KeepInput& input, KeepChoice& choice) override {
    int64_t& budget = budget_[size_t(input.layer)];
    budget = std::max<int64_t>(1, keep_budget(spec_, input.tokens));
    // Heads share one set, so they hold the same rows.
    const KvHeadView& head = input.heads[0];
    std::vector<float> scores(size_t(head.rows));
    reduce_all(input.mass, input.mass_stride, int(input.heads.size()) * input.group_size, scores);
    protect(head, scores);
    const std::vector<int64_t> rows = best_rows(scores, head.pos, budget);
    for (auto& kept : choice.rows) kept = rows;
    return {};
  }

  void step(const KeepStepInput& input, std::span<int64_t> evict) override {
    const int64_t budget = budget_[size_t(input.layer)];
    const KvHeadView first = input.cache->view(input.layer, 0);
    if (budget == 0 || first.rows <= budget) return;
    std::vector<float> scores(size_t(first.rows), 0.0f);
    for (int h = 0; h < shape_.kv_heads; ++h) {
      const std::vector<float>& weights = weights_.of(input, h, input.cache->view(input.layer, h), shape_.group_size);
      for (size_t i = 0; i < weights.size(); ++i) scores[i % scores.size()] += weights[i];
    }
    protect(first, scores);
    const int64_t row = worst_row(scores, first.pos);
    std::fill(evict.begin(), evict.end(), row);
  }

  void truncated(const KvCache& cache) override {
    if (cache.tokens(0).v == 0) std::fill(budget_.begin(), budget_.end(), spec_.budget);
  }
  void visit(KvState& state, const KvCache& /*cache*/) override { visit_budgets(state, budget_); }
  int64_t planned_rows(int, int, int64_t tokens) const override {
    return std::min(tokens, std::max<int64_t>(1, keep_budget(spec_, tokens)));
  }

 private:
  static void reduce_all(const float* mass, int64_t stride, int heads, std::vector<float>& scores) {
    for (int j = 0; j < heads; ++j) {
      for (size_t r = 0; r < scores.size(); ++r) scores[r] += mass[j * stride + int64_t(r)];
    }
    for (float& s : scores) s /= float(heads);
  }
  void protect(const KvHeadView& head, std::vector<float>& scores) const {
    const std::vector<char> newest = newest_rows(head, 1);
    for (size_t r = 0; r < scores.size(); ++r) {
      if (newest[r] != 0 || head.pos[r] < spec_.sink) scores[r] = std::numeric_limits<float>::infinity();
    }
  }

  KeepSpec spec_;
  KvShape shape_;
  std::vector<int64_t> budget_;  // [layers]; 0: not yet known
  StepWeights weights_;
};

}  // namespace

std::unique_ptr<Keeper> make_tova(const KeepSpec& spec, const KvShape& shape) {
  return std::make_unique<TovaKeeper>(spec, shape);
}

}  // namespace longkv
