// How a head's output would change if channels of its old keys were dropped, to first order, and how such changes meet
// in the residual stream: what a quadratic of the loss is made of (train/channel_quadratic.h).
//
// With P the probabilities and O the output under the present mask, for row t and query head g
//   C_tgc = sum over old j of P_j k_jc v_j  -  (sum over old j of P_j k_jc) O_tg,
//   z_tc = scale * sum_g q_tgc Wo_g C_tgc,    e_t = sum_g Wo_g (O_tg - O*_tg),
// O* the teacher's output. Where the mean of old keys makes up for dropped channels, k_jc is its distance from the
// mean.
#pragma once

#include <cstdint>
#include <span>

#include "base/threads.h"
#include "grad/chunk_attention.h"
#include "ops/weight.h"

namespace longkv {

struct ChannelGramInputs {
  const float* mask = nullptr;         // [kv_heads][dim_k], 0 or 1: the present one, which the attention has as mix
  const float* out = nullptr;          // [tokens][query heads][dim_v] under that mask
  const float* lse = nullptr;          // [tokens][query heads]
  const float* teacher_out = nullptr;  // as out, without a mask
  const Weight* wo = nullptr;          // [dim][query heads * dim_v]
  std::span<const int64_t> rows;       // of the chunk
};

// grams [kv_heads][dim_k + 1][dim_k + 1], set: sums over rows of the inner products of z_t0 ... z_t(dim_k - 1), e_t.
void channel_grams(const ChunkAttention& a, const ChannelGramInputs& in, double* grams, ThreadPool& pool);

}  // namespace longkv
