// Reading prompts by columns, which every query of a head attends, and diagonals at given distances before each query:
// MInference's vertical-slash and A-shape (arXiv 2407.02490). Counterpart of prefill/sample.h, prefill/row_lists.h and
// prefill/assigned_pattern.cc.
//
// Columns and distances are sets of bits. What a block of 64 queries attends of the 64 rows k blocks before its own is
// one word that depends on k alone (but for a chunk's first and last block, which may have fewer queries), so a head's
// diagonals are spread to such words once per chunk; the attention kernel puts columns and words together as it goes.
#pragma once

#include <cstdint>

#include "cuda/kv.h"
#include "cuda/prompt_blocks.h"

namespace longkv::card {

// What a query head does.
enum class LineKind : int32_t { kLines, kAShape, kAll, kBlocks };
struct HeadLines {
  LineKind kind = LineKind::kAll;
  int64_t first = 0;   // kLines: columns; kAShape: sinks; kBlocks: blocks
  int64_t second = 0;  // kLines: diagonals; kAShape: window
};

struct PromptLines {
  uint64_t* columns = nullptr;    // [heads][words], bit i of word w: row 64 w + i
  uint64_t* distances = nullptr;  // [heads][words]
  uint64_t* spread = nullptr;     // [heads][3][words]: spread_word() of the first block of queries, of whole ones, of
                                  // the last
  int64_t words = 0;
};

// Queries of a chunk by blocks: which rows of block `block` (by position / 64) are queries.
struct LineQueries {
  int64_t first = 0, n = 0;
  LONGKV_ON_BOTH int64_t first_block() const { return first / kPromptBlock; }
  LONGKV_ON_BOTH int64_t last_block() const { return (first + n - 1) / kPromptBlock; }
  LONGKV_ON_BOTH int from(int64_t block) const {
    return block == first_block() ? static_cast<int>(first % kPromptBlock) : 0;
  }
  LONGKV_ON_BOTH int to(int64_t block) const {
    return block == last_block() ? static_cast<int>((first + n - 1) % kPromptBlock) + 1 : kPromptBlock;
  }
  // Which words of `spread` the block uses, and the block that such words are made for.
  LONGKV_ON_BOTH int kind(int64_t block) const { return block == first_block() ? 0 : block == last_block() ? 2 : 1; }
  LONGKV_ON_BOTH int kind_from(int kind) const { return kind == 0 ? from(first_block()) : 0; }
  LONGKV_ON_BOTH int kind_to(int kind) const {
    return kind == 2 || (kind == 0 && first_block() == last_block()) ? to(last_block()) : kPromptBlock;
  }
};

LONGKV_ON_BOTH inline uint64_t bits_below(int n) { return n >= 64 ? ~uint64_t(0) : (uint64_t(1) << n) - 1; }

// Rows of the block k before that of queries [from, to) which lie at a chosen distance before one of them. nearer, at:
// words k - 1 and k of the distances; nearer is 0 for k = 0.
LONGKV_ON_BOTH inline uint64_t spread_word(uint64_t nearer, uint64_t at, int from, int to) {
  const uint64_t taken = bits_below(to - from);
  uint64_t word = 0;
  for (int i = 0; i < 64; ++i) {
    // Query j is 64 k + j - i before row i: bits 64 + j - i of the two words.
    const int begin = 64 + from - i;  // 1 to 127
    const uint64_t bits = begin < 64 ? nearer >> begin | at << (64 - begin) : at >> (begin - 64);
    if ((bits & taken) != 0) word |= uint64_t(1) << i;
  }
  return word;
}

// What queries [from, to) of a block attend of its own rows: each at least itself.
LONGKV_ON_BOTH inline uint64_t own_word(uint64_t listed, int from, int to) {
  return (listed | ~bits_below(from)) & bits_below(to);
}

// Sets [begin, end) among the 64 bits of word w.
LONGKV_ON_BOTH inline uint64_t range_word(int64_t w, int64_t begin, int64_t end) {
  const int64_t from = begin - w * 64, to = end - w * 64;
  if (to <= 0 || from >= 64 || from >= to) return 0;
  return bits_below(static_cast<int>(to < 64 ? to : 64)) & ~bits_below(static_cast<int>(from > 0 ? from : 0));
}

// The chunk's last queries ([n][heads][dim] halves), those of a head together: sample[heads][queries][dim].
Status gather_sample(const half_t* q, int heads, int dim, int64_t n, int queries, half_t* sample,
                     CardStreamHandle stream);

// Softmax mass of sampled queries by column and by distance. scores: products of query and key, [heads][queries]
// [stride], query i of a head at row `row` + i. stats: scratch, [heads][queries][2].
struct SampleScores {
  const float* scores = nullptr;
  int64_t stride = 0;
  int heads = 0, queries = 0;
  int64_t row = 0;  // of the first query
  float scale = 0.0f, softcap = 0.0f;
  LONGKV_ON_BOTH int64_t rows() const { return row + queries; }
};
// columns, distances: [heads][stride], of which the first rows() are written.
Status sample_mass(const SampleScores& s, float* stats, float* columns, float* distances, CardStreamHandle stream);

// Empty sets for heads of kind kLines, whole ones for kAShape and kAll. patterns: [query heads], on the card, as the
// heads' ids are.
Status begin_lines(const PromptHeads& heads, const HeadLines* patterns, const PromptLines& lines,
                   CardStreamHandle stream);
// Adds the best columns and distances of rows [0, rows) to the sets of heads of kind kLines.
Status choose_lines(const float* columns, const float* distances, int64_t stride, int64_t rows,
                    const PromptHeads& heads, const HeadLines* patterns, const PromptLines& lines,
                    CardStreamHandle stream);
// From the distances, for queries [first, first + n).
Status spread_lines(const PromptHeads& heads, const LineQueries& queries, const PromptLines& lines,
                    CardStreamHandle stream);
// As attend_prompt(), over the lines of the heads; a.window must be 0. pairs: as of attend_prompt_listed().
Status attend_prompt_lines(const AttendArgs& a, const PromptHeads& heads, const PromptLines& lines, int64_t first,
                           int64_t n, half_t* out, unsigned long long* pairs, CardStreamHandle stream);

}  // namespace longkv::card
