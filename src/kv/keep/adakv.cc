// Ada-KV (arXiv 2407.11550): the heads of a layer share one budget, and rows go where the scores are largest.
//
// mix (the authors'): with n_h rows of head h among the layer's best H c, head h selects (1 - f) n_h + f c rows.
// min (kvpress): each head's best f * budget rows are safe, the others compete for what is left.
// The authors round each head, so that the sum drifts; here the sum is exactly H times the budget.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kv/keep/expected.h"
#include "kv/keep/kinds.h"
#include "kv/keep/rank.h"
#include "kv/keep/snapkv.h"

namespace longkv {

namespace {

struct Candidate {
  float score;
  int32_t pos;
  int head;
};

// Whole numbers near `wanted` (each at most its limit) whose sum is `total`, by largest remainder.
std::vector<int64_t> apportion(const std::vector<double>& wanted, const std::vector<int64_t>& limits, int64_t total) {
  std::vector<int64_t> counts(wanted.size());
  int64_t left = total;
  for (size_t h = 0; h < wanted.size(); ++h) {
    counts[h] = std::min(int64_t(wanted[h]), limits[h]);
    left -= counts[h];
  }
  std::vector<size_t> order(wanted.size());
  for (size_t h = 0; h < order.size(); ++h) order[h] = h;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return wanted[a] - std::floor(wanted[a]) > wanted[b] - std::floor(wanted[b]);
  });
  for (bool room = true; left > 0 && room;) {
    room = false;
    for (const size_t h : order) {
      if (left == 0 || counts[h] >= limits[h]) continue;
      ++counts[h];
      --left;
      room = true;
    }
  }
  return counts;
}

class AdaKeeper : public Keeper {
 public:
  AdaKeeper(const KeepSpec& spec, const KvShape& shape) : spec_(spec), shape_(shape) {
    if (spec.scorer == KeepScorer::kExpected) {
      scorer_ = std::make_unique<ExpectedKeeper>(spec, shape);
    } else {
      scorer_ = std::make_unique<SnapkvKeeper>(spec, shape);
    }
  }

  KeepNeeds needs() const override {
    KeepNeeds needs = scorer_->needs();
    needs.ragged = true;
    return needs;
  }

  Status choose(const KeepInput& input, KeepChoice& choice) override {
    const size_t heads = input.heads.size();
    const int64_t budget = keep_budget(spec_, input.tokens);
    int64_t rows = 0;
    for (const KvHeadView& head : input.heads) rows += head.rows;
    if (rows <= budget * int64_t(heads)) {
      for (size_t h = 0; h < heads; ++h) choice.rows[h] = all_rows(input.heads[h].rows);
      return {};
    }
    RowScores scores(heads);
    std::vector<std::vector<char>> forced(heads);
    for (size_t h = 0; h < heads; ++h) {
      scores[h].resize(size_t(input.heads[h].rows));
      forced[h] = forced_rows(spec_, input.heads[h]);
    }
    scorer_->score(input, scores);
    const std::vector<int64_t> counts = spec_.safeguard_mode == KeepSafeguard::kMix
                                            ? mix(input, scores, forced, budget)
                                            : minimum(input, scores, forced, budget);
    for (size_t h = 0; h < heads; ++h) {
      force(forced[h], scores[h]);
      choice.rows[h] = best_rows(scores[h], input.heads[h].pos, counts[h]);
    }
    return {};
  }

  int64_t planned_rows(int, int, int64_t tokens) const override { return std::min(tokens, keep_budget(spec_, tokens)); }

 private:
  static void force(const std::vector<char>& forced, std::vector<float>& scores) {
    for (size_t r = 0; r < scores.size(); ++r) {
      if (forced[r] != 0) scores[r] = std::numeric_limits<float>::infinity();
    }
  }
  static bool better(const Candidate& a, const Candidate& b) {
    if (a.score != b.score) return a.score > b.score;
    return a.pos != b.pos ? a.pos > b.pos : a.head < b.head;
  }
  // How many of the layer's k best candidates each head has.
  static std::vector<int64_t> shares(std::vector<Candidate>& all, int64_t k, size_t heads) {
    std::vector<int64_t> counts(heads, 0);
    k = std::clamp<int64_t>(k, 0, int64_t(all.size()));
    if (k < int64_t(all.size())) std::nth_element(all.begin(), all.begin() + k, all.end(), better);
    for (int64_t i = 0; i < k; ++i) ++counts[size_t(all[size_t(i)].head)];
    return counts;
  }

  // Both return rows per head, forced ones included; their sum is heads * budget.
  std::vector<int64_t> mix(const KeepInput& input, const RowScores& scores,
                           const std::vector<std::vector<char>>& forced, int64_t budget) const {
    const size_t heads = scores.size();
    std::vector<Candidate> all;
    std::vector<int64_t> fixed(heads, 0), limits(heads);
    int64_t total = budget * int64_t(heads);
    for (size_t h = 0; h < heads; ++h) {
      fixed[h] = std::count(forced[h].begin(), forced[h].end(), 1);
      limits[h] = input.heads[h].rows - fixed[h];
      total -= fixed[h];
      std::vector<float> own;
      for (size_t r = 0; r < scores[h].size(); ++r) {
        if (forced[h][r] == 0) own.push_back(scores[h][r]);
      }
      const double factor = spec_.normalise_heads ? concentration(own, budget - fixed[h]) : 1.0;
      for (size_t r = 0; r < scores[h].size(); ++r) {
        const float score = float(double(scores[h][r]) * factor);
        if (forced[h][r] == 0) all.push_back({score == score ? score : -1.0f, input.heads[h].pos[r], int(h)});
      }
    }
    const std::vector<int64_t> best = shares(all, total, heads);
    std::vector<double> wanted(heads);
    for (size_t h = 0; h < heads; ++h) {
      const double even = double(std::clamp<int64_t>(budget - fixed[h], 0, limits[h]));
      wanted[h] = (1 - spec_.safeguard) * double(best[h]) + spec_.safeguard * even;
    }
    std::vector<int64_t> counts = apportion(wanted, limits, total);
    for (size_t h = 0; h < heads; ++h) counts[h] += fixed[h];
    return counts;
  }

  // Share of a head's scores that its k best have, so that heads of small masses compete on equal terms.
  static double concentration(std::vector<float>& own, int64_t k) {
    double all = 0, top = 0;
    k = std::clamp<int64_t>(k, 0, int64_t(own.size()));
    if (k < int64_t(own.size())) std::nth_element(own.begin(), own.begin() + k, own.end(), std::greater<>());
    for (size_t i = 0; i < own.size(); ++i) {
      all += own[i];
      if (int64_t(i) < k) top += own[i];
    }
    return all > 0 ? top / all : 1.0;
  }

  std::vector<int64_t> minimum(const KeepInput& input, const RowScores& scores,
                               const std::vector<std::vector<char>>& forced, int64_t budget) const {
    const size_t heads = scores.size();
    std::vector<Candidate> all;
    for (size_t h = 0; h < heads; ++h) {
      std::vector<float> own = scores[h];
      force(forced[h], own);
      const auto safe = best_rows(own, input.heads[h].pos, int64_t(double(budget) * spec_.safeguard));
      for (const int64_t r : safe) own[size_t(r)] = std::numeric_limits<float>::infinity();
      for (size_t r = 0; r < own.size(); ++r) {
        all.push_back({own[r] == own[r] ? own[r] : -1.0f, input.heads[h].pos[r], int(h)});
      }
    }
    return shares(all, budget * int64_t(heads), heads);
  }

  KeepSpec spec_;
  KvShape shape_;
  std::unique_ptr<ScoreKeeper> scorer_;
};

}  // namespace

std::unique_ptr<Keeper> make_adakv(const KeepSpec& spec, const KvShape& shape) {
  return std::make_unique<AdaKeeper>(spec, shape);
}

}  // namespace longkv
