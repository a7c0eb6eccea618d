// The last pass of a choice: tokens of the best blocks by exact or 4-bit keys, the best of them or the smallest set
// with a wanted share of the softmax; and what the approximate scores say of the rows that were left out.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/checked.h"
#include "kv/attend_kernel.h"
#include "kv/select/aggregate.h"
#include "kv/select/row_set.h"
#include "kv/select/selector.h"
#include "kv/select/topk.h"

namespace longkv {

namespace {

// Rows between two ranges that are scanned along with them.
constexpr int64_t kRefineGap = 64;
constexpr float kNone = -std::numeric_limits<float>::infinity();

// Sum of exp(scale * s[i] - peak) over n scores; NaN counts as nothing. scale * s[i] <= peak.
double sum_exp(const float* s, int64_t n, float scale, float peak) {
  constexpr int64_t kAtOnce = 256;
  float x[kAtOnce];
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kAtOnce) {
    const int64_t count = std::min(kAtOnce, n - begin);
    for (int64_t i = 0; i < count; ++i) {
      const float d = scale * s[begin + i] - peak;
      x[i] = d <= 0.0f ? d : d > 0.0f ? 0.0f : kNone;
    }
    exp_nonpositive(x, x, count);
    for (int64_t i = 0; i < count; ++i) total += double(x[i]);
  }
  return total;
}

float largest(const float* s, int64_t n, float start) {
  for (int64_t i = 0; i < n; ++i) start = s[i] > start ? s[i] : start;
  return start;
}

// Marks the members of the smallest set of weights, largest first, whose sum reaches `wanted`; weights equal to the
// smallest member's join it. `scratch`: positions ordered by weight.
void mark_top_mass(const float* weights, int64_t n, double wanted, std::vector<uint64_t>& scratch, uint8_t* marked) {
  if (n == 0 || !(wanted > 0)) return;
  scratch.resize(size_t(n));
  for (int64_t i = 0; i < n; ++i) scratch[size_t(i)] = (uint64_t(~score_key(weights[i])) << 32) | uint64_t(i);
  // Halves with too little mass are kept whole, so all of it takes time in proportion to n.
  auto begin = scratch.begin(), end = scratch.end();
  double before = 0;
  while (end - begin > 32) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end);
    double mass = 0;
    for (auto it = begin; it != middle; ++it) mass += double(weights[*it & 0xffffffffu]);
    if (before + mass < wanted) {
      before += mass;
      begin = middle;
    } else {
      end = middle;
    }
  }
  std::sort(begin, end);
  float threshold = 0;
  for (auto it = begin; it != end; ++it) {
    threshold = weights[*it & 0xffffffffu];
    before += double(threshold);
    if (before >= wanted) break;
  }
  for (int64_t i = 0; i < n; ++i) {
    if (weights[i] >= threshold && weights[i] > 0) marked[i] = 1;
  }
}

}  // namespace

// Logits (softmax scale applied) of the owner's tokens, row j of weights for query head j.
void Selector::score_tokens(LayerState& state, const float* q, Owner& owner, ThreadPool& pool, KvStats& stats) {
  const int64_t n = count_rows(owner.tokens);
  const int group = shape_.group_size;
  owner.weights.resize(size_t((owner.n_q + 1) * n));
  const int first_head = owner.first_query / group;
  const int heads = std::max(1, owner.n_q / group);  // KV heads that the list covers
  const int n_q = owner.n_q / heads;
  for (int h = 0; h < heads; ++h) {
    const int first = owner.first_query + h * n_q;
    const KvHeadView& view = state.views[size_t(first_head) + size_t(h)];
    float* dst = owner.weights.data() + int64_t(h) * n_q * n;
    if (select_.refine == Refine::kExact) {
      AttendUnit unit;
      unit.q = q + int64_t(first) * shape_.dim_k;
      unit.n_q = n_q;
      unit.kv = view;
      unit.ranges = owner.tokens;
      attend_scores(unit, params_, dst, pool);
      stats.index_bytes += n * kv_row_bytes(types_.k, shape_.dim_k);
      continue;
    }
    // Neighbouring ranges are scanned as one: the index reads whole tiles anyway.
    const float* scaled = query_.data() + int64_t(first) * shape_.dim_k;
    refine_tasks_.clear();
    for (int64_t i = 0, at = 0; i < int64_t(owner.tokens.size()); ++i) {
      const RowRange& r = owner.tokens[size_t(i)];
      for (int64_t b = r.begin; b < r.end;) {
        ScoreTask* last = refine_tasks_.empty() ? nullptr : &refine_tasks_.back();
        if (last == nullptr || b - last->end > kRefineGap || b - last->begin >= kRefineRows) {
          last = &refine_tasks_.emplace_back(ScoreTask{int(i), at, b, b});
        }
        const int64_t end = std::min(r.end, last->begin + kRefineRows);
        at += end - b;
        b = last->end = end;
      }
    }
    pool.run(int64_t(refine_tasks_.size()), [&](int64_t t, int) {
      const ScoreTask& task = refine_tasks_[size_t(t)];
      thread_local std::vector<float> span;
      const int64_t length = task.end - task.begin;
      span.resize(size_t(n_q * length));
      state.four->score(first_head + h, scaled, n_q, task.begin, task.end, span.data(), length);
      int64_t at = task.offset;
      for (size_t i = size_t(task.part); i < owner.tokens.size() && owner.tokens[i].begin < task.end; ++i) {
        const int64_t begin = std::max(owner.tokens[i].begin, task.begin);
        const int64_t count = std::min(owner.tokens[i].end, task.end) - begin;
        for (int j = 0; j < n_q; ++j)
          std::copy_n(span.data() + j * length + begin - task.begin, count, dst + j * n + at);
        at += count;
      }
    });
    for (int64_t i = 0; i < n_q * n; ++i) dst[i] *= softmax_scale_;
    stats.index_bytes += state.four->bytes_scored(n);
  }
}

void Selector::refine_tokens(LayerState& state, const float* q, RowRange visible, RowRange sink, ThreadPool& pool,
                             KvStats& stats) {
  for (size_t o = 0; o < owners_.size(); ++o) {
    Owner& owner = owners_[o];
    // Ascending: sinks, candidates between, local rows. Where mass counts, that of rows attended anyway counts too.
    const bool with_forced = select_.mode == SelectMode::kTopP;
    RowSetBuilder set(visible, owner.tokens);
    if (with_forced) set.add(sink);
    for (const RowRange& r : picked_rows_[o]) set.add({std::max(r.begin, sink.end), std::min(r.end, state.tail)});
    if (with_forced) set.add({state.tail, visible.end});
    score_tokens(state, q, owner, pool, stats);
  }
  pool.run(int64_t(owners_.size()),
           [&](int64_t o, int) { pick_tokens(state, owners_[size_t(o)], sink, state.chosen[size_t(o)]); });
}

void Selector::pick_tokens(const LayerState& state, Owner& owner, RowRange sink, std::vector<RowRange>& chosen) const {
  const int64_t n = count_rows(owner.tokens);
  float* weights = owner.weights.data();
  float* total = weights + owner.n_q * n;
  chosen.clear();
  if (select_.mode == SelectMode::kTopK) {
    aggregate_scores(select_.aggregate, weights, n, owner.n_q, n, 1.0f, total);
    top_k(total, n, owner.rows, owner.keys, owner.picked);
  } else {
    // Per query head the smallest set; a list has the union of its heads' sets.
    owner.marked.assign(size_t(n), 0);
    std::fill(total, total + n, 0.0f);
    const auto forced = [&](int64_t row) { return row < sink.end || row >= state.tail; };
    for (int j = 0; j < owner.n_q; ++j) {
      float* w = weights + j * n;
      aggregate_scores(Aggregate::kSoftmaxSum, w, n, 1, n, 1.0f, w);
      double held = 0;
      int64_t i = 0;
      for (const RowRange& r : owner.tokens) {
        for (int64_t row = r.begin; row < r.end; ++row, ++i) {
          if (!forced(row)) continue;
          held += double(w[i]);
          w[i] = 0.0f;  // attended anyway
        }
      }
      for (i = 0; i < n; ++i) total[i] += w[i];
      mark_top_mass(w, n, select_.p - held, owner.keys, owner.marked.data());
    }
    owner.picked.clear();
    for (int64_t i = 0; i < n; ++i) {
      if (owner.marked[size_t(i)] != 0) owner.picked.push_back(i);
    }
    if (int64_t(owner.picked.size()) > owner.rows) {  // more than the budget: the heaviest of the union
      for (int64_t i = 0; i < n; ++i) {
        if (owner.marked[size_t(i)] == 0) total[i] = kNone;
      }
      top_k(total, n, owner.rows, owner.keys, owner.picked);
    }
  }
  size_t range = 0;
  int64_t passed = 0;
  for (const int64_t p : owner.picked) {
    while (p - passed >= count_of(owner.tokens[range])) passed += count_of(owner.tokens[range++]);
    const int64_t row = owner.tokens[range].begin + p - passed;
    append_range(chosen, {row, row + 1});
  }
}

// Per query head ln((1 - alpha) / alpha), alpha the share of the approximate softmax over all visible rows that the
// attended ones hold.
void Selector::note_rest(LayerState& state, RowRange visible, RowRange sink, KvStats& stats) {
  const float* scores = reinterpret_cast<const float*>(scores_.data());
  state.log_rest.resize(size_t(shape_.kv_heads) * size_t(shape_.group_size));
  const RowRange forced[] = {sink, {state.tail, visible.end}};
  std::vector<float>& near = forced_scores_;
  for (const Part& part : group_parts_) {
    const Owner& owner = owners_[size_t(part.owner)];
    int64_t n_forced = 0;
    for (const RowRange& r : forced) n_forced += count_of(r);
    near.resize(size_t(part.n_q * n_forced));
    int64_t at = 0;
    for (const RowRange& r : forced) {
      if (count_of(r) == 0) continue;
      state.fine->score(part.kv_head, query_.data() + int64_t(part.first_query) * shape_.dim_k, part.n_q, r.begin,
                        r.end, near.data() + at, n_forced);
      stats.index_bytes += state.fine->bytes_scored(count_of(r));
      at += count_of(r);
    }
    for (int j = 0; j < part.n_q; ++j) {
      const Owner& list =
          owners_.size() > size_t(shape_.kv_heads) ? owners_[size_t(part.first_query) + size_t(j)] : owner;
      const float* own = scores + int64_t(part.first_query + j) * score_stride_;
      const float* close = near.data() + int64_t(j) * n_forced;
      float peak = softmax_scale_ * largest(own, list.n_candidates, largest(close, n_forced, kNone));
      if (peak == kNone) peak = 0.0f;
      const double all = sum_exp(own, list.n_candidates, softmax_scale_, peak);
      double read = sum_exp(close, n_forced, softmax_scale_, peak);
      double chosen = 0;
      for (const int64_t p : list.picked) chosen += sum_exp(own + p, 1, softmax_scale_, peak);
      read += chosen;
      const double rest = all - chosen;
      const bool empty = int64_t(list.picked.size()) >= list.n_candidates || !(rest > 0) || !(read > 0);
      state.log_rest[size_t(part.first_query) + size_t(j)] = empty ? kNone : float(std::log(rest / read));
    }
  }
}

}  // namespace longkv
