// Attention of a chunk of tokens behind a prompt that does not change, and its gradient.
//
// Keys and values of the prompt lie in a cache in fp32; those of the chunk are given. Rows [middle.begin, middle.end)
// of the prompt are "old": their keys count as a matrix leaves them (LeanK's scales are a diagonal one), or not at all
// (the streaming branch of DuoAttention). All other rows that a query sees count as they are, in one joint softmax:
//   s(t, j) = scale * <q_t, k_j>,  for old rows  scale * <q_t, mix k_j + (1 - mix) mean>,
// with the mean over old keys, or 0 where nothing makes up for what `mix` takes away.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/threads.h"
#include "kv/region_store.h"
#include "kv/types.h"

namespace longkv {

// Old rows of a head whose keys are gone altogether.
struct OldHead {
  bool removed = false;
  RemovedAs as = RemovedAs::kMean;
  float score = 0.0f;  // kConstant
};

struct ChunkAttention {
  int kv_heads = 0;
  int group = 0;  // query heads per KV head
  int dim_k = 0;
  int dim_v = 0;
  float scale = 1.0f;
  int64_t window = 0;              // tokens a query sees, its own included; 0 = all
  std::vector<KvHeadView> prompt;  // [kv_heads], fp32 rows, with their biases if they have any
  uint64_t prompt_id = 0;          // ChunkPrompt
  int layer = 0;
  int64_t held = 0;  // rows of each head that lie there, with those behind the chunk's position
  std::shared_ptr<const std::vector<float>> decoded;  // owns the rows that `prompt` points to where none hold fp32
  RowRange middle;                                    // of the prompt; empty: no old rows
  const float* mix = nullptr;                         // [kv_heads][dim_k][dim_k]; nullptr: identity
  bool compensate = false;                            // the mean of old keys makes up for what mix takes away
  std::span<const OldHead> heads;                     // [kv_heads]; empty: none is removed
  bool without_middle = false;                        // old rows do not exist
  int64_t tokens = 0;                                 // of the chunk
  const float* q = nullptr;                           // [tokens][kv_heads * group][dim_k], turned by RoPE
  const float* k = nullptr;                           // [tokens][kv_heads][dim_k]
  const float* v = nullptr;                           // [tokens][kv_heads][dim_v]
};

// Over rows of the middle, [dim_k].
std::vector<float> mean_of_old_keys(const ChunkAttention& a, int head);

// out: [tokens][query heads][dim_v], lse: [tokens][query heads].
void attend_chunk(const ChunkAttention& a, float* out, float* lse, ThreadPool& pool);

struct ChunkAttentionGradient {
  float* dq;    // [tokens][query heads][dim_k], set
  float* dk;    // [tokens][kv_heads][dim_k], set
  float* dv;    // [tokens][kv_heads][dim_v], set
  float* dmix;  // [kv_heads][dim_k][dim_k], added to; nullptr: not wanted
  // [kv_heads][prompt rows][dim_k], set: of the prompt's keys, where no row is old and heads have equally many;
  // nullptr: not wanted
  float* dprompt = nullptr;
};

// `out` and `lse` are those of attend_chunk, `dout` the gradient of `out`.
void attend_chunk_backward(const ChunkAttention& a, const float* out, const float* lse, const float* dout,
                           const ChunkAttentionGradient& gradient, ThreadPool& pool);

// Softmax mass that rows get from the chunk, summed over its queries: mass [query heads][prompt rows + tokens], set.
// Heads have equally many rows, none is old.
void chunk_mass(const ChunkAttention& a, const float* lse, float* mass, ThreadPool& pool);

}  // namespace longkv
