// One work item of prefill attention: a tile of queries of one KV head's group against all rows that they see.
//
// Keys are visited in tiles that begin at absolute multiples of `key_tile`, and the arithmetic of a query's row never
// depends on the rows beside it. So a query's bits do not depend on the chunk, the query tile or the thread it is in.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "kv/attend.h"
#include "kv/types.h"

namespace longkv {

// Rows of scores computed between two uses of the packed tiles: the scores stay in L1/L2.
constexpr int kScoreRows = 48;
// Widest panel of packed columns of any target: two AVX-512 vectors.
constexpr int kMaxPanel = 32;
constexpr int kMaxKeyTile = 256;

// Rows per key tile. A function of the channels only, since it fixes the order of summation; both packed tiles of it
// take at most 256 KiB for up to 128 channels each, half of a usual L2.
inline int64_t prefill_key_tile(int64_t dim_k, int64_t dim_v) { return dim_k + dim_v <= 256 ? kMaxKeyTile : 128; }

// Buffers of one worker, 64-byte aligned. `rows` = query rows (tokens x group) rounded up to kScoreRows.
struct TileScratch {
  float* q = nullptr;        // [rows][dim_k], scaled
  float* acc = nullptr;      // [rows][dim_v rounded up to kMaxPanel], not yet divided by the sum
  float* max = nullptr;      // [rows], running maximum in log2 units
  float* sum = nullptr;      // [rows], running sum of 2^(s - max)
  float* k = nullptr;        // [key_tile / panel][dim_k][panel]
  float* v = nullptr;        // [dim_v / panel][key_tile][panel]
  float* s = nullptr;        // [kScoreRows][key_tile + 16], scores, then probabilities
  float* decoded = nullptr;  // [kMaxPanel][max(dim_k, dim_v)], decoded rows before packing
  float* mass = nullptr;     // [group][key_tile], used by mass only
  float* bias = nullptr;     // [key_tile], in log2 units; used where rows have a bias
};

struct QueryTile {
  const KvHeadView* kv = nullptr;
  const float* q = nullptr;  // of the first token and the group's first head; heads of a token are adjacent
  int64_t q_stride = 0;      // values from token to token
  int64_t tokens = 0;
  int group = 1;
  int64_t position = 0;  // row of the first token: its position unless rows before it were evicted
  int64_t window = 0;
  // Rows that the tile's queries attend as far as they see them: ascending, disjoint, none outside [first row of kv,
  // last query]; every query sees at least one. Empty: all rows. Not read by mass_of_key_tile.
  std::span<const RowRange> listed;
  AttendParams params;
  const std::atomic<bool>* cancel = nullptr;
  float* row_max = nullptr;  // [tokens * group], optional in attend_query_tile: the final maximum ...
  float* row_sum = nullptr;  // ... and sum of each row, as mass_of_key_tile needs them
};

// out: of the first token and head, heads adjacent, out_stride values from token to token.
void attend_query_tile(const QueryTile& tile, const TileScratch& scratch, float* out, int64_t out_stride);

// Adds the softmax mass that keys [key_begin, key_begin + key_tile) receive from the tile's queries, token by token,
// to mass[head of the group][row]; needs row_max and row_sum. At most `max_rows` query rows are held at a time.
void mass_of_key_tile(const QueryTile& tile, int64_t key_begin, int64_t max_rows, const TileScratch& scratch,
                      float* mass, int64_t mass_stride);

}  // namespace longkv
