// How a matrix-vector product is shared out over threads: by rows only, so results never depend on the split.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/checked.h"
#include "base/threads.h"
#include "ops/weight.h"

namespace longkv {

// Row groups that kernels compute together; tasks hold whole groups.
inline constexpr int64_t kRowGroup = 8;

// Calls fn(begin, end) for row ranges that cover the matrix.
template <class Fn>
void for_row_ranges(const Weight& w, ThreadPool& pool, const Fn& fn) {
  // A task should last some microseconds (a hand-out costs about 0.1) yet leave every thread several, so that one that
  // lost its core for a moment does not hold up the others.
  constexpr int64_t kLeastBytes = 16 << 10, kMostBytes = 128 << 10, kTasksPerThread = 4;
  const int64_t bytes = w.rows * w.row_bytes;
  const int64_t wanted = std::clamp(bytes / (kTasksPerThread * pool.threads()), kLeastBytes, kMostBytes);
  const int64_t rows = std::max(kRowGroup, wanted / w.row_bytes / kRowGroup * kRowGroup);
  pool.run(ceil_div(w.rows, rows), [&](int64_t task, int) { fn(task * rows, std::min(w.rows, (task + 1) * rows)); });
}

}  // namespace longkv
