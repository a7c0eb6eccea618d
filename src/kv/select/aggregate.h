// One score per block from the scores of all query heads that share a list.
#pragma once

#include <cstdint>

#include "kv/recipe.h"

namespace longkv {

// scores: [heads] rows of n values, row j at scores + j * stride; overwritten where a kind needs it. out: [n], may be
// row 0. NaN counts as -inf, infinities as the largest finite numbers. Returns whether there was a NaN.
// kSoftmaxSum: out[b] = sum_j exp(scale * s_jb) / sum_b' exp(scale * s_jb'), the share of mass that head j expects in
// b.
bool aggregate_scores(Aggregate kind, float* scores, int64_t stride, int heads, int64_t n, float scale, float* out);

}  // namespace longkv
