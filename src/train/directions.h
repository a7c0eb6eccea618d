// Directions instead of channels: an old key is held as its products with n vectors, and a query meets it through n
// others, so that <q, k> becomes <queries q, keys k>. What RoPE, biases and unequal channels spread over all channels
// of a head gathers in few directions; bytes of a row are those of n channels.
//
// With S the square root of the queries' second moment and C the keys' covariance, the n pairs that lose least of the
// scores' squares, E (q^T (1 - queries^T keys) k)^2, come from the leading eigenvectors u of S C S:
// keys = u^T S and queries = u^T S^-1. Each pair is scaled so that both products have the same mean square. Queries
// that were not seen must not meet the inverse of what the seen ones lack: `ridge` times their mean square is added to
// every direction of the moment.
#pragma once

#include <cstdint>
#include <vector>

#include "base/threads.h"
#include "grad/chunk_attention.h"
#include "grad/chunk_ops.h"
#include "longkv/status.h"
#include "ops/weight.h"

namespace longkv {

// Of one KV head over what was read, [dim_k][dim_k]: sums over queries of q q^T, over old keys of the same about their
// mean in each document.
struct HeadMoments {
  std::vector<double> queries, keys;
  double query_rows = 0, key_rows = 0;
};

// Adds queries of `rows` of a chunk to moments[kv_heads], and old keys where `with_keys`.
void add_moments(const ChunkAttention& a, const std::vector<int64_t>& rows, bool with_keys, HeadMoments* moments,
                 ThreadPool& pool);

struct Directions {
  std::vector<float> keys, queries;  // [dim_k][dim_k], those that matter most first
};
Directions best_directions(const HeadMoments& moments, int64_t dim, double ridge);

// mix[dim][dim] = queries^T keys of n directions.
void mix_of_directions(const float* queries, const float* keys, int64_t n, int64_t dim, float* mix);
// Gradients of both from that of mix; added to.
void directions_backward(const float* queries, const float* keys, int64_t n, int64_t dim, const float* dmix,
                         float* dqueries, float* dkeys);

// losses[kv_heads] += weight * sum over `rows` of |sum over the head's queries g of Wo_g (out - teacher_out)|^2. Both:
// [tokens][query heads][dim_v]; wo: [dim][query heads * dim_v].
Status add_output_losses(const ChunkAttention& a, const float* out, const float* teacher_out, const Weight& wo,
                         const std::vector<int64_t>& rows, double weight, double* losses, ChunkOps& ops);

}  // namespace longkv
