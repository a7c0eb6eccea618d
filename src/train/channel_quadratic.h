// What dropping channels of old keys costs, to second order and without training: LeanK's mask linearised at alpha = 1.
//
// With delta = 1 - alpha, P the teacher's probabilities and O* its output, for row t and query head g
//   C_tgc = sum over old j of P_j k_jc v_j  -  (sum over old j of P_j k_jc) O*_tg,
//   dO_tg ~ -scale * sum_c delta_c q_tgc C_tgc,
// the loss of a KV head in its layer, relative to the residual stream's mean square rms2, is delta^T H delta with
//   H[c][c'] = scale^2 / (T * dim * rms2) * sum_t < sum_g q_tgc Wo_g C_tgc , sum_g q_tgc' Wo_g C_tgc' >.
// Terms between heads are left out.
#pragma once

#include <vector>

#include "ops/weight.h"
#include "train/chunk_attention.h"

namespace longkv {

// Adds rows `rows` of the teacher's chunk to h: [kv_heads][dim_k][dim_k], not yet divided by T * dim * rms2.
// out, lse: of attend_chunk for the same `a` with all rows dense. wo: [dim][query heads * dim_v].
void add_channel_quadratic(const ChunkAttention& a, RowRange middle, const float* out, const float* lse,
                           const Weight& wo, const std::vector<int64_t>& rows, double* h, ThreadPool& pool);

// Drops channel after channel, always the one that raises delta^T H delta least. loss[i]: of keeping i * align
// channels, [dim_k / align + 1]; order: the channels in the order they were dropped.
void eliminate_channels(const double* h, int64_t dim_k, int64_t align, double* loss, std::vector<int>& order);

}  // namespace longkv
