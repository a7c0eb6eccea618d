// A layer's selection as saved and restored.
#include <algorithm>

#include "kv/index/clusters.h"
#include "kv/layout.h"
#include "kv/select/coarse.h"
#include "kv/select/selector.h"

namespace longkv {

namespace {

// Lists of lists, flat: their sizes, then their values.
template <class T>
void visit_lists(KvState& state, std::string_view name, std::vector<std::vector<T>>& lists, uint64_t most) {
  std::vector<int64_t> sizes;
  std::vector<T> all;
  for (const auto& list : lists) {
    sizes.push_back(int64_t(list.size()));
    all.insert(all.end(), list.begin(), list.end());
  }
  const KvState::Level level(state, name);
  state.values("sizes", std::span(sizes));
  state.list("values", all, most * lists.size());
  if (!state.loading() || !state.ok()) return;
  size_t at = 0;
  for (size_t i = 0; i < lists.size(); ++i) {
    if (!state.expect(sizes[i] >= 0 && uint64_t(sizes[i]) <= all.size() - at, "the lengths of lists")) return;
    lists[i].assign(all.begin() + ptrdiff_t(at), all.begin() + ptrdiff_t(at) + ptrdiff_t(sizes[i]));
    at += size_t(sizes[i]);
  }
  state.expect(at == all.size(), "the lengths of lists");
}

bool valid_vote(const VoteMask& vote, int64_t full) {
  if (vote.voted_end < 0 || vote.voted_end > full) return false;
  return vote.blocks.empty() || ranges_valid(vote.blocks, {0, vote.voted_end});
}

}  // namespace

void Selector::visit_levels(KvState& state) {
  int64_t factor = coarse_factor_;
  state.value("coarse", factor);
  const bool any = std::any_of(states_.begin(), states_.end(), [](const LayerState& s) { return s.fine != nullptr; });
  constexpr int64_t kMost = 1 << 16;
  if (!state.expect(factor == coarse_factor_ || (any && index_.coarse == 0 && factor >= 1 && factor <= kMost),
                    "the levels of the index")) {
    return;
  }
  if (factor == coarse_factor_) return;
  coarse_factor_ = factor;
  for (LayerState& layer : states_) {
    layer.coarse.reset();
    if (layer.fine == nullptr || factor == 1) continue;
    auto coarse = make_index(coarse_spec(index_, factor), shape_, capacity_);
    if (!coarse.ok()) return state.refuse(coarse.status().code(), coarse.status().message());
    layer.coarse = std::move(coarse).value();
  }
}

void Selector::visit(KvState& state, int layer, std::span<const KvHeadView> views) {
  LayerState& own = states_[size_t(layer)];
  own.views.assign(views.begin(), views.end());
  const auto visit_index = [&](const char* name, BlockIndex* index) {
    const KvState::Level level(state, name);
    if (index != nullptr && state.ok()) index->visit(state, views);
  };
  visit_index("fine", own.fine.get());
  visit_index("coarse", own.coarse.get());
  visit_index("four", own.four.get());
  if (own.means) {
    const KvState::Level level(state, "means");
    own.means->visit(state, views);
  }
  for (size_t m = 0; m < own.votes.size() && state.ok(); ++m) {
    const KvState::Level level(state, "vote", int64_t(m));
    const int64_t full = full_blocks(views[0].rows, index_.block);
    state.value("end", own.votes[m].voted_end);
    state.list("blocks", own.votes[m].blocks, uint64_t(full));
    if (!state.expect(valid_vote(own.votes[m], full), "the votes")) return;
  }
  visit_choice(state, own);
}

void Selector::visit_choice(KvState& state, LayerState& layer) {
  if (!layer.fine || !state.ok()) return;
  const KvState::Level level(state, "choice");
  const int64_t rows = layer.views[0].rows;
  int64_t numbers[2] = {layer.valid ? 1 : 0, layer.tail};
  state.values("numbers", std::span(numbers));
  if (!state.expect(numbers[0] == 0 || (numbers[0] == 1 && numbers[1] >= 0 && numbers[1] <= rows),
                    "the numbers of the last choice")) {
    return;
  }
  layer.valid = numbers[0] == 1;
  layer.tail = numbers[1];
  if (!layer.valid) return;
  const auto query_heads = uint64_t(shape_.kv_heads) * uint64_t(shape_.group_size);
  state.list("query", layer.query, query_heads * uint64_t(shape_.dim_k));
  state.list("log_rest", layer.log_rest, query_heads);
  visit_lists(state, "rows", layer.chosen, uint64_t(rows));
  visit_lists(state, "clusters", layer.estimated, uint64_t(rows + 1));
  if (!state.loading() || !state.ok()) return;
  const ClusterIndex* index = clusters(layer);
  int64_t least = rows, most_clusters = 0;
  for (size_t h = 0; h < layer.views.size(); ++h) {
    least = std::min(least, layer.views[h].rows);
    if (index != nullptr) {
      most_clusters = h == 0 ? index->blocks(int(h)) : std::min(most_clusters, index->blocks(int(h)));
    }
  }
  bool good = (layer.query.empty() || layer.query.size() == query_heads * size_t(shape_.dim_k)) &&
              (layer.log_rest.empty() || layer.log_rest.size() == query_heads);
  for (const auto& ranges : layer.chosen) good &= ranges.empty() || ranges_valid(ranges, {0, least});
  for (const auto& list : layer.estimated) {
    good &= std::all_of(list.begin(), list.end(), [&](int64_t c) { return c >= 0 && c < most_clusters; });
  }
  state.expect(good, "the last choice");
}

}  // namespace longkv
