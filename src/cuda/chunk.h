// Kernels of learning: what surrounds the products of a chunk's forward and backward pass (grad/chunk_attention.h).
// Queries of a KV head lie together, [kv_heads][tokens * group][...], fp32. Sums run in a fixed order.
#pragma once

#include <cstdint>

#include "cuda/kv.h"

namespace longkv::card {

// Rows of x [rows][n] as two halves each: out[0][row] + out[1][row] = x / scale[row], but for 2^-22 of a row's largest
// value. Scales are powers of two. So products on tensor cores keep the digits of fp32.
Status split_rows(const float* x, int64_t rows, int64_t n, half_t* out, float* scale, CardStreamHandle stream);
// out[row] = scale[row] * (y[0][row] + y[1][row]) for y [2][rows][n].
Status join_rows(const float* y, const float* scale, int64_t rows, int64_t n, float* out, CardStreamHandle stream);

// What old rows are to a head.
enum class OldKind : int32_t {
  kMixed,     // keys times a matrix
  kMean,      // all of them at the score of the mean key
  kConstant,  // at `score`
  kNone,      // they do not exist
};
struct CardOldHead {
  OldKind kind = OldKind::kMixed;
  float score = 0.0f;
};

struct ChunkQueries {
  int kv_heads = 0;
  int group = 0;
  int64_t tokens = 0;
  int64_t first = 0;   // position of the first one
  int64_t window = 0;  // tokens that each sees, its own included; 0: all
  int dim_k = 0, dim_v = 0;
  const CardOldHead* heads = nullptr;  // [kv_heads]
  bool compensate = false;             // the mean key makes up for what mixed heads lose
  LONGKV_ON_BOTH int64_t of_head() const { return tokens * group; }
  LONGKV_ON_BOTH int64_t all() const { return kv_heads * of_head(); }
};

// mean[head][c] of rows [begin, end) of k [kv_heads][step values apart][dim].
Status mean_keys(const float* k, int64_t step, int kv_heads, int dim, int64_t begin, int64_t end, float* mean,
                 CardStreamHandle stream);
// What is added to a query's scores of old rows, [all], and zeros in place of `old` where keys are gone. full, old:
// [all][dim_k], as they meet keys and old keys.
Status old_shift(const ChunkQueries& q, const float* full, const float* mean, float* old, float* shift,
                 CardStreamHandle stream);

// Scores of n rows, [all][n], of which the first is at position `row`.
struct ChunkScores {
  float* s = nullptr;
  int64_t n = 0;
  int64_t row = 0;
  const float* shift = nullptr;  // old rows: [all]; nullptr: they are not old
};
// Replaces scores by weights relative to the largest score so far, and scales `sum` and out [all][dim_v] to it.
// `begins`: nothing came before; out is cleared.
Status chunk_softmax(const ChunkQueries& q, const ChunkScores& scores, bool begins, float* top, float* sum, float* out,
                     CardStreamHandle stream);
// out /= sum; lse = top + log(sum), in place of top.
Status chunk_finish(const ChunkQueries& q, float* top, const float* sum, float* out, CardStreamHandle stream);
// delta[i] = <dout[i], out[i]>.
Status row_products(const float* dout, const float* out, int64_t rows, int64_t n, float* delta,
                    CardStreamHandle stream);
// Replaces scores by weights p, and d [all][n], <dout, v>, by w = p * (d - delta), the gradient of the scores. Of old
// rows w is added up in `total` [all].
Status chunk_score_gradient(const ChunkQueries& q, const ChunkScores& scores, const float* lse, const float* delta,
                            float* d, float* total, CardStreamHandle stream);
// r [all][dim_k], sums over old rows of w * k, without what the mean takes; zeros where keys are gone.
Status old_gradient(const ChunkQueries& q, const float* mean, const float* total, float* r, CardStreamHandle stream);
// full += old + total * mean, times `scale`: the gradient of queries.
Status query_gradient(const ChunkQueries& q, const float* old, const float* mean, const float* total, float scale,
                      float* full, CardStreamHandle stream);

}  // namespace longkv::card
