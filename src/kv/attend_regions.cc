#include "kv/attend_regions.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/gemm.h"
#include "kv/attend.h"
#include "kv/attend_kernel.h"
#include "kv/layout.h"

namespace longkv {

KvHeadView middle_view(const KvHeadView& head) {
  const KvMiddle& m = *head.middle;
  KvHeadView view = head;
  view.middle = nullptr;
  view.k_type = m.k_type;
  view.v_type = m.v_type;
  view.dim_k = m.dim_k;
  view.dim_v = m.dim_v;
  view.k = m.k;
  view.v = m.v;
  view.k_stride = m.k_stride;
  view.v_stride = m.v_stride;
  view.first_row = 0;
  if (view.bias != nullptr) view.bias += m.begin;
  if (view.pos != nullptr) view.pos += m.begin;
  if (view.count != nullptr) view.count += m.begin;
  view.rows = m.end - m.begin;
  return view;
}

void split_ranges(const KvMiddle& middle, std::span<const RowRange> ranges, std::vector<RowRange>& outside,
                  std::vector<RowRange>& inside) {
  for (const RowRange& r : ranges) {
    const RowRange before{r.begin, std::min(r.end, middle.begin)};
    const RowRange within{std::max(r.begin, middle.begin), std::min(r.end, middle.end)};
    const RowRange after{std::max(r.begin, middle.end), r.end};
    if (before.begin < before.end) outside.push_back(before);
    if (within.begin < within.end) inside.push_back({within.begin - middle.begin, within.end - middle.begin});
    if (after.begin < after.end) outside.push_back(after);
  }
}

void gather_query(const KvMiddle& middle, const float* q, int64_t dim, float* dst) {
  if (middle.directions != nullptr) {
    std::fill_n(dst, middle.dim_k, 0.0f);
    gemm_add(1, middle.dim_k, dim, q, dim, middle.directions, middle.dim_k, dst, middle.dim_k);
    return;
  }
  for (int64_t i = 0; i < middle.dim_k; ++i) {
    const int64_t c = middle.channels == nullptr ? i : int64_t(middle.channels[i]);
    dst[i] = middle.alpha == nullptr ? q[c] : q[c] * middle.alpha[i];
  }
}

namespace {

// What mean_k and a constant add to the score of every row of the middle.
float score_shift(const KvMiddle& middle, const float* q, int64_t dim, float scale) {
  double sum = 0;
  for (int64_t c = 0; middle.mean_k != nullptr && c < dim; ++c) sum += double(q[c]) * middle.mean_k[c];
  return float(scale * sum) + middle.score;
}

bool reads_middle(const AttendUnit& unit) {
  const KvMiddle* m = unit.kv.middle;
  if (m == nullptr || m->begin >= m->end) return false;
  return std::any_of(unit.ranges.begin(), unit.ranges.end(),
                     [&](const RowRange& r) { return r.begin < m->end && r.end > m->begin; });
}

// Rows of which nothing but means is left: one score and the mean of V for all.
void attend_removed(const AttendUnit& unit, float scale, int64_t rows, float* out, float* lse) {
  const KvMiddle& middle = *unit.kv.middle;
  for (int h = 0; h < unit.n_q; ++h) {
    if (middle.mean_v == nullptr) {
      std::fill_n(out + h * middle.dim_v, middle.dim_v, 0.0f);
      lse[h] = -std::numeric_limits<float>::infinity();
    } else {
      std::copy_n(middle.mean_v, middle.dim_v, out + h * middle.dim_v);
      lse[h] = std::log(float(rows)) + score_shift(middle, unit.q + int64_t(h) * unit.kv.dim_k, unit.kv.dim_k, scale);
    }
  }
}

}  // namespace

void attend(std::span<const AttendUnit> units, const AttendParams& params, AttendScratch& scratch, ThreadPool& pool) {
  const int64_t cut = std::count_if(units.begin(), units.end(), reads_middle);
  if (cut == 0) return attend_whole(units, params, scratch, pool);

  // A cut unit becomes two, whose outputs lie in scratch: outside first, then the middle.
  AttendScratch::Regions& s = scratch.regions;
  s.units.clear();
  s.outside.clear();
  s.inside.clear();
  s.parts.clear();
  int64_t floats = 0;
  for (const AttendUnit& unit : units) {
    AttendScratch::Regions::Part part;
    if (reads_middle(unit)) {
      part.outside = int64_t(s.outside.size());
      part.inside = int64_t(s.inside.size());
      split_ranges(*unit.kv.middle, unit.ranges, s.outside, s.inside);
      part.n_outside = int64_t(s.outside.size()) - part.outside;
      part.n_inside = int64_t(s.inside.size()) - part.inside;
      part.at = floats;
      floats += int64_t(unit.n_q) * (unit.kv.middle->dim_k + 2 * unit.kv.dim_v + 2);
    }
    s.parts.push_back(part);
  }
  if (int64_t(s.floats.size()) < floats) s.floats.resize(size_t(floats));

  // Of a cut unit: the gathered query, outputs [2][n_q][dim_v], lse [2][n_q].
  const auto outputs = [&](const AttendUnit& unit, const AttendScratch::Regions::Part& part) {
    return s.floats.data() + part.at + int64_t(unit.n_q) * unit.kv.middle->dim_k;
  };
  for (size_t u = 0; u < units.size(); ++u) {
    const AttendUnit& unit = units[u];
    const auto& part = s.parts[u];
    if (part.n_inside == 0) {
      s.units.push_back(unit);
      continue;
    }
    const KvMiddle& middle = *unit.kv.middle;
    const int64_t size = int64_t(unit.n_q) * unit.kv.dim_v;
    float* out = outputs(unit, part);
    float* lse = out + 2 * size;
    AttendUnit outside = unit;
    outside.kv.middle = nullptr;
    outside.ranges = std::span<const RowRange>(s.outside).subspan(size_t(part.outside), size_t(part.n_outside));
    outside.out = out;
    outside.lse = lse;
    s.units.push_back(outside);
    const auto within = std::span<const RowRange>(s.inside).subspan(size_t(part.inside), size_t(part.n_inside));
    if (middle.dim_k == 0) {
      attend_removed(unit, params.scale, count_rows(within), out + size, lse + unit.n_q);
      continue;
    }
    AttendUnit inside = unit;
    inside.kv = middle_view(unit.kv);
    float* q = s.floats.data() + part.at;
    for (int h = 0; h < unit.n_q; ++h) {
      gather_query(middle, unit.q + int64_t(h) * unit.kv.dim_k, unit.kv.dim_k, q + int64_t(h) * middle.dim_k);
    }
    inside.q = q;
    inside.ranges = within;
    inside.out = out + size;
    inside.lse = lse + unit.n_q;
    s.units.push_back(inside);
  }
  attend_whole(s.units, params, scratch, pool);

  for (size_t u = 0; u < units.size(); ++u) {
    const AttendUnit& unit = units[u];
    if (s.parts[u].n_inside == 0) continue;
    const int64_t dim = unit.kv.dim_v, size = int64_t(unit.n_q) * dim;
    const float* out = outputs(unit, s.parts[u]);
    const float* lse = out + 2 * size;
    s.merge.resize(size_t(2 * dim));
    for (int h = 0; h < unit.n_q; ++h) {
      std::copy_n(out + h * dim, dim, s.merge.data());
      std::copy_n(out + size + h * dim, dim, s.merge.data() + dim);
      // A shift of all scores is a shift of their log-sum-exp.
      const KvMiddle& middle = *unit.kv.middle;
      const float shift = middle.dim_k == 0
                              ? 0.0f
                              : score_shift(middle, unit.q + int64_t(h) * unit.kv.dim_k, unit.kv.dim_k, params.scale);
      const float both[] = {lse[h], lse[unit.n_q + h] + shift};
      merge_partials(s.merge.data(), both, 2, dim, unit.out + h * dim, unit.lse + h);
    }
  }
}

void attend_scores(const AttendUnit& unit, const AttendParams& params, float* dst, ThreadPool& pool) {
  const int64_t stride = count_rows(unit.ranges);
  if (!reads_middle(unit)) return attend_scores_whole(unit, params, dst, stride, pool);
  const KvMiddle& middle = *unit.kv.middle;
  std::vector<RowRange> outside, inside;
  split_ranges(middle, unit.ranges, outside, inside);
  const auto border = std::find_if(outside.begin(), outside.end(), [&](RowRange r) { return r.begin >= middle.end; });
  AttendUnit part = unit;
  part.kv.middle = nullptr;
  part.ranges = {outside.begin(), border};
  attend_scores_whole(part, params, dst, stride, pool);
  float* middle_dst = dst + count_rows(part.ranges);
  part.ranges = {border, outside.end()};
  attend_scores_whole(part, params, middle_dst + count_rows(inside), stride, pool);
  if (middle.dim_k == 0) {
    for (int h = 0; h < unit.n_q; ++h) {
      const float* q = unit.q + int64_t(h) * unit.kv.dim_k;
      const float score = middle.mean_v == nullptr ? -std::numeric_limits<float>::infinity()
                                                   : score_shift(middle, q, unit.kv.dim_k, params.scale);
      std::fill_n(middle_dst + h * stride, count_rows(inside), score);
    }
    return;
  }
  std::vector<float> q(size_t(unit.n_q) * size_t(middle.dim_k));
  for (int h = 0; h < unit.n_q; ++h) {
    gather_query(middle, unit.q + int64_t(h) * unit.kv.dim_k, unit.kv.dim_k, q.data() + int64_t(h) * middle.dim_k);
  }
  part.kv = middle_view(unit.kv);
  part.q = q.data();
  part.ranges = inside;
  attend_scores_whole(part, params, middle_dst, stride, pool);
  for (int h = 0; h < unit.n_q; ++h) {
    const float shift = score_shift(middle, unit.q + int64_t(h) * unit.kv.dim_k, unit.kv.dim_k, params.scale);
    for (int64_t r = 0; r < count_rows(inside); ++r) middle_dst[h * stride + r] += shift;
  }
}

}  // namespace longkv
