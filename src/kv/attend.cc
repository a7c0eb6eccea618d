#include "kv/attend.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "base/checked.h"
#include "kv/attend_kernel.h"
#include "kv/attend_quant.h"
#include "kv/layout.h"

namespace longkv {

namespace {

// Rows of a chunk, from the unit's row count alone: the split, and so every rounding, is a function of the data. Long
// units get chunks long enough for the cost of a partial to vanish, short ones enough chunks to share among threads.
int64_t chunk_rows_for(int64_t rows) {
  return std::clamp(round_up(ceil_div(rows, 64), kAttendTileMax), 2 * kAttendTileMax, 16 * kAttendTileMax);
}

// What a task takes of the bytes not yet handed out: 1 / (threads * kShare), at least a chunk. Early tasks are long
// reads, late ones short, so that threads end together however unequal their speed or their rows are.
constexpr int64_t kShare = 2;

int64_t partial_stride_for(int64_t dim_v) { return round_up(dim_v, kAttendPad) + kPartialTail; }

// `count` floats of `memory` from the begin of a cache line on, where queries and partials begin too: a vector of
// channels across two lines takes two reads for every row.
float* reserve_lines(std::vector<float>& memory, int64_t count) {
  constexpr size_t kLine = 64;
  static_assert(kAttendPad * sizeof(float) == kLine);
  if (int64_t(memory.size()) < count + kAttendPad) memory.resize(size_t(count + kAttendPad));
  void* at = memory.data();
  size_t space = memory.size() * sizeof(float);
  return static_cast<float*>(std::align(kLine, size_t(count) * sizeof(float), at, space));
}

// Floats of a query head in scratch: its padded channels, and what quantised keys are multiplied by.
int64_t query_floats(const KvHeadView& kv) {
  const int64_t image =
      has_quant_kernels(kv.k_type) ? quant_query_bytes(kv.k_type, kv.dim_k) / int64_t(sizeof(float)) : 0;
  return round_up(kv.dim_k, kAttendPad) + image;
}

void pad_queries(const AttendUnit& unit, float scale, float* dst, int64_t stride) {
  const bool quant = has_quant_kernels(unit.kv.k_type);
  const int64_t image_bytes = quant_query_bytes(unit.kv.k_type, unit.kv.dim_k);
  scale *= query_factor(unit.kv.k_type);
  auto* image = reinterpret_cast<uint8_t*>(dst + stride * unit.n_q);
  for (int h = 0; h < unit.n_q; ++h) {
    const float* q = unit.q + int64_t(h) * unit.kv.dim_k;
    float* padded = dst + h * stride;
    for (int c = 0; c < unit.kv.dim_k; ++c) padded[c] = q[c] * scale;
    std::fill(padded + unit.kv.dim_k, padded + stride, 0.0f);
    if (quant) prepare_quant_query(unit.kv.k_type, padded, unit.kv.dim_k, image + h * image_bytes);
  }
}

// Moves (range, row) on by `count` rows of the concatenated ranges, which hold more.
void skip_rows(std::span<const RowRange> ranges, int64_t count, int64_t& range, int64_t& row) {
  for (row += count; row >= ranges[size_t(range)].end;) {
    const int64_t beyond = row - ranges[size_t(range)].end;
    row = ranges[size_t(++range)].begin + beyond;
  }
}

// Visits the cursor of every `step`-th row of the concatenated ranges.
template <class Fn>
void each_step(std::span<const RowRange> ranges, int64_t step, const Fn& fn) {
  int64_t skip = 0;  // rows until the next visit
  for (size_t i = 0; i < ranges.size(); ++i) {
    int64_t row = ranges[i].begin + skip;
    for (; row < ranges[i].end; row += step) fn(int64_t(i), row);
    skip = ranges[i].begin < ranges[i].end ? row - ranges[i].end : skip;
  }
}

AttendRun make_run(const AttendUnit& unit, const AttendParams& params, const float* q, int64_t q_stride) {
  AttendRun run;
  run.kv = unit.kv;
  run.q = q;
  run.q_stride = q_stride;
  run.n_q = unit.n_q;
  if (has_quant_kernels(unit.kv.k_type)) run.q_image = reinterpret_cast<const uint8_t*>(q + q_stride * unit.n_q);
  run.softcap = params.softcap;
  return run;
}

}  // namespace

void attend_whole(std::span<const AttendUnit> units, const AttendParams& params, AttendScratch& scratch,
                  ThreadPool& pool) {
  scratch.units.resize(units.size());
  int64_t floats = 0, bytes_left = 0;
  for (size_t u = 0; u < units.size(); ++u) {
    const AttendUnit& unit = units[u];
    AttendScratch::Unit& plan = scratch.units[u];
    plan.rows = count_rows(unit.ranges);
    plan.chunk_rows = chunk_rows_for(plan.rows);
    plan.chunks = ceil_div(plan.rows, plan.chunk_rows);
    plan.q_at = floats;
    floats += round_up(query_floats(unit.kv) * unit.n_q, kAttendPad);
    plan.partials_at = floats;
    floats += plan.chunks * unit.n_q * partial_stride_for(unit.kv.dim_v);
    plan.chunk_bytes =
        plan.chunk_rows * (kv_row_bytes(unit.kv.k_type, unit.kv.dim_k) + kv_row_bytes(unit.kv.v_type, unit.kv.dim_v));
    bytes_left += plan.chunks * plan.chunk_bytes;
  }
  float* memory = reserve_lines(scratch.floats, floats);

  // Which chunks form a task may depend on the number of threads: a chunk's bits do not.
  const int64_t share = pool.threads() == 1 ? 1 : pool.threads() * kShare;
  scratch.tasks.clear();
  for (size_t u = 0; u < units.size(); ++u) {
    const AttendUnit& unit = units[u];
    AttendScratch::Unit& plan = scratch.units[u];
    plan.pending = 0;
    pad_queries(unit, params.scale, memory + plan.q_at, round_up(unit.kv.dim_k, kAttendPad));
    if (plan.chunks == 0) {
      std::fill(unit.out, unit.out + int64_t(unit.n_q) * unit.kv.dim_v, 0.0f);
      std::fill(unit.lse, unit.lse + unit.n_q, -std::numeric_limits<float>::infinity());
    }
    int64_t range = 0, row = unit.ranges.empty() ? 0 : unit.ranges[0].begin;
    for (int64_t chunk = 0, count = 0; chunk < plan.chunks; chunk += count) {
      skip_rows(unit.ranges, count * plan.chunk_rows, range, row);
      count = std::clamp<int64_t>(bytes_left / (share * plan.chunk_bytes), 1, plan.chunks - chunk);
      scratch.tasks.push_back({int64_t(u), chunk, count, range, row});
      bytes_left -= count * plan.chunk_bytes;
      ++plan.pending;
    }
  }

  pool.run(int64_t(scratch.tasks.size()), [&](int64_t index, int) {
    const AttendScratch::Task& task = scratch.tasks[size_t(index)];
    const AttendUnit& unit = units[size_t(task.unit)];
    AttendScratch::Unit& plan = scratch.units[size_t(task.unit)];
    const int64_t stride = partial_stride_for(unit.kv.dim_v);
    float* partials = memory + plan.partials_at;
    AttendRun run = make_run(unit, params, memory + plan.q_at, round_up(unit.kv.dim_k, kAttendPad));
    run.start = {unit.ranges.data() + task.range, task.row};
    run.rows = std::min(task.chunks * plan.chunk_rows, plan.rows - task.first_chunk * plan.chunk_rows);
    run.chunk_rows = plan.chunk_rows;
    run.partials = partials + task.first_chunk * unit.n_q * stride;
    run.partial_stride = stride;
    attend_run(run);
    // Whoever finishes a unit's last task merges it, always in chunk order.
    if (std::atomic_ref<int64_t>(plan.pending).fetch_sub(1, std::memory_order_acq_rel) == 1) {
      merge_run(partials, plan.chunks, unit.n_q, stride, unit.kv.dim_v, unit.out, unit.lse);
    }
  });
}

void merge_partials(const float* outs, const float* lses, int n, int64_t dim, float* out, float* lse) {
  constexpr float kEmpty = -std::numeric_limits<float>::infinity();
  float top = kEmpty;
  for (int i = 0; i < n; ++i) top = lses[i] > top ? lses[i] : top;
  double total = 0.0;
  bool nan = false;
  for (int i = 0; i < n; ++i) {
    nan |= std::isnan(lses[i]);
    if (lses[i] != kEmpty) total += std::exp(double(lses[i]) - double(top));
  }
  if (top == kEmpty && !nan) {
    std::fill(out, out + dim, 0.0f);
    *lse = kEmpty;
    return;
  }
  constexpr int64_t kStep = 64;  // channels summed before any is written, so that out may be the first of outs
  for (int64_t begin = 0; begin < dim; begin += kStep) {
    const int64_t count = std::min(kStep, dim - begin);
    double sum[kStep] = {};
    for (int i = 0; i < n; ++i) {
      if (lses[i] == kEmpty) continue;
      const double weight = std::exp(double(lses[i]) - double(top)) / total;
      for (int64_t c = 0; c < count; ++c) sum[c] += weight * double(outs[i * dim + begin + c]);
    }
    for (int64_t c = 0; c < count; ++c) out[begin + c] = float(sum[c]);
  }
  *lse = float(double(top) + std::log(total));
}

void attend_scores_whole(const AttendUnit& unit, const AttendParams& params, float* dst, int64_t dst_stride,
                         ThreadPool& pool) {
  const int64_t rows = count_rows(unit.ranges);
  const int64_t q_stride = round_up(unit.kv.dim_k, kAttendPad);
  std::vector<float> floats;
  float* q = reserve_lines(floats, query_floats(unit.kv) * unit.n_q);
  pad_queries(unit, params.scale, q, q_stride);
  const int64_t step = chunk_rows_for(rows);
  std::vector<RowCursor> starts;
  each_step(unit.ranges, step, [&](int64_t range, int64_t row) {
    starts.push_back({unit.ranges.data() + range, row});
  });
  pool.run(int64_t(starts.size()), [&](int64_t task, int) {
    AttendRun run = make_run(unit, params, q, q_stride);
    run.start = starts[size_t(task)];
    run.rows = std::min(step, rows - task * step);
    score_run(run, dst + task * step, dst_stride);
  });
}

}  // namespace longkv
