// The vector part of decode attention: one run of consecutive chunks of one unit, without threads or memory.
#pragma once

#include <cstdint>

#include "kv/attend.h"
#include "kv/types.h"

namespace longkv {

// Query channels and output channels are padded to whole vectors with zeros.
inline constexpr int64_t kAttendPad = 16;
// Most rows of a tile; the scores of a tile and its K and V rows stay in the nearest cache between the two products.
inline constexpr int64_t kAttendTileMax = 64;

// Where reading goes on: row `row` of *range, then the ranges after it.
struct RowCursor {
  const RowRange* range = nullptr;
  int64_t row = 0;
};

struct AttendRun {
  KvHeadView kv;
  const float* q = nullptr;  // [n_q][q_stride], multiplied by the scale
  int64_t q_stride = 0;
  int n_q = 0;
  RowCursor start;
  int64_t rows = 0;        // of the whole run
  int64_t chunk_rows = 0;  // every chunk but the run's last has so many; a multiple of kAttendTileMax
  float softcap = 0.0f;
  // One partial per chunk and query head, [chunks][n_q][partial_stride]: channels 0..dim_v-1 of the sum of
  // exp(score - max) * v, padding up to partial_stride - 2, then max and the sum of exp(score - max).
  float* partials = nullptr;
  int64_t partial_stride = 0;
};

void attend_run(const AttendRun& run);

// Scores of a run, row r of it at dst[head * dst_stride + r]; `partials` and `chunk_rows` are not used.
void score_run(const AttendRun& run, float* dst, int64_t dst_stride);

// Merges the partials of `chunks` chunks in order: out [n_q][dim_v], lse [n_q].
void merge_run(const float* partials, int64_t chunks, int n_q, int64_t partial_stride, int64_t dim_v, float* out,
               float* lse);

// y[i] = exp(x[i]) for x[i] <= 0; relative error below 2^-22; 0 where the result would be subnormal; NaN stays NaN.
void exp_nonpositive(const float* x, float* y, int64_t n);

}  // namespace longkv
