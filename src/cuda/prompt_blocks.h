// Block-sparse reading of prompts (MInference's block-sparse pattern, arXiv 2407.02490): each block of 64 queries of a
// head attends the blocks of 64 keys whose mean its own mean scores best. Counterpart of prefill/assigned_pattern.cc.
#pragma once

#include <cstdint>

#include "cuda/kv.h"
#include "prefill/sizes.h"

namespace longkv::card {

constexpr int kPromptBlock = kPooledBlock;

// Query heads that a call is for, on the card; ids nullptr: all.
struct PromptHeads {
  const int32_t* ids = nullptr;
  int count = 0;
};

// Blocks that the query blocks of a chunk attend, ascending; every list ends with the queries' own block.
struct PromptLists {
  int32_t* blocks = nullptr;  // [heads][query_blocks][most]
  int32_t* count = nullptr;   // [heads][query_blocks]
  int64_t query_blocks = 0;   // blocks at multiples of `block` positions that the chunk touches
  int64_t most = 0;
  int block = kPromptBlock;  // rows: 64 or 128
  PromptHeads heads = {};
};
inline int64_t prompt_blocks(int64_t first, int64_t n, int block = kPromptBlock) {
  return (first + n - 1) / block - first / block + 1;
}

// Means of the blocks that rows [first, first + n) of kv (f16) touch, over rows before first + n: [kv_heads][capacity]
// [dim] halves.
Status pool_keys(const CardKv& kv, int64_t first, int64_t n, int64_t capacity, half_t* means, CardStreamHandle stream);
// Means of a chunk's queries ([n][heads][dim] halves) by block: [heads][prompt_blocks()][dim] halves.
Status pool_queries(const half_t* q, int heads, int dim, int64_t first, int64_t n, half_t* means,
                    CardStreamHandle stream);
// scores: [heads][lists.query_blocks][stride], of which block b of queries reads the blocks up to its own. sizes: of a
// head's lists, on the card, lists.most or less; nullptr: lists.most.
Status choose_prompt_blocks(const float* scores, int64_t stride, int heads, int64_t first, const PromptLists& lists,
                            const int32_t* sizes, CardStreamHandle stream);
// As attend_prompt(), over the lists of queries [first, first + n); a.window must be 0. pairs: on the card, grows by
// the (query, key) pairs that were computed; nullptr: they are not counted.
Status attend_prompt_listed(const AttendArgs& a, const PromptLists& lists, int64_t first, int64_t n, half_t* out,
                            unsigned long long* pairs, CardStreamHandle stream);

}  // namespace longkv::card
