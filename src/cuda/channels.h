// Kernels behind the quadratic of a mask of channels (grad/channel_gram.h). Queries are n of each KV head, fp32.
#pragma once

#include <cstdint>

#include "cuda/ops.h"

namespace longkv::card {

Status widen_halves(const half_t* x, int64_t n, float* out, CardStreamHandle stream);
// out[head][r][c] = k[head * step + r * dim + c] - mean[head][c]; mean nullptr: 0.
Status center_keys(const float* k, int64_t step, const float* mean, int kv_heads, int64_t rows, int dim, float* out,
                   CardStreamHandle stream);
// s [kv_heads * n][rows], what masked queries give centred keys, becomes the probability of each row, whose score is
// <q, mean> more.
Status channel_weights(const float* q, const float* mean, const float* lse, int kv_heads, int64_t n, int64_t rows,
                       int dim, float* s, CardStreamHandle stream);
// out[i][r][c] = p[i][r] * v[r][c] for n queries of one head.
Status weighted_values(const float* p, const float* v, int64_t n, int64_t rows, int dim, float* out,
                       CardStreamHandle stream);
// What Wo takes: y [kv_heads][tokens][dim_k + 1][group * dim_v] from c [kv_heads * n][dim_k][dim_v] and
// m [kv_heads * n][dim_k], n = tokens * group:  q_i (c_ij - m_i out_j), and in the last row `away`.
struct ChannelOutputs {
  int kv_heads = 0, group = 0, dim_k = 0, dim_v = 0;
  int64_t tokens = 0;
  const float *c = nullptr, *m = nullptr, *q = nullptr, *out = nullptr, *away = nullptr;
};
Status channel_outputs(const ChannelOutputs& o, float* y, CardStreamHandle stream);

}  // namespace longkv::card
