// H2O (arXiv 2306.14048): the rows with most accumulated attention mass and the newest ones. While decoding, the row of
// least mass outside of the newest leaves after each token.
//
// Mass is summed over the query heads of a KV head (the mean ranks alike). Published scores are plain sums, which
// favour early tokens, for more queries see them; normalise=visible divides by that number, as kvpress's observed
// attention does.
#include <algorithm>

#include "kv/keep/attention_step.h"
#include "kv/keep/kinds.h"
#include "kv/keep/rank.h"

namespace longkv {

namespace {

class H2oKeeper : public Keeper {
 public:
  H2oKeeper(const KeepSpec& spec, const KvShape& shape)
      : spec_(spec),
        shape_(shape),
        budget_(size_t(shape.layers), spec.budget),
        mass_(size_t(shape.layers) * size_t(shape.kv_heads)) {}

  KeepNeeds needs() const override {
    KeepNeeds needs;
    needs.fields.pos = true;
    needs.mass_queries = KeepNeeds::kAll;
    needs.step = KeepStep::kAfterAttention;
    return needs;
  }

  Status choose(const KeepInput& input, KeepChoice& choice) override {
    int64_t& budget = budget_[size_t(input.layer)];
    budget = std::max<int64_t>(1, keep_budget(spec_, input.tokens));
    for (size_t h = 0; h < input.heads.size(); ++h) {
      const KvHeadView& head = input.heads[h];
      std::vector<float>& own = mass(input.layer, int(h));
      own.resize(size_t(head.rows), 0.0f);
      for (int j = 0; j < input.group_size; ++j) {
        const float* given = input.mass + (int64_t(h) * input.group_size + j) * input.mass_stride;
        for (int64_t r = 0; r < head.rows; ++r) own[size_t(r)] += given[r];
      }
      choice.rows[h] = best_rows(scores(head, own, input.tokens, budget), head.pos, budget);
      for (size_t i = 0; i < choice.rows[h].size(); ++i) own[i] = own[size_t(choice.rows[h][i])];
      own.resize(choice.rows[h].size());
    }
    return {};
  }

  void step(const KeepStepInput& input, std::span<int64_t> evict) override {
    const int64_t budget = budget_[size_t(input.layer)];
    for (int h = 0; h < shape_.kv_heads; ++h) {
      const KvHeadView head = input.cache->view(input.layer, h);
      std::vector<float>& own = mass(input.layer, h);
      own.resize(size_t(head.rows), 0.0f);
      const std::vector<float>& weights = weights_.of(input, h, head, shape_.group_size);
      for (size_t i = 0; i < weights.size(); ++i) own[i % own.size()] += weights[i];
      if (budget == 0 || head.rows <= budget) continue;
      const int64_t row = worst_row(scores(head, own, input.cache->tokens(input.layer).v, budget), head.pos);
      evict[size_t(h)] = row;
      own[size_t(row)] = own.back();
      own.pop_back();
    }
  }

  // Tokens at the end are gone: so is what was accumulated for their rows. The mass that they gave to others stays.
  void truncated(const KvCache& cache) override {
    for (int layer = 0; layer < shape_.layers; ++layer) {
      for (int h = 0; h < shape_.kv_heads; ++h) {
        std::vector<float>& own = mass(layer, h);
        own.resize(std::min(own.size(), size_t(cache.rows(layer, h).v)));
      }
    }
    if (cache.tokens(0).v == 0) std::fill(budget_.begin(), budget_.end(), spec_.budget);
  }
  void visit(KvState& state, const KvCache& cache) override {
    visit_budgets(state, budget_);
    for (int layer = 0; layer < shape_.layers; ++layer) {
      for (int h = 0; h < shape_.kv_heads; ++h) {
        const KvState::Level in_layer(state, "l", layer), in_head(state, "h", h);
        state.list("mass", mass(layer, h), uint64_t(cache.rows(layer, h).v));
      }
    }
  }
  int64_t planned_rows(int, int, int64_t tokens) const override {
    return std::min(tokens, std::max<int64_t>(1, keep_budget(spec_, tokens)));
  }

 private:
  std::vector<float>& mass(int layer, int kv_head) {
    return mass_[size_t(layer) * size_t(shape_.kv_heads) + size_t(kv_head)];
  }
  std::vector<float> scores(const KvHeadView& head, const std::vector<float>& own, int64_t tokens,
                            int64_t budget) const {
    std::vector<float> out(own);
    const std::vector<char> newest = newest_rows(head, int64_t(spec_.recent * double(budget)));
    for (size_t r = 0; r < out.size(); ++r) {
      if (spec_.normalise == KeepNormalise::kVisible) out[r] /= float(tokens - head.pos[r]);
      if (newest[r] != 0 || head.pos[r] < spec_.sink) out[r] = std::numeric_limits<float>::infinity();
    }
    return out;
  }

  KeepSpec spec_;
  KvShape shape_;
  std::vector<int64_t> budget_;           // [layers]; 0: not yet known
  std::vector<std::vector<float>> mass_;  // [layers][kv_heads][rows]
  StepWeights weights_;
};

}  // namespace

std::unique_ptr<Keeper> make_h2o(const KeepSpec& spec, const KvShape& shape) {
  return std::make_unique<H2oKeeper>(spec, shape);
}

}  // namespace longkv
