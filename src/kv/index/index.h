// Summaries of blocks of keys, scored against the current query.
//
// An index belongs to one layer and covers all its KV heads. It reads keys as they are stored (after the codec), so an
// index built row by row equals one rebuilt from the cache, bit for bit.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "kv/recipe.h"
#include "kv/state.h"
#include "kv/types.h"
#include "longkv/status.h"

namespace longkv {

class BlockIndex {
 public:
  virtual ~BlockIndex() = default;

  // Takes note of rows [begin, end) of a head, in ascending order without gaps. Called after the cache holds them.
  virtual void append(int kv_head, const KvHeadView& keys, int64_t begin, int64_t end) = 0;
  // Attention mass received by rows [0, rows) from the last queries of the prompt: mass[query head of the group][rows],
  // row stride `stride`. Kinds that do not use it ignore it.
  virtual void set_importance(int /*kv_head*/, const KvHeadView& /*keys*/, const float* /*mass*/, int64_t /*stride*/,
                              int64_t /*rows*/) {}
  // Queries of prompt tokens: n rows of n_q heads of the group, [n_q][dim_k] at q + i * stride. For kinds that choose
  // channels.
  virtual void observe_queries(int /*kv_head*/, const float* /*q*/, int /*n_q*/, int64_t /*n*/, int64_t /*stride*/) {}
  // The prompt is complete: kinds that need all of it index its rows now.
  virtual void finish_prompt(int /*kv_head*/, const KvHeadView& /*keys*/) {}
  // Rows at and after `rows` are gone; the block that becomes open again is rebuilt from the cache.
  virtual void truncate(int kv_head, const KvHeadView& keys, int64_t rows) = 0;

  // scores[j * stride + b - block_begin] for query heads j of the group and blocks [block_begin, block_end), the open
  // one included; larger = more mass expected. q: [n_q][dim_k]. In units of the unscaled dot product. A block's score
  // does not depend on the range that it is scored in. May be called from several threads at once.
  virtual void score(int kv_head, const float* q, int n_q, int64_t block_begin, int64_t block_end, float* scores,
                     int64_t stride) const = 0;

  // Kinds whose scores are linear in the query, or in its positive and its negative channels, score the sum over query
  // heads of score() at once: of the vectors [2][dim_k] that fold() makes of the queries. False: neither is there.
  // `ahead`: the block that will be scored next, to be brought closer meanwhile.
  struct Place {
    int kv_head = -1;  // -1: nowhere
    int64_t block = 0;
  };
  virtual bool adds_up() const { return false; }
  virtual void fold(const float* /*q*/, int /*n_q*/, float* /*folded*/) const {}
  virtual void score_folded(int /*kv_head*/, const float* /*folded*/, int64_t /*block_begin*/, int64_t /*block_end*/,
                            Place /*ahead*/, float* /*scores*/) const {}

  // Rows from here on are not indexed yet and have to be attended.
  virtual int64_t covered(int kv_head) const { return blocks(kv_head) > 0 ? int64_t{1} << 40 : 0; }
  // Blocks with at least one row.
  virtual int64_t blocks(int kv_head) const = 0;
  // Bytes that scoring n blocks of one KV head reads, and bytes held by the whole index.
  virtual int64_t bytes_scored(int64_t n) const = 0;
  virtual int64_t bytes_held() const = 0;

  // Saves or restores everything between two prompts; heads: [kv_heads], whose rows all are noted. Restoring goes into
  // a fresh index of the same kind, of any capacity.
  virtual void visit(KvState& state, std::span<const KvHeadView> heads) = 0;

 protected:
  // Tiles per head so that every head begins on a page: its tiles can then be mapped from a file.
  static int64_t paged_tiles(int64_t tiles, int64_t tile_bytes);
};

// Errors: kInvalidArgument (a kind that the shape cannot have).
Result<std::unique_ptr<BlockIndex>> make_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity_rows);

}  // namespace longkv
