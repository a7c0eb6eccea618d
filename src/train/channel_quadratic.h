// What dropping channels of old keys costs, to second order and without training: LeanK's mask linearised where some
// channels are dropped already.
//
// With delta = 1 for channels dropped in addition, P the probabilities and O the output under the present mask, for row
// t and query head g
//   C_tgc = sum over old j of P_j k_jc v_j  -  (sum over old j of P_j k_jc) O_tg,
//   dO_tg ~ -scale * sum_c delta_c q_tgc C_tgc.
// With z_tc = scale * sum_g q_tgc Wo_g C_tgc and e_t = sum_g Wo_g (O_tg - O*_tg), O* the teacher's, the loss of a KV
// head in its layer is  sum_t |e_t - sum_c delta_c z_tc|^2 = base - 2 linear . delta + delta^T H delta. Terms between
// heads are left out. The approximation holds near the mask that it was taken at, so it is taken anew after every few
// channels.
#pragma once

#include <vector>

#include "grad/chunk_attention.h"
#include "ops/weight.h"

namespace longkv {

// Of one KV head.
struct ChannelQuadratic {
  std::vector<double> h;       // [dim_k][dim_k]
  std::vector<double> linear;  // [dim_k]
  double base = 0;
};

// Adds rows `rows` of a chunk, each weighted by `weight`, to quadratics[kv_heads]. mask: [kv_heads][dim_k], 0 or 1, the
// present one, which `a` has as mix; out and lse are what attend_chunk gives for it, teacher_out what it gives without
// a mask. Where the mean of old keys makes up for dropped channels, k_jc above is its distance from the mean. wo:
// [dim][query heads * dim_v].
void add_channel_quadratic(const ChunkAttention& a, const float* mask, const float* out, const float* lse,
                           const float* teacher_out, const Weight& wo, const std::vector<int64_t>& rows, double weight,
                           ChannelQuadratic* quadratics, ThreadPool& pool);

// Drops `n` channels of those that `kept` marks, always the one that raises the loss least, unmarks them and appends
// them to `order`. Returns the loss reached.
double eliminate_channels(const ChannelQuadratic& q, int64_t n, std::vector<bool>& kept, std::vector<int>& order);

}  // namespace longkv
