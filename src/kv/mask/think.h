// ThinK (arXiv 2407.21018): the K channels of a head that matter least for the prompt's last queries are dropped.
//
// score_c = mean over the last queries and the group's heads of q_c^2 * mean over rows of k_c^2, both after RoPE; the
// lowest `ratio` of the channels go, in whole steps of 32 (16 where dim allows no better), so that every encoding fits.
#pragma once

#include <cstdint>
#include <vector>

#include "kv/region_store.h"
#include "kv/types.h"

namespace longkv {

// Channels kept of `dim` at a ratio dropped: the nearest multiple of `step`, at least one step.
int64_t think_kept(int64_t dim, double ratio, int64_t step);

// Whole groups where the type has groups.
inline int64_t think_step(KvType type, int64_t dim) {
  return kv_type_blocked(type) || kv_type_quantized(type) || dim >= 128 ? 32 : 16;
}

// Sums of squares of the last queries of a prompt, per layer; q: [n][query heads][dim_k].
class ThinkObserver {
 public:
  explicit ThinkObserver(const KvShape& shape) : shape_(shape), sums_(size_t(shape.layers)) {}
  void add(int layer, const float* q, int64_t n);
  // The mask of a head whose rows [begin, end) are given, and forgetting the queries of a layer.
  HeadMask mask(int layer, int kv_head, const KvHeadView& head, int64_t kept) const;
  void reset(int layer) { sums_[size_t(layer)].clear(); }

 private:
  KvShape shape_;
  std::vector<std::vector<double>> sums_;  // [layers][kv_heads][dim_k], empty before the first query
};

}  // namespace longkv
