// Methods that score rows once, at the end of a prompt, and keep the best of each KV head beside the forced ones.
#pragma once

#include <algorithm>
#include <vector>

#include "kv/keep/keep.h"

namespace longkv {

// Scores of rows per KV head of a layer; larger = worth more.
using RowScores = std::vector<std::vector<float>>;

class ScoreKeeper : public Keeper {
 public:
  ScoreKeeper(const KeepSpec& spec, const KvShape& shape) : spec_(spec), shape_(shape) {}

  KeepNeeds needs() const override {
    KeepNeeds needs;
    needs.fields.pos = true;
    return needs;
  }
  Status choose(const KeepInput& input, KeepChoice& choice) override;
  int64_t planned_rows(int layer, int layers, int64_t tokens) const override {
    return std::min(tokens, layer_budget(layer, layers, tokens));
  }

  // scores[kv head][row] are set for every row that is not forced.
  virtual void score(const KeepInput& input, RowScores& scores) = 0;

 protected:
  // Rows per KV head of this layer, forced ones included.
  virtual int64_t layer_budget(int /*layer*/, int /*layers*/, int64_t tokens) const {
    return keep_budget(spec_, tokens);
  }

  KeepSpec spec_;
  KvShape shape_;
};

// Rows that a spec forces: the first `sink` tokens and the newest `window` rows.
std::vector<char> forced_rows(const KeepSpec& spec, const KvHeadView& head);

// Query heads of a KV head made one: values[query head][stride] -> out[n].
void reduce_group(KeepReduce reduce, const float* values, int64_t stride, int group, int64_t n, float* out);

// Pools scores[0, n) over `kernel` neighbours in place; beyond the ends the mean sees zeros and the maximum nothing.
void pool_scores(KeepPool pool, int64_t kernel, int64_t n, float* scores);

}  // namespace longkv
