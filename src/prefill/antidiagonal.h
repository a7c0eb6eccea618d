// XAttention's estimate (arXiv 2503.16428): how much mass each block of keys gets, from sums of scores along the
// antidiagonals of stride x stride squares.
//
// Keys are taken `stride` at a time as one vector of stride * dim channels, queries likewise in reverse order: a
// product of two such vectors is the sum of `stride` scores of one antidiagonal, to which every query and key of the
// square contributes once. So the estimate costs 1/stride of the scores.
#pragma once

#include <cstdint>
#include <vector>

#include "base/threads.h"
#include "kv/attend.h"
#include "kv/types.h"

namespace longkv {

struct AntidiagonalArgs {
  const float* q = nullptr;  // first query of the chunk, the group's first head; heads of a token are adjacent
  int64_t q_stride = 0;      // values from token to token
  int64_t queries = 0;
  int64_t row = 0;  // of the first query
  int group = 1;
  KvHeadView kv;
  float scale = 1;
  int64_t stride = 16;  // 8 or 16: whole panels of every target divide a block
  int64_t block = 128;
};

struct BlockShares {
  int64_t first_block = 0;    // of queries
  int64_t query_blocks = 0;   // that hold a query of the chunk
  int64_t key_blocks = 0;     // up to the chunk's end
  std::vector<float> shares;  // [group][query_blocks][key_blocks]: mean softmax share; 0 after the diagonal block

  std::vector<float> lse;      // scratch: [group][query squares][key_blocks], log2 of the sum of 2^score
  std::vector<float> queries;  // scratch: [group][query squares, padded][stride * dim]
};

// A square that the chunk or the cache fills only in part is scaled by the queries that it has; keys that are missing
// count as zero, which only the diagonal block can see. Shares of a block row add up to 1.
void antidiagonal_shares(const AntidiagonalArgs& args, ThreadPool& pool, BlockShares& out);

}  // namespace longkv
