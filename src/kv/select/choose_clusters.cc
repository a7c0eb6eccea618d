// Choosing clusters: the best ones are read, the next ones estimated.
#include <algorithm>
#include <cmath>

#include "kv/index/clusters.h"
#include "kv/layout.h"
#include "kv/select/aggregate.h"
#include "kv/select/selector.h"
#include "kv/select/topk.h"

namespace longkv {

// Clusters are read in the order of their score until the next one would exceed the rows that may be chosen, at least
// one; tail=clusters estimates as many as its share of all clusters says after them.
void Selector::choose_clusters(LayerState& state, ThreadPool& pool, KvStats& stats) {
  const ClusterIndex& index = *clusters(state);
  for (size_t o = 0; o < owners_.size(); ++o) {
    Owner& owner = owners_[o];
    owner.n_candidates = index.blocks(int(o));
    owner.candidates.assign(1, {0, owner.n_candidates});
  }
  score(index, group_parts_, pool, stats);
  float* scores = reinterpret_cast<float*>(scores_.data());
  pool.run(int64_t(owners_.size()), [&](int64_t o, int) {
    Owner& owner = owners_[size_t(o)];
    const int64_t n = owner.n_candidates;
    float* own = scores + int64_t(owner.first_query) * score_stride_;
    if (owner.n_q > 1) {
      aggregate_scores(select_.aggregate, own, score_stride_, owner.n_q, n, softmax_scale_, own);
    }
    owner.keys.resize(size_t(n));
    for (int64_t i = 0; i < n; ++i) owner.keys[size_t(i)] = (uint64_t(~score_key(own[i])) << 32) | uint64_t(i);
    const int64_t estimated = tail_.kind == TailKind::kClusters ? int64_t(std::ceil(tail_.share * double(n))) : 0;
    // About this many clusters fill the rows; the others need no order unless they are smaller than most.
    int64_t ranked = std::min(n, std::max<int64_t>(64, owner.rows / 4));
    std::partial_sort(owner.keys.begin(), owner.keys.begin() + ranked, owner.keys.end());
    std::vector<int64_t>& rows = owner.picked;
    rows.clear();
    int64_t taken = 0;
    for (; taken < n; ++taken) {
      if (taken == ranked) {
        ranked = n;
        std::sort(owner.keys.begin() + taken, owner.keys.end());
      }
      const auto members = index.members(int(o), int64_t(owner.keys[size_t(taken)] & 0xffffffffu));
      if (taken > 0 && int64_t(rows.size() + members.size()) > owner.rows) break;
      rows.insert(rows.end(), members.begin(), members.end());
    }
    std::sort(rows.begin(), rows.end());
    std::vector<RowRange>& chosen = state.chosen[size_t(o)];
    chosen.clear();
    for (const int64_t row : rows) append_range(chosen, {row, row + 1});

    const int64_t end = std::min(n, taken + estimated);
    if (end > ranked) std::nth_element(owner.keys.begin() + taken, owner.keys.begin() + (end - 1), owner.keys.end());
    std::vector<int64_t>& others = state.estimated[size_t(o)];
    others.clear();
    for (int64_t i = taken; i < end; ++i) others.push_back(int64_t(owner.keys[size_t(i)] & 0xffffffffu));
    std::sort(others.begin(), others.end());
  });
}

}  // namespace longkv
