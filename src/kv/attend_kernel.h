// The vector part of decode attention: one run of consecutive chunks of one unit, without threads or memory.
#pragma once

#include <cstdint>

#include "kv/attend.h"
#include "kv/attend_quant.h"
#include "kv/types.h"

namespace longkv {

// Query channels and output channels are padded to whole vectors with zeros.
inline constexpr int64_t kAttendPad = 16;
// Most rows of a tile; the scores of a tile and its K and V rows stay in the nearest cache between the two products.
inline constexpr int64_t kAttendTileMax = 64;

// Floats of a partial after its channels: two and padding, so that each head's channels begin on a cache line.
inline constexpr int64_t kPartialTail = 16;

// What query channels are multiplied by before they meet keys of a type; the kernel takes it out again. Where E4M3 has
// no integer form (attend_quant.h) it is read as value * 2^-120, whose products with small queries would fall below
// fp32's range.
inline float query_factor(KvType k_type) {
  return k_type == KvType::kFp8 && !has_quant_kernels(k_type) ? 0x1p64f : 1.0f;
}

// Where reading goes on: row `row` of *range, then the ranges after it.
struct RowCursor {
  const RowRange* range = nullptr;
  int64_t row = 0;
};

struct AttendRun {
  KvHeadView kv;
  const float* q = nullptr;  // [n_q][q_stride], multiplied by the scale and query_factor(k_type)
  int64_t q_stride = 0;
  const uint8_t* q_image = nullptr;  // [n_q][quant_query_bytes()] where has_quant_kernels(k_type), else nullptr
  int n_q = 0;
  RowCursor start;
  int64_t rows = 0;        // of the whole run
  int64_t chunk_rows = 0;  // every chunk but the run's last has so many; a multiple of kAttendTileMax
  float softcap = 0.0f;
  // One partial per chunk and query head, [chunks][n_q][partial_stride]: channels 0..dim_v-1 of the sum of
  // exp(score - max) * v, padding up to partial_stride - kPartialTail, then max and the sum of exp(score - max).
  float* partials = nullptr;
  int64_t partial_stride = 0;
};

void attend_run(const AttendRun& run);

// attend() and attend_scores() of views without a middle. dst: [n_q][dst_stride].
void attend_whole(std::span<const AttendUnit> units, const AttendParams& params, AttendScratch& scratch,
                  ThreadPool& pool);
void attend_scores_whole(const AttendUnit& unit, const AttendParams& params, float* dst, int64_t dst_stride,
                         ThreadPool& pool);

// Scores of a run, row r of it at dst[head * dst_stride + r]; `partials` and `chunk_rows` are not used.
void score_run(const AttendRun& run, float* dst, int64_t dst_stride);

// Merges the partials of `chunks` chunks in order: out [n_q][dim_v], lse [n_q].
void merge_run(const float* partials, int64_t chunks, int n_q, int64_t partial_stride, int64_t dim_v, float* out,
               float* lse);

// y[i] = exp(x[i]) for x[i] <= 0; relative error below 2^-22; 0 where the result would be subnormal; NaN stays NaN.
void exp_nonpositive(const float* x, float* y, int64_t n);

}  // namespace longkv
