// Choosing tokens by mass on the card: of the tiles that choose_blocks() lists, the rows that hold a wanted share of
// each query head's softmax. Counterpart of kv/select/refine.cc for select=topp with refine=exact.
#pragma once

#include <cstdint>

#include "cuda/kv.h"
#include "cuda/select.h"

namespace longkv::card {

struct MassScratch {
  static constexpr int64_t kMostTiles = 1024;  // of a list

  float* weights = nullptr;   // [heads][stride][16]: logits, then shares of the softmax
  float* totals = nullptr;    // [kv_heads][stride][16]: sums over the query heads of a KV head
  uint32_t* marks = nullptr;  // [kv_heads][stride]: TileList::marks
  // Rows attended and tiles read so far, over all steps, layers and KV heads.
  unsigned long long* counters = nullptr;
  static int64_t bytes(int heads, int kv_heads, int64_t stride) {
    return 16 + (int64_t(heads) * 16 + int64_t(kv_heads) * 17) * stride * 4;
  }
  static MassScratch at(uint8_t* memory, int heads, int kv_heads, int64_t stride);
};

// Keeps of a list's tiles (tiles and count as choose_blocks() leaves them; list.stride <= kMostTiles) those with rows
// of the smallest sets of weights, largest first, that together with sinks and tail hold `p` of a query head's softmax,
// and marks these rows; a list has the union of its heads' sets, at most budget rows, the heaviest. a.q and a.kv: of
// the token.
Status choose_mass(const AttendArgs& a, const ChoiceRules& rules, int block, double p, const int64_t* position,
                   int32_t* tiles, int32_t* count, int64_t stride, const MassScratch& scratch, CardStreamHandle stream);

}  // namespace longkv::card
