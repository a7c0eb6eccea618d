// How a matrix-vector product is shared out over threads: by rows only, so results never depend on the split.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/checked.h"
#include "base/threads.h"
#include "ops/weight.h"

namespace longkv {

// Rows that kernels compute together, of the file's layout and of the packed one; tasks hold whole groups.
inline constexpr int64_t kRowGroup = 8;
inline constexpr int64_t kPackedRowGroup = 32;

// Bytes of weights for one task of a job that reads `bytes`. A task should last some microseconds (a hand-out costs
// about 0.1) yet leave every thread several, so that one that lost its core for a moment does not hold up the others.
inline int64_t task_bytes(int64_t bytes, int threads) {
  constexpr int64_t kLeastBytes = 16 << 10, kMostBytes = 128 << 10, kTasksPerThread = 4;
  return std::clamp(bytes / (kTasksPerThread * threads), kLeastBytes, kMostBytes);
}

inline int64_t task_rows(const Weight& w, int64_t bytes_per_task) {
  const int64_t group = w.packed != nullptr ? kPackedRowGroup : kRowGroup;
  return std::max(group, bytes_per_task / w.row_bytes / group * group);
}

// Calls fn(begin, end) for row ranges that cover the matrix.
template <class Fn>
void for_row_ranges(const Weight& w, ThreadPool& pool, const Fn& fn) {
  const int64_t rows = task_rows(w, task_bytes(w.rows * w.row_bytes, pool.threads()));
  pool.run(ceil_div(w.rows, rows), [&](int64_t task, int) { fn(task * rows, std::min(w.rows, (task + 1) * rows)); });
}

}  // namespace longkv
