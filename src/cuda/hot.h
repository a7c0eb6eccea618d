// A cache on the card of the blocks that were attended lately, when all rows lie in memory (BlockStore), and the way of
// rows between the two. No step needs the CPU: the card looks a step's blocks up, reads those that are missing over the
// bus itself, and lets go of the blocks that were used longest ago.
#pragma once

#include <cstdint>

#include "cuda/kv.h"

namespace longkv::card {

// Of one layer. Each KV head has its own slots. All tables hold -1 when nothing is on the card.
struct HotBlocks {
  CardKv pool;                  // rows of the slots; capacity: slots * block
  int64_t slots = 0;            // of a head; at least as many as a step's list may name
  int32_t* slot_of = nullptr;   // [kv_heads][blocks], -1: not on the card
  int32_t* block_of = nullptr;  // [kv_heads][slots], -1: free
  int32_t* used = nullptr;      // [kv_heads][slots], step of the last use; -1: free
  int32_t* missing = nullptr;   // [kv_heads][slots][2]: block, slot; at 8 bytes; this and the next may serve all layers
  int32_t* count = nullptr;     // [kv_heads]
  unsigned long long* totals = nullptr;  // blocks found, blocks fetched, since the start
};
// Rows of `list` (as choose_blocks() leaves them) become places in hot.pool; blocks that are not there get a slot and
// are listed in `missing`. Then fetch_blocks() reads those. *step counts the decoded tokens.
Status place_blocks(const BlockStore& store, const HotBlocks& hot, int32_t* tiles, const int32_t* count, int64_t stride,
                    const int64_t* step, CardStreamHandle stream);
Status fetch_blocks(const BlockStore& store, const HotBlocks& hot, CardStreamHandle stream);

// Rows [first, first + n) from the card to memory. kv: of the store's type.
Status spill_rows(const CardKv& kv, const BlockStore& store, int64_t first, int64_t n, CardStreamHandle stream);
// Rows [0, n) from memory to the card as they read back; work: f16.
Status bring_rows(const BlockStore& store, int64_t n, const CardKv& work, CardStreamHandle stream);

}  // namespace longkv::card
