// The decode step of the selector: score, aggregate, pick, and turn what was picked into rows.
#include <algorithm>
#include <cmath>

#include "base/checked.h"
#include "base/log.h"
#include "kv/select/aggregate.h"
#include "kv/select/coarse.h"
#include "kv/select/row_set.h"
#include "kv/select/selector.h"
#include "kv/select/topk.h"

namespace longkv {

namespace {

// Blocks scored by one task: large enough to hide the hand-over, small enough to balance two heads over many threads.
constexpr int64_t kTaskBlocks = 1024;

bool has_nan(const float* s, int64_t n) {
  int found = 0;
  for (int64_t i = 0; i < n; ++i) found |= int(s[i] != s[i]);
  return found != 0;
}

}  // namespace

// Whether every list of the layer may hold all visible rows.
bool Selector::attends_all(int layer, RowRange visible) const {
  const int64_t rows = count_of(visible);
  switch (select_.mode) {
    case SelectMode::kTopK:
      for (int h = 0; h < shape_.kv_heads; ++h) {
        if (budgets_.of(layer, h, rows) < rows) return false;
      }
      return true;
    case SelectMode::kTopP: return select_.p >= 1.0;
    case SelectMode::kSampled: break;
  }
  return rows <= select_.sink + select_.local;
}

// Whether a query has turned away from the one that the choice was made for.
bool Selector::drifted(const LayerState& state, const float* q) const {
  if (select_.drift <= 0.0) return false;
  for (int j = 0; j < shape_.kv_heads * shape_.group_size; ++j) {
    const float* now = q + int64_t(j) * shape_.dim_k;
    const float* then = state.query.data() + int64_t(j) * shape_.dim_k;
    double dot = 0, a = 0, b = 0;
    for (int c = 0; c < shape_.dim_k; ++c) {
      dot += double(now[c]) * then[c];
      a += double(now[c]) * now[c];
      b += double(then[c]) * then[c];
    }
    if (!(dot >= select_.drift * std::sqrt(a * b))) return true;  // NaN too
  }
  return false;
}

bool Selector::choose(int layer, const float* q, RowRange visible, int64_t step, ThreadPool& pool,
                      std::span<const SelectionUnit> units, std::span<std::vector<RowRange>> ranges, KvStats& stats) {
  const LayerPlan& plan = plans_[size_t(layer)];
  LayerState& state = states_[size_t(plan.source)];
  const int64_t rows = visible.end;
  if (attends_all(plan.source, visible)) {
    if (plan.role == LayerRole::kChoose) state.valid = false;
    return false;
  }
  const RowRange sink{visible.begin, std::clamp(select_.sink, visible.begin, rows)};
  const bool due = !state.valid || step % select_.token_step == 0 || drifted(state, q);
  if (plan.role == LayerRole::kChoose && due) {
    make_choice(layer, state, q, visible, sink, pool, stats);
    state.valid = true;
    ++stats.selections;
  }
  for (size_t u = 0; u < units.size(); ++u) {
    const size_t owner = owners_.size() == 1 ? 0 : u;
    RowSetBuilder set(visible, ranges[u]);
    set.add({0, select_.sink});
    for (const RowRange& r : state.chosen[owner]) set.add(r);
    set.add({state.tail, rows});
  }
  return true;
}

void Selector::make_choice(int layer, LayerState& state, const float* q, RowRange visible, RowRange sink,
                           ThreadPool& pool, KvStats& stats) {
  const int64_t rows = visible.end;
  for (size_t i = 0; i < query_.size(); ++i) query_[i] = q[i] * query_scale_;
  if (select_.drift > 0.0) state.query.assign(q, q + query_.size());
  int64_t open = full_blocks(rows, index_.block) * index_.block;
  for (int h = 0; h < shape_.kv_heads; ++h) open = std::min(open, state.fine->covered(h));
  state.tail = std::clamp(std::min(rows - std::max<int64_t>(select_.local, 1), open), sink.end, rows);
  const int64_t forced = count_of(sink) + rows - state.tail + select_.token_step - 1;
  for (Owner& owner : owners_) {
    const int64_t budget = select_.heads == SelectHeads::kShared
                               ? budgets_.most(layer, shape_.kv_heads, count_of(visible))
                               : budgets_.of(layer, owner.mask, count_of(visible));
    owner.rows = std::max<int64_t>(1, budget - forced);
  }
  if (select_.mode == SelectMode::kSampled) {
    for (auto& chosen : state.chosen) chosen.clear();
  } else if (index_.kind == IndexKind::kClusters) {
    choose_clusters(state, pool, stats);
  } else {
    choose_blocks(state, q, blocks_of({sink.end, state.tail}, index_.block), visible, sink, pool, stats);
  }
}

void Selector::choose_blocks(LayerState& state, const float* q, RowRange blocks, RowRange visible, RowRange sink,
                             ThreadPool& pool, KvStats& stats) {
  const bool refines = select_.refine != Refine::kNone;
  for (Owner& owner : owners_) {
    if (select_.mode == SelectMode::kTopP) {
      owner.wanted = ceil_div(select_.candidates, index_.block);
    } else {
      owner.wanted =
          refines ? ceil_div(owner.rows * select_.over, index_.block) : std::max<int64_t>(1, owner.rows / index_.block);
    }
  }
  const bool refined = refine_coarse(state, blocks, pool, stats);
  if (!refined) list_candidates(state, blocks);
  score(*state.fine, refined ? owner_parts_ : group_parts_, pool, stats);
  pick(0, pool);
  if (tail_.kind == TailKind::kMean) note_rest(state, visible, sink, stats);
  rows_of_picked(refines ? picked_rows_ : state.chosen);
  if (refines) refine_tokens(state, q, visible, sink, pool, stats);
}

// From places in the compact order of an owner's candidates back to rows, neighbours joined.
void Selector::rows_of_picked(std::vector<std::vector<RowRange>>& rows) const {
  for (size_t o = 0; o < owners_.size(); ++o) {
    rows[o].clear();
    size_t range = 0;
    int64_t passed = 0;  // candidates in the ranges before `range`
    for (const int64_t p : owners_[o].picked) {
      const auto& candidates = owners_[o].candidates;
      while (p - passed >= candidates[range].end - candidates[range].begin) {
        passed += candidates[range].end - candidates[range].begin;
        ++range;
      }
      const int64_t b = candidates[range].begin + p - passed;
      append_range(rows[o], {b * index_.block, (b + 1) * index_.block});
    }
  }
}

// Candidates of every owner: the blocks that its vote allows and all blocks since.
void Selector::list_candidates(const LayerState& state, RowRange blocks) {
  for (Owner& owner : owners_) {
    owner.candidates.clear();
    const VoteMask& vote = state.votes[size_t(owner.mask)];
    RowSetBuilder set(blocks, owner.candidates);
    for (const RowRange& r : vote.blocks) set.add(r);
    set.add({vote.voted_end, blocks.end});
    owner.n_candidates = count_rows(owner.candidates);
  }
}

// Scores coarse blocks and makes the fine blocks of the best ones the candidates. False when one level is enough: a
// flat scan within the limit, a vote that already narrows the candidates, or more coarse blocks wanted than there are.
bool Selector::refine_coarse(LayerState& state, RowRange blocks, ThreadPool& pool, KvStats& stats) {
  if (!state.coarse) return false;
  if (state.fine->bytes_scored(count_of(blocks)) <= index_limit_ || state.votes[0].active()) return false;
  const RowRange coarse = blocks_of(blocks, coarse_factor_);
  const int64_t n_coarse = count_of(coarse);
  const int64_t left = index_limit_ - state.coarse->bytes_scored(n_coarse);
  const int64_t affordable = left / std::max<int64_t>(1, state.fine->bytes_scored(1));
  int64_t most = 0;
  for (const Owner& owner : owners_) most = std::max(most, owner.wanted);
  const int64_t keep = ceil_div(std::max(kRefineBudgets * most, affordable), coarse_factor_);
  if (keep >= n_coarse) return false;

  for (Owner& owner : owners_) {
    owner.candidates.assign(1, coarse);
    owner.n_candidates = n_coarse;
  }
  score(*state.coarse, group_parts_, pool, stats);
  pick(keep, pool);
  for (Owner& owner : owners_) {
    owner.candidates.clear();
    RowSetBuilder set(blocks, owner.candidates);
    for (const int64_t p : owner.picked) {
      const int64_t c = coarse.begin + p;
      set.add({c * coarse_factor_, (c + 1) * coarse_factor_});
    }
    owner.n_candidates = count_rows(owner.candidates);
  }
  return true;
}

// Row j of the scores holds query head j's scores of its owner's candidates, in their compact order; of a part whose
// heads are scored as one, the row of its first head holds their sum. The split into tasks follows the candidates,
// never the threads.
void Selector::score(const BlockIndex& index, std::span<const Part> parts, ThreadPool& pool, KvStats& stats) {
  const bool single = tail_.kind == TailKind::kMean;  // still needs the scores of single heads
  summed_ = select_.aggregate == Aggregate::kSum && select_.heads != SelectHeads::kPerQueryHead && !single &&
            parts[0].n_q > 1 && index.adds_up();
  if (summed_) folded_.resize(parts.size() * 2 * size_t(shape_.dim_k));
  const auto folded = [&](int part) { return folded_.data() + int64_t(part) * 2 * shape_.dim_k; };
  for (int p = 0; summed_ && p < int(parts.size()); ++p) {
    const Part& part = parts[size_t(p)];
    index.fold(query_.data() + int64_t(part.first_query) * shape_.dim_k, part.n_q, folded(p));
  }
  tasks_.clear();
  for (int p = 0; p < int(parts.size()); ++p) {
    const Owner& owner = owners_[size_t(parts[size_t(p)].owner)];
    int64_t offset = 0;
    for (const RowRange& r : owner.candidates) {
      for (int64_t b = r.begin; b < r.end;) {
        const int64_t end = std::min(r.end, (b / kTaskBlocks + 1) * kTaskBlocks);
        tasks_.push_back({p, offset, b, end});
        offset += end - b;
        b = end;
      }
    }
    stats.index_bytes += index.bytes_scored(offset);
  }
  float* scores = reinterpret_cast<float*>(scores_.data());
  pool.run(int64_t(tasks_.size()), [&](int64_t t, int) {
    const ScoreTask& task = tasks_[size_t(t)];
    const Part& part = parts[size_t(task.part)];
    float* out = scores + int64_t(part.first_query) * score_stride_ + task.offset;
    if (summed_) {
      BlockIndex::Place ahead;
      if (size_t(t) + 1 < tasks_.size()) {
        const ScoreTask& next = tasks_[size_t(t) + 1];
        ahead = {parts[size_t(next.part)].kv_head, next.begin};
      }
      return index.score_folded(part.kv_head, folded(task.part), task.begin, task.end, ahead, out);
    }
    index.score(part.kv_head, query_.data() + int64_t(part.first_query) * shape_.dim_k, part.n_q, task.begin, task.end,
                out, score_stride_);
  });
}

// The best candidates of every owner: `count` of them, or as many as it wants. tail=mean still needs the scores of
// single heads afterwards.
void Selector::pick(int64_t count, ThreadPool& pool) {
  float* scores = reinterpret_cast<float*>(scores_.data());
  const bool keeps_scores = count == 0 && tail_.kind == TailKind::kMean;
  pool.run(int64_t(owners_.size()), [&](int64_t o, int) {
    Owner& owner = owners_[size_t(o)];
    float* own = scores + int64_t(owner.first_query) * score_stride_;
    float* total = own;
    const int rows = summed_ ? owner.n_q / shape_.group_size : owner.n_q;
    const int64_t stride = summed_ ? shape_.group_size * score_stride_ : score_stride_;
    if (rows == 1) {
      owner.saw_nan = owner.saw_nan || has_nan(own, owner.n_candidates);
    } else {
      if (keeps_scores) {
        owner.weights.resize(size_t(owner.n_candidates));
        total = owner.weights.data();
      }
      const Aggregate kind = keeps_scores ? Aggregate::kSum : select_.aggregate;
      const bool nan = aggregate_scores(kind, own, stride, rows, owner.n_candidates, softmax_scale_, total);
      owner.saw_nan = owner.saw_nan || nan;
    }
    const int64_t k = count > 0 ? count : owner.wanted;
    top_k(total, owner.n_candidates, k, owner.keys, owner.picked);
  });
  if (told_nan_) return;
  for (const Owner& owner : owners_) {
    if (!owner.saw_nan) continue;
    told_nan_ = true;
    (void)notice(
        "the index has scores that are not numbers, since keys or queries are not finite; such rows are chosen last");
    return;
  }
}

}  // namespace longkv
