// XAttention's estimate (arXiv 2503.16428) on the card: how much mass each block of 128 keys gets, from sums of scores
// along the antidiagonals of squares, and the fewest blocks that reach a share of it. Counterpart of
// prefill/antidiagonal.h and prefill/xattention_pattern.cc.
//
// `stride` neighbouring keys are one vector of stride * dim channels as they lie; queries become one in reverse order.
#pragma once

#include <cstdint>

#include "cuda/kv.h"
#include "cuda/prompt_blocks.h"

namespace longkv::card {

// Squares of a chunk's queries [first, first + n).
struct Squares {
  int stride = 16;  // 8 or 16
  int64_t first = 0, n = 0;
  LONGKV_ON_BOTH int64_t end() const { return first + n; }
  LONGKV_ON_BOTH int64_t first_square() const { return first / stride; }
  LONGKV_ON_BOTH int64_t count() const { return (end() - 1) / stride - first_square() + 1; }  // of queries
  LONGKV_ON_BOTH int64_t keys() const { return (end() - 1) / stride + 1; }                    // squares up to the end
  LONGKV_ON_BOTH int per_block() const { return kShareBlock / stride; }
  LONGKV_ON_BOTH int64_t first_block() const { return first / kShareBlock; }
  LONGKV_ON_BOTH int64_t query_blocks() const { return (end() - 1) / kShareBlock - first_block() + 1; }
  // Queries that square a of the chunk has.
  LONGKV_ON_BOTH int64_t queries(int64_t a) const {
    const int64_t begin = (first_square() + a) * stride, stop = begin + stride;
    return (stop < end() ? stop : end()) - (begin > first ? begin : first);
  }
  // Squares [from(b), to(b)) of the chunk lie in its block b.
  LONGKV_ON_BOTH int64_t from(int64_t b) const {
    const int64_t at = (first_block() + b) * per_block() - first_square();
    return at > 0 ? at : 0;
  }
  LONGKV_ON_BOTH int64_t to(int64_t b) const {
    const int64_t at = (first_block() + b + 1) * per_block() - first_square();
    return at < count() ? at : count();
  }
};

// Rows of kv (f16) from the chunk's end to that of its last square become 0, as missing keys count; nobody has written
// them yet.
Status clear_square(const CardKv& kv, const Squares& s, CardStreamHandle stream);
// Queries ([n][heads][dim] halves) by square, in reverse order, 0 where there is none:
// folded[heads][count][stride][dim] halves.
Status fold_queries(const half_t* q, int heads, int dim, const Squares& s, half_t* folded, CardStreamHandle stream);
// scores: products of folded queries and keys, [heads][count][stride of them]. shares[heads][query blocks]
// [shares_stride]: mean softmax share of the blocks of keys up to the query block's own. scale: of a score.
Status block_shares(const float* scores, int64_t scores_stride, int heads, const Squares& s, float scale, float* shares,
                    int64_t shares_stride, CardStreamHandle stream);

struct ShareRules {
  double share = 0.9;
  int64_t sinks = 1;  // first blocks, always attended
  int64_t least = 16;
};
// Ascending lists: sinks, the fewest blocks that reach the share with them and the own block, which ends the list.
Status choose_shares(const float* shares, int64_t stride, int heads, int64_t first, const ShareRules& rules,
                     const PromptLists& lists, CardStreamHandle stream);
// The query heads of each of kv_heads groups get the blocks of all of them.
Status unite_lists(int kv_heads, int group, const PromptLists& lists, CardStreamHandle stream);
constexpr int64_t kMostUnited = 131072;  // blocks of keys

}  // namespace longkv::card
