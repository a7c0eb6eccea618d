// SnapKV's scores, which PyramidKV and Ada-KV share.
#pragma once

#include "kv/keep/score_keeper.h"

namespace longkv {

// SnapKV (arXiv 2404.14469): attention mass that a row received from the last `window` queries of the prompt, reduced
// over the query heads of its KV head, pooled over neighbouring rows outside of the window; the window itself stays.
class SnapkvKeeper : public ScoreKeeper {
 public:
  using ScoreKeeper::ScoreKeeper;
  KeepNeeds needs() const override {
    KeepNeeds needs = ScoreKeeper::needs();
    needs.mass_queries = spec_.window;
    return needs;
  }
  void score(const KeepInput& input, RowScores& scores) override;
};

// PyramidKV (arXiv 2406.02069): rows per KV head of a layer, the window included. What a layer selects beside its
// window falls linearly with depth, from `hi` in the first layer to c / beta in the last, c on average. Published code
// loses the remainder of an integer step; here the layers' sum is exactly L times the budget. window_inside: kvpress's
// rule, in floating point with the window inside of what falls, and equal layers where the last would be below its
// window.
int64_t pyramid_budget(const KeepSpec& spec, int layer, int layers, int64_t tokens);

}  // namespace longkv
