// Attention over single rows that carry weights of their own.
#pragma once

#include <cstdint>
#include <span>

#include "kv/attend.h"
#include "kv/types.h"

namespace longkv {

// One query head over `rows`, row i counted exp(log_weight[i]) times: out [dim_v] and lse, -inf and zero without rows.
// q: [dim_k], not scaled.
void attend_weighted(const KvHeadView& kv, const float* q, const AttendParams& params, std::span<const int64_t> rows,
                     std::span<const float> log_weight, float* out, float* lse);

// Logits of `rows` for n_q heads, [n_q][rows]: scale, softcap and the rows' biases applied.
void score_rows(const KvHeadView& kv, const float* q, int n_q, const AttendParams& params,
                std::span<const int64_t> rows, float* logits);

// Merges the partial (other, other_lse) of one head into out, whose partial is (out, lse).
void merge_into(float* out, float lse, const float* other, float other_lse, int64_t dim);

}  // namespace longkv
