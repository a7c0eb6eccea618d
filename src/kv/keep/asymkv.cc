// AsymKV (arXiv 2506.05410): neighbouring keys are merged channel by channel, by the squared gradients that the next
// chunk's loss has for them (a diagonal Fisher approximation of what the merge costs); values are summed, exactly, with
// the count as bias. Links, clip, scope, rope, positions and reread are options that restore what the release does
// (kv/keep/merge.h, docs/methods.md).
#include <algorithm>

#include "kv/keep/kinds.h"
#include "kv/keep/merge_keeper.h"

namespace longkv {

namespace {

class AsymKeeper : public MergeKeeper {
 public:
  using MergeKeeper::MergeKeeper;

  KeepNeeds needs() const override {
    KeepNeeds needs = MergeKeeper::needs();
    needs.scoring = spec_.reread ? KeepScoring::kBoth : KeepScoring::kGradient;
    needs.scored_above = spec_.budget;
    return needs;
  }

 protected:
  void weigh(const KeepInput& input, int h, MergeRows& rows) override {
    rows.weight = rows.mass;
    // A chunk of one token, or one whose loss is not finite, has no gradient: keys are then averaged.
    if (input.score == nullptr || input.score->gradient.empty()) return running_.clear(input.layer, h);
    const KvHeadView& head = input.heads[size_t(h)];
    const int64_t dim = head.dim_k;
    const float* from = input.score->gradient.data() + int64_t(h) * input.score->rows * dim;
    rows.gradient.assign(from, from + head.rows * dim);
    if (spec_.before_rope) {
      for (int64_t r = 0; r < head.rows; ++r) {
        (*input.rotate)(input.layer, -double(head.pos[r]), rows.gradient.data() + r * dim, 1, dim);
      }
    }
    if (spec_.running) running_.blend(input.layer, h, rows.gradient, dim);
  }

  void remember(const KeepInput& input, int h, std::span<const int64_t> kept, const MergeRows& rows) override {
    if (spec_.running && !rows.gradient.empty()) {
      running_.keep(input.layer, h, kept, rows.gradient.data(), rows.dim_k());
    }
  }
};

}  // namespace

std::unique_ptr<Keeper> make_asymkv(const KeepSpec& spec, const KvShape& shape) {
  return std::make_unique<AsymKeeper>(spec, shape);
}

}  // namespace longkv
