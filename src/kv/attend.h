// Decode attention over chosen rows: one kernel for dense and sparse, all KV types.
//
// Attention partials are the one currency of longkv: whatever attended (dense, sparse, another device, an estimate)
// returns (out, lse), and merging partials is exact, ordered and deterministic.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/threads.h"
#include "kv/types.h"

namespace longkv {

// A group of query heads that read the same rows of one KV head.
struct AttendUnit {
  const float* q = nullptr;  // [n_q][dim_k], RoPE applied, not scaled
  int n_q = 0;               // usually the group size; 1 for selection per query head
  KvHeadView kv;
  std::span<const RowRange> ranges;  // ascending, disjoint; adjacent ranges are equal to their union, bit for bit
  float* out = nullptr;              // [n_q][dim_v]
  float* lse = nullptr;              // [n_q], natural log; -inf with out = 0 when there are no rows
};

struct AttendParams {
  float scale = 1.0f;    // multiplies q.k
  float softcap = 0.0f;  // 0: off; else s = softcap * tanh(s / softcap)
};

// Reused between calls so that decoding allocates nothing once warm. Fields belong to attend().
struct AttendScratch {
  struct Unit {
    int64_t rows, chunk_rows, chunks, chunk_bytes;
    int64_t q_at, partials_at;  // in `floats`
    int64_t pending;            // tasks not yet finished, counted down atomically
  };
  struct Task {
    int64_t unit, first_chunk, chunks;
    int64_t range, row;  // where the first chunk starts
  };
  // Units over heads with a middle, cut in two.
  struct Regions {
    struct Part {
      int64_t outside = 0, n_outside = 0, inside = 0, n_inside = 0;  // in the lists of ranges
      int64_t at = 0;                                                // in `floats`
    };
    std::vector<Part> parts;
    std::vector<AttendUnit> units;
    std::vector<RowRange> outside, inside;
    std::vector<float> floats, merge;
  };
  std::vector<Unit> units;
  std::vector<Task> tasks;
  std::vector<float> floats;
  Regions regions;
};

// Splits the rows of each unit in chunks fixed by its row count (never by thread count) and merges them in order: the
// same bits for any number of threads, for any cut of the same rows in ranges, and for a query head alone or in a
// group. Channels: 1 to 1024, in groups of 32 for q8_0 and q4_0. A row with NaN or infinite scores makes the output
// NaN, except that a score of -inf has no weight. Of a head with a middle, the rows inside and outside it are attended
// apart and merged.
void attend(std::span<const AttendUnit> units, const AttendParams& params, AttendScratch& scratch, ThreadPool& pool);

// Merges n partials of one query head in the given order: out[dim] and lse become the merged ones.
// outs: [n][dim], lses: [n]; an empty partial has lse = -inf. out may be the first of outs.
void merge_partials(const float* outs, const float* lses, int n, int64_t dim, float* out, float* lse);

// Scores only: dst[n_q][rows of ranges, concatenated] = scale * q.k (softcap and the row's bias applied). For checks
// and token selection.
void attend_scores(const AttendUnit& unit, const AttendParams& params, float* dst, ThreadPool& pool);

}  // namespace longkv
