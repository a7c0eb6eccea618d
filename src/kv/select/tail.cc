// What stands in for the rows that a step does not read, each a partial that merges with that of the read rows.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kv/codec/codec.h"
#include "kv/index/clusters.h"
#include "kv/index/lsh.h"
#include "kv/layout.h"
#include "kv/select/selector.h"
#include "kv/tail/sample.h"
#include "kv/tail/weighted.h"

namespace longkv {

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
// Rows of a first sample, at least: fewer say little about a variance.
constexpr int64_t kLeastBase = 32;

}  // namespace

void Selector::merge_tail(int layer, const float* q, RowRange visible, ThreadPool& pool,
                          std::span<const SelectionUnit> units, std::span<const std::vector<RowRange>> ranges,
                          const float* lse, float* out, KvStats& stats) {
  const LayerPlan& plan = plans_[size_t(layer)];
  if (plan.source < 0) return;
  LayerState& state = states_[size_t(plan.source)];
  if (select_.mode == SelectMode::kSampled) return merge_drawn(state, q, visible, pool, lse, out, stats);
  switch (tail_.kind) {
    case TailKind::kNone: return;
    case TailKind::kMean: return merge_mean(state, units, lse, out);
    case TailKind::kSample:
      return merge_sample(layer, states_[size_t(layer)], q, visible, pool, units, ranges, lse, out, stats);
    case TailKind::kClusters: return merge_clusters(state, q, pool, units, lse, out, stats);
  }
}

// The mean value with weight e^log_rest beside the read rows: alpha * out + (1 - alpha) * mean.
void Selector::merge_mean(LayerState& state, std::span<const SelectionUnit> units, const float* lse, float* out) {
  std::vector<float> mean(static_cast<size_t>(shape_.dim_v));
  for (const SelectionUnit& unit : units) {
    state.means->mean(unit.kv_head, mean.data());
    for (int j = unit.first_query; j < unit.first_query + unit.n_q; ++j) {
      merge_into(out + int64_t(j) * shape_.dim_v, lse[j], mean.data(), lse[j] + state.log_rest[size_t(j)],
                 shape_.dim_v);
    }
  }
}

void Selector::merge_sample(int layer, LayerState& state, const float* q, RowRange visible, ThreadPool& pool,
                            std::span<const SelectionUnit> units, std::span<const std::vector<RowRange>> ranges,
                            const float* lse, float* out, KvStats& stats) {
  const int heads = shape_.kv_heads * shape_.group_size;
  tail_ranges_.resize(units.size());
  tail_out_.resize(size_t(heads) * size_t(shape_.dim_v));
  tail_lse_.resize(size_t(heads));
  std::vector<float> log_rate(units.size());
  std::vector<int64_t> read(units.size(), 0);
  pool.run(int64_t(units.size()), [&](int64_t u, int) {
    thread_local std::vector<RowRange> others;
    thread_local std::vector<int64_t> scratch, rows;
    thread_local std::vector<float> logits, values;
    const SelectionUnit& unit = units[size_t(u)];
    const KvHeadView& view = state.views[size_t(unit.kv_head)];
    std::vector<RowRange>& sample = tail_ranges_[size_t(u)];
    other_rows(ranges[size_t(u)], visible, others);
    const int64_t rest = count_rows(others);
    const SampleOrder order(sample_key(tail_.seed, layer, u, visible.end), rest);
    const int64_t base = std::min(rest, std::max(kLeastBase, int64_t(std::ceil(tail_.rate * double(rest)))));
    sample_ranges(others, order, base, scratch, sample);
    int64_t size = base;
    if (tail_.epsilon > 0 && base < rest) {
      rows.clear();
      for (const RowRange& r : sample) {
        for (int64_t row = r.begin; row < r.end; ++row) rows.push_back(row);
      }
      values.resize(size_t(base * shape_.dim_v));
      for (int64_t i = 0; i < base; ++i) {
        decode_v_rows(view, rows[size_t(i)], rows[size_t(i)] + 1, values.data() + i * shape_.dim_v);
      }
      logits.resize(size_t(unit.n_q * base));
      score_rows(view, q + int64_t(unit.first_query) * shape_.dim_k, unit.n_q, params_, rows, logits.data());
      for (int j = 0; j < unit.n_q; ++j) {
        const int head = unit.first_query + j;
        size = std::max(size, sample_size(logits.data() + j * base, values.data(), base, shape_.dim_v, rest,
                                          out + int64_t(head) * shape_.dim_v, lse[head], tail_.epsilon, tail_.delta));
      }
      if (size > base) sample_ranges(others, order, size, scratch, sample);
    }
    log_rate[size_t(u)] = size > 0 ? float(std::log(double(rest) / double(size))) : 0.0f;
    read[size_t(u)] = size;
  });
  tail_units_.resize(units.size());
  for (size_t u = 0; u < units.size(); ++u) {
    const SelectionUnit& unit = units[u];
    AttendUnit& attended = tail_units_[u];
    attended.q = q + int64_t(unit.first_query) * shape_.dim_k;
    attended.n_q = unit.n_q;
    attended.kv = state.views[size_t(unit.kv_head)];
    attended.out = tail_out_.data() + int64_t(unit.first_query) * shape_.dim_v;
    attended.lse = tail_lse_.data() + unit.first_query;
    stats.kv_bytes += read[u] * row_bytes_;
    stats.rows_attended += read[u];
  }
  for (size_t u = 0; u < units.size(); ++u) tail_units_[u].ranges = tail_ranges_[u];
  attend(tail_units_, params_, tail_scratch_, pool);
  for (size_t u = 0; u < units.size(); ++u) {
    for (int j = units[u].first_query; j < units[u].first_query + units[u].n_q; ++j) {
      merge_into(out + int64_t(j) * shape_.dim_v, lse[j], tail_out_.data() + int64_t(j) * shape_.dim_v,
                 tail_lse_[size_t(j)] + log_rate[u], shape_.dim_v);
    }
  }
}

void Selector::merge_clusters(LayerState& state, const float* q, ThreadPool& pool, std::span<const SelectionUnit> units,
                              const float* lse, float* out, KvStats& stats) {
  const ClusterIndex& index = *clusters(state);
  pool.run(int64_t(units.size()), [&](int64_t u, int) {
    const SelectionUnit& unit = units[size_t(u)];
    std::vector<float> other(static_cast<size_t>(shape_.dim_v));
    for (int j = unit.first_query; j < unit.first_query + unit.n_q; ++j) {
      float other_lse = kNone;
      index.estimate(unit.kv_head, q + int64_t(j) * shape_.dim_k, params_.scale, state.estimated[size_t(u)],
                     other.data(), &other_lse);
      merge_into(out + int64_t(j) * shape_.dim_v, lse[j], other.data(), other_lse, shape_.dim_v);
    }
  });
  for (const auto& list : state.estimated) stats.index_bytes += int64_t(list.size()) * index.bytes_estimated();
}

void Selector::merge_drawn(LayerState& state, const float* q, RowRange visible, ThreadPool& pool, const float* lse,
                           float* out, KvStats& stats) {
  const auto& index = static_cast<const LshIndex&>(*state.fine);
  const int heads = shape_.kv_heads * shape_.group_size;
  const RowRange rows{std::clamp(select_.sink, visible.begin, visible.end), state.tail};
  std::vector<int64_t> read(static_cast<size_t>(heads), 0);
  pool.run(heads, [&](int64_t j, int) {
    thread_local std::vector<int64_t> drawn;
    thread_local std::vector<float> log_weight, other;
    const int h = int(j) / shape_.group_size;
    const float* query = q + j * shape_.dim_k;
    const KvHeadView& view = state.views[size_t(h)];
    index.draw(h, view, query, rows, drawn, log_weight);
    other.resize(size_t(shape_.dim_v));
    float other_lse = kNone;
    attend_weighted(view, query, params_, drawn, log_weight, other.data(), &other_lse);
    merge_into(out + j * shape_.dim_v, lse[j], other.data(), other_lse, shape_.dim_v);
    read[size_t(j)] = int64_t(drawn.size());
  });
  int64_t total = 0;
  for (const int64_t r : read) total += r;
  stats.kv_bytes += total * row_bytes_;
  stats.rows_attended += total / shape_.group_size;
  stats.index_bytes += index.bytes_drawn(count_of(rows)) * heads;
}

}  // namespace longkv
