// Choosing blocks of rows on the card: summaries, scores, top-k. Counterpart of kv/index and kv/select; the rules of a
// choice (sinks, tail, budget) are those of kv/select/selector.h.
#pragma once

#include <cstdint>

#include "cuda/kv.h"

namespace longkv::card {

enum class SummaryKind { kMean, kBox, kBox8 };

// Summaries of one layer's full blocks: [kv_heads][capacity][1 or 2][dim]. kMean: mean key in halves; kBox: middle and
// half width of the block's box in halves, so that the score q . middle + |q| . width bounds q . key; kBox8: the same
// in signed and unsigned bytes with a scale each.
struct CardSummaries {
  SummaryKind kind = SummaryKind::kBox;
  int block = 16;        // rows; a multiple of 16
  int64_t capacity = 0;  // blocks
  half_t* data = nullptr;
  float* scales = nullptr;  // kBox8: [kv_heads][capacity][2]
};
int64_t summary_bytes(SummaryKind kind, int kv_heads, int dim, int64_t blocks);
CardSummaries place_summaries(SummaryKind kind, int block, int kv_heads, int dim, int64_t capacity, uint8_t* memory);

// Blocks [first, first + n), which are full.
Status summarize(const CardKv& kv, const CardSummaries& s, int64_t first, int64_t n, CardStreamHandle stream);
// The block that the row at *position (on the card) completes, if it does.
Status summarize_last(const CardKv& kv, const CardSummaries& s, const int64_t* position, CardStreamHandle stream);
Status summarize_last(const BlockStore& rows, const CardSummaries& s, const int64_t* position, CardStreamHandle stream);

// Of a two-level index: coarse blocks of `factor` blocks whose blocks are candidates, ascending, and all blocks that no
// complete coarse block covers. A count of -1: every block is a candidate.
struct Candidates {
  int factor = 0;                   // 0: one level
  const int32_t* coarse = nullptr;  // [kv_heads][stride]
  const int32_t* count = nullptr;   // [kv_heads]
  int64_t stride = 0;
};
struct ChoiceRules {
  int64_t budget = 0, sink = 0, local = 0;
  bool shared = false;  // one list for all KV heads
  bool max = false;     // a block scores as its best query head, not as their sum
  Candidates among = {};
  int64_t blocks = 0;  // above 0: so many are chosen however few rows there are; tokens of them follow (mass.h)
  // Tiles that a list may need.
  int64_t tiles(int block) const {
    return ((blocks > 0 ? blocks * block : budget) + sink + local) / 16 + 3 * (block / 16) + 6;
  }
};

// Scores of blocks lie in memory of score_bytes(): [kv_heads][capacity] floats, then tops[kv_heads][top_count()], the
// largest of every kTopRun neighbouring scores of a list as a key (radix.cuh). The choice looks at the scores of few
// runs, those whose tops say that they can matter.
inline constexpr int kTopRun = 16;
LONGKV_ON_BOTH inline int64_t top_count(int64_t capacity) { return (capacity + kTopRun - 1) / kTopRun; }
inline int64_t score_bytes(int kv_heads, int64_t capacity) { return kv_heads * (capacity + top_count(capacity)) * 4; }
inline uint32_t* score_tops(float* scores, int kv_heads, int64_t capacity) {
  return reinterpret_cast<uint32_t*>(scores + kv_heads * capacity);
}

// Whether tops are looked at: those that what scored has left (score_bits(); of lists that are not shared), those that
// the choice makes, or none, where a list has at most kFewBlocks candidates.
enum class Tops { kLeft, kMade, kNone };
inline constexpr int64_t kFewBlocks = 8192;

// scores[kv_heads][s.capacity] of the full blocks before *position, then lists for attend_token(): tiles and count as
// in TileList. q: [heads][dim] halves, as append_rows() leaves them. A shared list takes the place of the first KV
// head's scores.
Status score_blocks(const half_t* q, int heads, const CardKv& kv, const CardSummaries& s, const ChoiceRules& rules,
                    const int64_t* position, float* scores, CardStreamHandle stream);
Status choose_blocks(float* scores, Tops made, int kv_heads, const CardSummaries& s, const ChoiceRules& rules,
                     const int64_t* position, int32_t* tiles, int32_t* count, int64_t stride, CardStreamHandle stream);

// The coarse blocks whose blocks are to be scored: as many as bytes of the index allow (rule: kv/select/coarse.h), from
// scores of score_blocks() under rules without candidates. Only the first list is written under shared rules.
struct CoarseLimits {
  int64_t index_bytes = 0;                                   // that scoring one KV head may read
  int64_t block_bytes = 0, coarse_bytes = 0;                 // of one summary
  int block = 0;                                             // rows
  int64_t most(const ChoiceRules& rules, int factor) const;  // coarse blocks that a list may need
};
Status choose_coarse(float* scores, int kv_heads, const CardSummaries& coarse, const ChoiceRules& rules,
                     const CoarseLimits& limits, const int64_t* position, int32_t* list, int32_t* count, int64_t stride,
                     CardStreamHandle stream);

}  // namespace longkv::card
