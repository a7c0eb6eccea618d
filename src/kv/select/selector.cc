#include "kv/select/selector.h"

#include <algorithm>
#include <cmath>

#include "base/checked.h"
#include "base/error.h"
#include "kv/index/clusters.h"
#include "kv/layout.h"
#include "kv/select/coarse.h"

namespace longkv {

Selector::Selector(const KvShape& shape, const Recipe& recipe, const AttendParams& params)
    : shape_(shape),
      select_(recipe.select),
      index_(recipe.index),
      tail_(recipe.tail),
      types_(recipe.store.types()),
      params_(params),
      budgets_(recipe.select),
      states_(size_t(shape.layers)) {
  const float root = std::sqrt(float(shape.dim_k));
  query_scale_ = params.scale * root;
  softmax_scale_ = 1.0f / root;
  row_bytes_ = kv_row_bytes(recipe.store.k, shape.dim_k) + kv_row_bytes(recipe.store.v, shape.dim_v);
  index_limit_ = index_limit(index_, shape_, select_.budget * row_bytes_);
  index_.skip_rows = select_.sink;
  index_.keep_rows = std::max<int64_t>(1, select_.local);

  const int group = shape.group_size, heads = shape.kv_heads * group;
  for (int h = 0; h < shape.kv_heads; ++h) {
    const int owner = select_.heads == SelectHeads::kShared         ? 0
                      : select_.heads == SelectHeads::kPerQueryHead ? h * group
                                                                    : h;
    group_parts_.push_back({h, h * group, group, owner});
  }
  switch (select_.heads) {
    case SelectHeads::kPerKvHead:
      for (int h = 0; h < shape.kv_heads; ++h) owners_.push_back({.first_query = h * group, .n_q = group, .mask = h});
      owner_parts_ = group_parts_;
      break;
    case SelectHeads::kShared:
      owners_.push_back({.first_query = 0, .n_q = heads, .mask = 0});
      owner_parts_ = group_parts_;
      break;
    case SelectHeads::kPerQueryHead:
      for (int j = 0; j < heads; ++j) {
        owners_.push_back({.first_query = j, .n_q = 1, .mask = j / group});
        owner_parts_.push_back({j / group, j, 1, j});
      }
      break;
  }
  query_.resize(size_t(heads) * size_t(shape.dim_k));
  picked_rows_.resize(owners_.size());
}

Selector::~Selector() = default;

const ClusterIndex* Selector::clusters(const LayerState& state) const {
  return index_.kind == IndexKind::kClusters ? static_cast<const ClusterIndex*>(state.fine.get()) : nullptr;
}

Result<std::unique_ptr<Selector>> Selector::create(const KvShape& shape, const Recipe& recipe,
                                                   std::span<const LayerPlan> plans, RowCapacity capacity,
                                                   const AttendParams& params) {
  auto selector = std::unique_ptr<Selector>(new Selector(shape, recipe, params));
  selector->plans_.assign(plans.begin(), plans.end());
  LONGKV_TRY(selector->build_indexes(plans, capacity));
  return selector;
}

Status Selector::build_indexes(std::span<const LayerPlan> plans, RowCapacity capacity) {
  const bool any = std::any_of(plans.begin(), plans.end(), [](const auto& p) { return p.role == LayerRole::kChoose; });
  if (!any) return {};
  capacity_ = capacity.v;
  coarse_factor_ = choose_coarse_factor(index_, shape_, capacity.v, index_limit_);
  for (size_t l = 0; l < plans.size(); ++l) {
    if (plans[l].role != LayerRole::kChoose) continue;
    LayerState& state = states_[l];
    IndexSpec spec = index_;
    spec.layer = int(l);
    LONGKV_ASSIGN(state.fine, make_index(spec, shape_, capacity.v));
    if (coarse_factor_ > 1) {
      LONGKV_ASSIGN(state.coarse, make_index(coarse_spec(index_, coarse_factor_), shape_, capacity.v));
    }
    if (select_.refine == Refine::kInt4) {
      LONGKV_ASSIGN(state.four, make_index(four_bit_spec(), shape_, capacity.v));
    }
    if (tail_.kind == TailKind::kMean) state.means = std::make_unique<ValueMeans>(shape_);
    state.votes.resize(select_.heads == SelectHeads::kShared ? 1 : size_t(shape_.kv_heads));
    state.chosen.resize(owners_.size());
    state.estimated.resize(owners_.size());
  }
  score_stride_ = blocks_for(capacity.v, index_.block);
  const auto bytes = checked_mul(uint64_t(shape_.kv_heads) * uint64_t(shape_.group_size), uint64_t(score_stride_) * 4);
  if (!bytes) return fail(Code::kInvalidArgument, "KV capacity of {} rows is too large to index", capacity.v);
  LONGKV_ASSIGN(scores_, VirtualArray::reserve(*bytes));
  return {};
}

void Selector::append(int layer, std::span<const KvHeadView> views, int64_t begin, int64_t end, ThreadPool& pool) {
  LayerState& state = states_[size_t(layer)];
  state.views.assign(views.begin(), views.end());
  if (!state.fine) return;
  constexpr int kParts = 4;
  pool.run(int64_t(views.size()) * kParts, [&](int64_t task, int) {
    const int h = int(task) / kParts;
    const KvHeadView& view = views[size_t(h)];
    switch (task % kParts) {
      case 0: return state.fine->append(h, view, begin, end);
      case 1: return state.coarse ? state.coarse->append(h, view, begin, end) : void();
      case 2: return state.four ? state.four->append(h, view, begin, end) : void();
      default: return state.means ? state.means->append(h, view, begin, end) : void();
    }
  });
}

void Selector::observe_queries(int layer, const float* q, int64_t n, int64_t first, int64_t prompt_end) {
  LayerState& state = states_[size_t(layer)];
  if (!state.fine || index_.kind != IndexKind::kLabels) return;
  const int64_t width = int64_t(shape_.kv_heads) * shape_.group_size * shape_.dim_k;
  const int64_t skip = std::clamp<int64_t>(prompt_end - select_.preselect_queries - first, 0, n);
  for (int h = 0; h < shape_.kv_heads; ++h) {
    state.fine->observe_queries(h, q + skip * width + int64_t(h) * shape_.group_size * shape_.dim_k, shape_.group_size,
                                n - skip, width);
  }
}

void Selector::truncate(int layer, std::span<const KvHeadView> views, int64_t rows) {
  LayerState& state = states_[size_t(layer)];
  state.valid = false;
  if (!state.fine) return;
  for (int h = 0; h < int(views.size()); ++h) {
    state.fine->truncate(h, views[size_t(h)], rows);
    if (state.coarse) state.coarse->truncate(h, views[size_t(h)], rows);
    if (state.four) state.four->truncate(h, views[size_t(h)], rows);
    if (state.means) state.means->truncate(h, views[size_t(h)], rows);
  }
  for (VoteMask& vote : state.votes) truncate_vote(vote, full_blocks(rows, index_.block));
  if (!state.mass.empty()) free_mass_.push_back(std::move(state.mass));
  state.mass.clear();
}

void Selector::rebuild(int layer, std::span<const KvHeadView> views, std::span<const std::vector<int64_t>> kept,
                       const float* given, int64_t given_stride, ThreadPool& pool) {
  LayerState& state = states_[size_t(layer)];
  if (!state.fine) return;
  if (wants_mass(layer) && given != nullptr) {
    float* own = mass(layer, given_stride);
    std::copy_n(given, state.mass.size(), own);
  }
  if (!state.mass.empty()) {
    for (size_t j = 0; j < views.size() * size_t(shape_.group_size); ++j) {
      float* row = state.mass.data() + int64_t(j) * state.mass_stride;
      const std::vector<int64_t>& rows = kept[j / size_t(shape_.group_size)];
      for (size_t i = 0; i < rows.size(); ++i) row[i] = row[rows[i]];
    }
  }
  state.valid = false;
  for (VoteMask& vote : state.votes) vote = VoteMask{};
  for (int h = 0; h < int(views.size()); ++h) {
    state.fine->truncate(h, views[size_t(h)], 0);
    if (state.coarse) state.coarse->truncate(h, views[size_t(h)], 0);
    if (state.four) state.four->truncate(h, views[size_t(h)], 0);
    if (state.means) state.means->truncate(h, views[size_t(h)], 0);
  }
  append(layer, views, 0, views[0].rows, pool);
}

bool Selector::wants_mass(int layer) const {
  return states_[size_t(layer)].fine != nullptr &&
         (index_.kind == IndexKind::kDynamic || index_.kind == IndexKind::kRepr || select_.preselect > 0);
}

float* Selector::mass(int layer, int64_t stride) {
  LayerState& state = states_[size_t(layer)];
  if (state.mass.empty() || state.mass_stride != stride) {
    if (state.mass.empty() && !free_mass_.empty()) {
      state.mass = std::move(free_mass_.back());
      free_mass_.pop_back();
    }
    state.mass.assign(size_t(stride) * size_t(shape_.kv_heads) * size_t(shape_.group_size), 0.0f);
    state.mass_stride = stride;
  }
  return state.mass.data();
}

void Selector::finish_prompt(int layer, std::span<const KvHeadView> views, ThreadPool& pool) {
  LayerState& state = states_[size_t(layer)];
  state.valid = false;
  state.views.assign(views.begin(), views.end());
  if (state.fine)
    pool.run(int64_t(views.size()), [&](int64_t h, int) { state.fine->finish_prompt(int(h), views[size_t(h)]); });
  if (state.mass.empty()) return;
  const int64_t stride = state.mass_stride, rows = std::min(stride, views[0].rows);
  const int group = shape_.group_size;
  pool.run(int64_t(views.size()), [&](int64_t h, int) {
    const float* mass = state.mass.data() + h * group * stride;
    state.fine->set_importance(int(h), views[size_t(h)], mass, stride, rows);
    if (state.coarse) state.coarse->set_importance(int(h), views[size_t(h)], mass, stride, rows);
  });
  if (select_.preselect > 0) {
    const int heads = int(views.size()) * group / int(state.votes.size());
    pool.run(int64_t(state.votes.size()), [&](int64_t m, int) {
      state.votes[size_t(m)] = vote_blocks(state.mass.data() + m * heads * stride, stride, heads, rows, index_.block,
                                           select_.preselect, select_.preselect_queries, select_.preselect_kernel);
    });
  }
  free_mass_.push_back(std::move(state.mass));
  state.mass.clear();
}

int64_t Selector::index_bytes_held() const {
  int64_t bytes = 0;
  for (const LayerState& state : states_) {
    if (state.fine) bytes += state.fine->bytes_held();
    if (state.coarse) bytes += state.coarse->bytes_held();
    if (state.four) bytes += state.four->bytes_held();
    if (state.means) bytes += state.means->bytes_held();
  }
  return bytes;
}

}  // namespace longkv
