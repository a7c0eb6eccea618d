// A slow model of block selection, written from its definition with sets of rows: what every layer and list attends.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "kv_session/harness.h"

namespace longkv::test {

// Small whole numbers: every score is exact in fp32 and f16, so lists must agree row by row, ties included.
inline Tokens whole_number_tokens(const KvShape& s, int64_t n, uint64_t seed) {
  Tokens t(s, n, seed);
  for (auto* values : {&t.q, &t.k, &t.v}) {
    for (float& x : *values) x = std::nearbyint(x * 2.0f);
  }
  return t;
}

class Simulator {
 public:
  Simulator(const KvShape& shape, const Recipe& recipe) : s_(shape), r_(recipe), layers_(size_t(shape.layers)) {}

  int64_t coarse_keep = 0;  // with recipe.index.coarse > 1: coarse blocks refined; 0: one level
  int64_t selections = 0;

  void restart() {  // a prompt was read or rows were cut
    step_ = -1;
    for (Layer& l : layers_) l.valid = false;
  }
  void next_step() { ++step_; }

  // Rows that each list of a layer attends at the token n - 1; lists: KV heads, one per layer, or query heads.
  std::vector<std::set<int64_t>> attend(int layer, const Tokens& t, int64_t n) {
    const SelectSpec& sel = r_.select;
    const int lists = sel.heads == SelectHeads::kPerKvHead ? s_.kv_heads
                      : sel.heads == SelectHeads::kShared  ? 1
                                                           : s_.kv_heads * s_.group_size;
    const int64_t block = r_.index.block;
    std::vector<std::set<int64_t>> rows(static_cast<size_t>(lists));
    const bool dense = layer < sel.dense_layers || n <= sel.budget;
    const int place = layer - sel.dense_layers;
    const bool chooses = place >= 0 && place % sel.layer_step == 0;
    Layer& source = layers_[size_t(chooses || place < 0 ? layer : layer - place % sel.layer_step)];
    if (dense) {
      if (chooses) source.valid = false;
      for (auto& set : rows) {
        for (int64_t i = 0; i < n; ++i) set.insert(i);
      }
      return rows;
    }
    if (chooses && (!source.valid || step_ % sel.token_step == 0)) {
      ++selections;
      source.valid = true;
      source.tail = std::min(n - std::max<int64_t>(sel.local, 1), n / block * block);
      source.chosen.clear();
      const int64_t forced = sel.sink + (n - source.tail) + sel.token_step - 1;
      const int64_t k = std::max<int64_t>(1, (sel.budget - forced) / block);
      for (int o = 0; o < lists; ++o) source.chosen.push_back(best_blocks(t, n, o, source.tail, k));
    }
    for (int o = 0; o < lists; ++o) {
      auto& set = rows[size_t(o)];
      for (int64_t i = 0; i < sel.sink; ++i) set.insert(i);
      for (int64_t i = source.tail; i < n; ++i) set.insert(i);
      for (const int64_t b : source.chosen[size_t(o)]) {
        for (int64_t i = b * block; i < (b + 1) * block; ++i) set.insert(i);
      }
    }
    return rows;
  }

 private:
  struct Layer {
    bool valid = false;
    int64_t tail = 0;
    std::vector<std::vector<int64_t>> chosen;
  };

  // Quest's score of rows [begin, end) for query head j.
  double box_score(const Tokens& t, int64_t n, int j, int64_t begin, int64_t end) const {
    double score = 0;
    for (int c = 0; c < s_.dim_k; ++c) {
      double hi = -INFINITY, lo = INFINITY;
      for (int64_t i = begin; i < end; ++i) {
        const double k = t.k_at(s_, i)[int64_t(j / s_.group_size) * s_.dim_k + c];
        hi = std::max(hi, k);
        lo = std::min(lo, k);
      }
      const double q = t.q_at(s_, n - 1)[int64_t(j) * s_.dim_k + c];
      score += std::max(q * hi, q * lo);
    }
    return score;
  }
  double list_score(const Tokens& t, int64_t n, int list, int64_t begin, int64_t end) const {
    const bool per_head = r_.select.heads == SelectHeads::kPerKvHead;
    const bool shared = r_.select.heads == SelectHeads::kShared;
    const int first = per_head ? list * s_.group_size : shared ? 0 : list;
    const int count = per_head ? s_.group_size : shared ? s_.kv_heads * s_.group_size : 1;
    double total = r_.select.aggregate == Aggregate::kMax ? -INFINITY : 0.0;
    for (int j = first; j < first + count; ++j) {
      const double score = box_score(t, n, j, begin, end);
      total = r_.select.aggregate == Aggregate::kMax ? std::max(total, score) : total + score;
    }
    return total;
  }
  static std::vector<int64_t> top(std::vector<std::pair<double, int64_t>> scored, int64_t k) {
    std::stable_sort(scored.begin(), scored.end(), [](auto& a, auto& b) { return a.first > b.first; });
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < std::min<int64_t>(k, int64_t(scored.size())); ++i) ids.push_back(scored[size_t(i)].second);
    return ids;
  }
  std::vector<int64_t> best_blocks(const Tokens& t, int64_t n, int list, int64_t tail, int64_t k) const {
    const int64_t block = r_.index.block;
    std::set<int64_t> candidates;  // blocks with a row outside of sinks and tail
    for (int64_t i = r_.select.sink; i < tail; ++i) candidates.insert(i / block);
    if (coarse_keep > 0) {
      const int64_t factor = r_.index.coarse;
      std::set<int64_t> coarse;
      for (const int64_t b : candidates) coarse.insert(b / factor);
      std::vector<std::pair<double, int64_t>> scored;
      for (const int64_t c : coarse) {
        scored.push_back({list_score(t, n, list, c * factor * block, std::min(n, (c + 1) * factor * block)), c});
      }
      const auto kept = top(scored, coarse_keep);
      std::erase_if(candidates,
                    [&](int64_t b) { return std::find(kept.begin(), kept.end(), b / factor) == kept.end(); });
    }
    std::vector<std::pair<double, int64_t>> scored;
    for (const int64_t b : candidates) scored.push_back({list_score(t, n, list, b * block, (b + 1) * block), b});
    return top(scored, k);
  }

  KvShape s_;
  Recipe r_;
  std::vector<Layer> layers_;
  int64_t step_ = -1;
};

inline std::set<int64_t> rows_of(const std::vector<RowRange>& ranges) {
  std::set<int64_t> rows;
  for (const RowRange& r : ranges) {
    for (int64_t i = r.begin; i < r.end; ++i) rows.insert(i);
  }
  return rows;
}

}  // namespace longkv::test
