// FastGen (arXiv 2310.01801): each head gets the cheapest policy that recovers enough of its attention over the prompt.
//
//   1 special tokens and the first ones   2 and punctuation   3 and heavy hitters   4 and a local window   5 everything
//
// recover = mean over sampled prompt queries of the attention weight that falls on the policy's rows; the first policy
// with recover >= `recovery` rules the head, query heads of a KV head being averaged. Heavy hitters are rows of most
// mean attention per query that could see them. While decoding, policies 1 and 2 keep new tokens of their classes only,
// and 3 and 4 drop the unprotected row of least mean attention once the head is full.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kv/keep/attention_step.h"
#include "kv/keep/kinds.h"
#include "kv/keep/rank.h"

namespace longkv {

namespace {

constexpr int64_t kSample = 256;
constexpr int kPolicies = 4;  // that drop something

class FastgenKeeper : public Keeper {
 public:
  FastgenKeeper(const KeepSpec& spec, const KvShape& shape)
      : spec_(spec), shape_(shape), heads_(size_t(shape.layers) * size_t(shape.kv_heads)) {}

  KeepNeeds needs() const override {
    KeepNeeds needs;
    needs.fields.pos = true;
    needs.mass_queries = KeepNeeds::kAll;
    needs.sampled_queries = kSample;
    needs.step = KeepStep::kAfterAttention;
    needs.ragged = true;
    needs.token_classes = true;
    return needs;
  }

  void note_classes(int64_t first, std::span<const TokenClass> classes) override {
    classes_.resize(size_t(first), TokenClass::kOther);
    classes_.insert(classes_.end(), classes.begin(), classes.end());
  }

  Status choose(const KeepInput& input, KeepChoice& choice) override {
    for (size_t h = 0; h < input.heads.size(); ++h) {
      const KvHeadView& head = input.heads[h];
      Head& state = head_of(input.layer, int(h));
      state.mass.resize(size_t(head.rows), 0.0f);
      for (int j = 0; j < input.group_size; ++j) {
        const float* given = input.mass + (int64_t(h) * input.group_size + j) * input.mass_stride;
        for (int64_t r = 0; r < head.rows; ++r) state.mass[size_t(r)] += given[r];
      }
      const std::vector<int> level = levels(head, state, input.tokens);
      state.policy = choose_policy(input, int(h), level);
      const auto local = int64_t(spec_.local * double(input.tokens));
      const std::vector<char> newest = newest_rows(head, state.policy == 4 ? local : 0);
      auto& kept = choice.rows[h];
      for (int64_t r = 0; r < head.rows; ++r) {
        if (level[size_t(r)] <= state.policy || newest[size_t(r)] != 0 || state.policy > kPolicies) kept.push_back(r);
      }
      // A head always holds something to attend.
      if (kept.empty() && head.rows > 0) kept.push_back(oldest_row(head, 0));
      state.budget = int64_t(kept.size());
      state.local = local;
      for (size_t i = 0; i < kept.size(); ++i) state.mass[i] = state.mass[size_t(kept[i])];
      state.mass.resize(kept.size());
    }
    return {};
  }

  void step(const KeepStepInput& input, std::span<int64_t> evict) override {
    for (int h = 0; h < shape_.kv_heads; ++h) {
      const KvHeadView head = input.cache->view(input.layer, h);
      Head& state = head_of(input.layer, h);
      state.mass.resize(size_t(head.rows), 0.0f);
      if (state.policy == 0 || state.policy > kPolicies) continue;
      const std::vector<float>& weights = weights_.of(input, h, head, shape_.group_size);
      for (size_t i = 0; i < weights.size(); ++i) state.mass[i % state.mass.size()] += weights[i];
      int64_t row = -1;
      if (state.policy <= 2) {
        if (class_level(head.pos[head.rows - 1]) > state.policy && head.rows > 1) row = head.rows - 1;
      } else if (head.rows > state.budget) {
        row = least(head, state, input.cache->tokens(input.layer).v);
      }
      if (row < 0) continue;
      evict[size_t(h)] = row;
      state.mass[size_t(row)] = state.mass.back();
      state.mass.pop_back();
    }
  }

  void truncated(const KvCache& cache) override {
    const int64_t tokens = cache.tokens(0).v;
    for (int l = 0; l < shape_.layers; ++l) {
      for (int h = 0; h < shape_.kv_heads; ++h) {
        Head& state = head_of(l, h);
        state.mass.resize(std::min(state.mass.size(), size_t(cache.rows(l, h).v)));
        if (tokens == 0) state = Head{};
      }
    }
    classes_.resize(std::min(classes_.size(), size_t(tokens)));
  }

  void visit(KvState& state, const KvCache& cache) override {
    for (int l = 0; l < shape_.layers; ++l) {
      for (int h = 0; h < shape_.kv_heads; ++h) {
        const KvState::Level in_layer(state, "l", l), in_head(state, "h", h);
        Head& head = head_of(l, h);
        int64_t numbers[3] = {head.policy, head.budget, head.local};
        state.values("policy", std::span(numbers));
        const bool good = numbers[0] >= 0 && numbers[0] <= kPolicies + 1 && numbers[1] >= 0 && numbers[2] >= 0;
        if (!state.expect(good, "the policies")) return;
        head.policy = int(numbers[0]);
        head.budget = numbers[1];
        head.local = numbers[2];
        state.list("mass", head.mass, uint64_t(cache.rows(l, h).v));
      }
    }
    state.list("classes", classes_, uint64_t(cache.tokens(0).v));
    const bool known =
        std::all_of(classes_.begin(), classes_.end(), [](TokenClass c) { return c <= TokenClass::kPunctuation; });
    state.expect(known, "the classes of tokens");
  }

  // Policies are not known before a prompt: all may turn out to be full.
  int64_t planned_rows(int, int, int64_t tokens) const override { return tokens; }

 private:
  struct Head {
    int policy = 0;  // 0: no prompt yet
    int64_t budget = 0;
    int64_t local = 0;
    std::vector<float> mass;  // [rows]
  };
  Head& head_of(int layer, int head) { return heads_[size_t(layer) * size_t(shape_.kv_heads) + size_t(head)]; }

  // The first policy that keeps a token for its kind: 1, 2, or 5.
  int class_level(int64_t pos) const {
    if (pos < spec_.sink) return 1;
    const TokenClass kind = pos < int64_t(classes_.size()) ? classes_[size_t(pos)] : TokenClass::kOther;
    return kind == TokenClass::kSpecial ? 1 : kind == TokenClass::kPunctuation ? 2 : kPolicies + 1;
  }
  static float mean_mass(const KvHeadView& head, const Head& state, int64_t r, int64_t tokens) {
    return state.mass[size_t(r)] / float(tokens - head.pos[r]);
  }

  // The first policy that keeps each row, the local window apart.
  std::vector<int> levels(const KvHeadView& head, const Head& state, int64_t tokens) const {
    std::vector<int> level(size_t(head.rows));
    std::vector<float> score(size_t(head.rows), -1.0f);
    int64_t open = 0;
    for (int64_t r = 0; r < head.rows; ++r) {
      level[size_t(r)] = class_level(head.pos[r]);
      if (level[size_t(r)] <= 2) continue;
      score[size_t(r)] = mean_mass(head, state, r, tokens);
      ++open;
    }
    const auto heavy = std::min(open, int64_t(spec_.heavy * double(tokens)));
    for (const int64_t r : best_rows(score, head.pos, heavy)) level[size_t(r)] = std::min(level[size_t(r)], 3);
    return level;
  }

  int choose_policy(const KeepInput& input, int h, const std::vector<int>& level) {
    const KvHeadView& head = input.heads[size_t(h)];
    const KeepQueries& queries = *input.queries;
    if (queries.positions.empty()) return kPolicies + 1;
    const int64_t heads = int64_t(input.heads.size()) * input.group_size, d = head.dim_k;
    const double local = spec_.local * double(input.tokens);
    std::vector<double> recover(kPolicies + 1, 0.0);
    std::vector<float> scores(size_t(input.group_size * head.rows));
    for (size_t t = 0; t < queries.positions.size(); ++t) {
      const int64_t position = queries.positions[t];
      int64_t visible = head.rows;  // rows of the prompt come last, in order
      while (visible > 0 && head.pos[visible - 1] > position) --visible;
      const RowRange range{0, visible};
      AttendUnit unit;
      unit.q = queries.q.data() + (int64_t(t) * heads + int64_t(h) * input.group_size) * d;
      unit.n_q = input.group_size;
      unit.kv = head;
      unit.ranges = {&range, 1};
      attend_scores(unit, input.params, scores.data(), *input.pool);
      for (int g = 0; g < input.group_size; ++g) {
        const float* own = scores.data() + g * visible;
        const float top = *std::max_element(own, own + visible);
        std::vector<double> by_level(kPolicies + 2, 0.0);
        double total = 0, near = 0;
        for (int64_t r = 0; r < visible; ++r) {
          const double w = std::exp(double(own[r]) - top);
          total += w;
          by_level[size_t(level[size_t(r)])] += w;
          if (level[size_t(r)] > 3 && double(position - head.pos[r]) < local) near += w;
        }
        double sum = 0;
        for (int p = 1; p <= kPolicies; ++p) {
          sum += p == 4 ? near : by_level[size_t(p)];
          recover[size_t(p)] += sum / total;
        }
      }
    }
    const double n = double(queries.positions.size()) * input.group_size;
    for (int p = 1; p <= kPolicies; ++p) {
      if (recover[size_t(p)] / n >= spec_.recovery) return p;
    }
    return kPolicies + 1;
  }

  // The unprotected row of least mean attention; -1: all are protected.
  int64_t least(const KvHeadView& head, const Head& state, int64_t tokens) const {
    const std::vector<char> newest = newest_rows(head, state.policy == 4 ? state.local : 0);
    std::vector<float> score(size_t(head.rows), std::numeric_limits<float>::infinity());
    bool any = false;
    for (int64_t r = 0; r < head.rows; ++r) {
      if (newest[size_t(r)] != 0 || class_level(head.pos[r]) <= 2) continue;
      score[size_t(r)] = mean_mass(head, state, r, tokens);
      any = true;
    }
    return any ? worst_row(score, head.pos) : -1;
  }

  KeepSpec spec_;
  KvShape shape_;
  std::vector<Head> heads_;          // [layers][kv_heads]
  std::vector<TokenClass> classes_;  // by position
  StepWeights weights_;
};

}  // namespace

std::unique_ptr<Keeper> make_fastgen(const KeepSpec& spec, const KvShape& shape) {
  return std::make_unique<FastgenKeeper>(spec, shape);
}

}  // namespace longkv
