// The decode step of the selector: score, aggregate, pick, and turn chosen blocks into rows.
#include <algorithm>

#include "base/checked.h"
#include "kv/select/aggregate.h"
#include "kv/select/coarse.h"
#include "kv/select/row_set.h"
#include "kv/select/selector.h"
#include "kv/select/topk.h"

namespace longkv {

namespace {

// Blocks scored by one task: large enough to hide the hand-over, small enough to balance two heads over many threads.
constexpr int64_t kTaskBlocks = 1024;

}  // namespace

int64_t Selector::chosen_blocks(int64_t forced_rows) const {
  return std::max<int64_t>(1, (select_.budget - forced_rows - (select_.token_step - 1)) / index_.block);
}

bool Selector::choose(int layer, const float* q, RowRange visible, int64_t step, ThreadPool& pool,
                      std::span<const SelectionUnit> units, std::span<std::vector<RowRange>> ranges, KvStats& stats) {
  const LayerPlan& plan = plans_[size_t(layer)];
  LayerState& state = states_[size_t(plan.source)];
  const int64_t rows = visible.end;
  if (rows - visible.begin <= select_.budget) {
    if (plan.role == LayerRole::kChoose) state.valid = false;
    return false;
  }
  const RowRange sink{visible.begin, std::clamp(select_.sink, visible.begin, rows)};
  if (plan.role == LayerRole::kChoose && (!state.valid || step % select_.token_step == 0)) {
    const int64_t open = full_blocks(rows, index_.block) * index_.block;
    state.tail = std::clamp(std::min(rows - std::max<int64_t>(select_.local, 1), open), sink.end, rows);
    const RowRange blocks = blocks_of({sink.end, state.tail}, index_.block);
    const int64_t k = chosen_blocks(sink.end - sink.begin + rows - state.tail);
    select_blocks(state, q, blocks, k, pool, stats);
    state.valid = true;
    ++stats.selections;
  }
  for (size_t u = 0; u < units.size(); ++u) {
    const size_t owner = owners_.size() == 1 ? 0 : u;
    RowSetBuilder set(visible, ranges[u]);
    set.add({0, select_.sink});
    for (const RowRange& b : state.chosen[owner]) set.add({b.begin * index_.block, b.end * index_.block});
    set.add({state.tail, rows});
  }
  return true;
}

void Selector::select_blocks(LayerState& state, const float* q, RowRange blocks, int64_t k, ThreadPool& pool,
                             KvStats& stats) {
  for (size_t i = 0; i < query_.size(); ++i) query_[i] = q[i] * query_scale_;
  const bool refined = refine_coarse(state, blocks, k, pool, stats);
  if (!refined) list_candidates(state, blocks);
  score(*state.fine, refined ? owner_parts_ : group_parts_, pool, stats);
  pick(k, pool);
  for (size_t o = 0; o < owners_.size(); ++o) {
    // From places in the compact order back to block numbers, neighbours joined.
    std::vector<RowRange>& chosen = state.chosen[o];
    chosen.clear();
    size_t range = 0;
    int64_t passed = 0;  // candidates in the ranges before `range`
    for (const int64_t p : owners_[o].picked) {
      const auto& candidates = owners_[o].candidates;
      while (p - passed >= candidates[range].end - candidates[range].begin) {
        passed += candidates[range].end - candidates[range].begin;
        ++range;
      }
      const int64_t b = candidates[range].begin + p - passed;
      if (!chosen.empty() && chosen.back().end == b) {
        ++chosen.back().end;
      } else {
        chosen.push_back({b, b + 1});
      }
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
bool Selector::refine_coarse(LayerState& state, RowRange blocks, int64_t k, ThreadPool& pool, KvStats& stats) {
  if (!state.coarse) return false;
  if (state.fine->bytes_scored(count_of(blocks)) <= attention_bytes_ || state.votes[0].active()) return false;
  const RowRange coarse = blocks_of(blocks, coarse_factor_);
  const int64_t n_coarse = count_of(coarse);
  const int64_t left = attention_bytes_ - state.coarse->bytes_scored(n_coarse);
  const int64_t affordable = left / std::max<int64_t>(1, state.fine->bytes_scored(1));
  const int64_t keep = ceil_div(std::max(kRefineBudgets * k, affordable), coarse_factor_);
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

// Row j of the scores holds query head j's scores of its owner's candidates, in their compact order. The split into
// tasks follows the candidates, never the threads.
void Selector::score(const BlockIndex& index, std::span<const Part> parts, ThreadPool& pool, KvStats& stats) {
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
    index.score(part.kv_head, query_.data() + int64_t(part.first_query) * shape_.dim_k, part.n_q, task.begin, task.end,
                scores + int64_t(part.first_query) * score_stride_ + task.offset, score_stride_);
  });
}

void Selector::pick(int64_t k, ThreadPool& pool) {
  float* scores = reinterpret_cast<float*>(scores_.data());
  pool.run(int64_t(owners_.size()), [&](int64_t o, int) {
    Owner& owner = owners_[size_t(o)];
    float* own = scores + int64_t(owner.first_query) * score_stride_;
    if (owner.n_q > 1) {
      aggregate_scores(select_.aggregate, own, score_stride_, owner.n_q, owner.n_candidates, softmax_scale_, own);
    }
    top_k(own, owner.n_candidates, k, owner.keys, owner.picked);
  });
}

}  // namespace longkv
