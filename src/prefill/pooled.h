// Means of blocks of keys and queries, and the mass that means give each other: the cheap estimates of block-sparse
// patterns.
#pragma once

#include <cstdint>
#include <vector>

#include "base/threads.h"
#include "kv/types.h"

namespace longkv {

// means: [blocks][dim_k] of rows [b * block, (b + 1) * block) that the head holds; the last block may be open, and a
// block without rows becomes zero.
void pool_keys(const KvHeadView& kv, int64_t rows, int64_t block, ThreadPool& pool, std::vector<float>& means);

// Mean of `n` queries of one head, q_stride values apart: [dim].
void pool_queries(const float* q, int64_t q_stride, int64_t n, int64_t dim, float* mean);

// shares[b] = softmax over b < blocks of scale * mean.keys[b].
void mean_shares(const float* mean, const float* keys, int64_t blocks, int64_t dim, float scale, float* shares);

}  // namespace longkv
