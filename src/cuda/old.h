// Older rows of a layer in an encoded form: counterpart of kv/region_store.h.
//
//   rows of a head   [0, sink) as they came | [sink, end) encoded | [end, rows) as they came
//
// Rows as they came lie in a CardKv with a ring, in f16. The middle is a sequence of steps of 32 rows; `sink` is a
// multiple of 16, so that a tile of 16 rows is either encoded or not. Of a step:
//   K  f16    [32][kept] halves
//      kivi   codes [32][kept], then scales [kept] and minima [kept], halves: one of each per channel
//      codes: kivi4: 32 bits for 8 channels, channel 2 i in bits 4 i and channel 2 i + 1 in bits 16 + 4 i; kivi2: 16
//      bits for 8 channels, channel 2 i in bits 2 i and channel 2 i + 1 in bits 8 + 2 i
//   V  f16    [32][dim] halves
//      kivi   two tiles of 16 rows of codes, then for each tile scales [row pair 8][dim / 32][row of the pair 2] and
//             minima in the same order, halves. Codes lie as a warp's lanes take them (attend_codes.cu): lane
//             4 g + c has rows 2 c, 2 c + 1, 2 c + 8 and 2 c + 9, and of every 32 channels 4 g to 4 g + 3. A word has
//             two neighbouring rows, one in its upper half, and four channels of one (kivi4) or two (kivi2) groups
//             of 32; where: OldFormat::value_place() in old_rows.cuh
// Grids and codes are those of kv/codec/kivi.h, their order apart.
#pragma once

#include <cstdint>

#include "cuda/kv.h"

namespace longkv::card {

inline constexpr int64_t kOldStep = 32;  // rows

// One KV head. Pointers are to the card's memory.
struct OldHead {
  uint8_t* k = nullptr;
  uint8_t* v = nullptr;
  int kept = 0;                       // numbers held of a K row, a multiple of 32; 0: of these rows only means are left
  int channels = 0;                   // of them channels, the others are 0
  const uint16_t* channel = nullptr;  // [channels], ascending; nullptr: all
  const float* alpha = nullptr;       // [channels], multiplies K (folded into queries); nullptr: 1
  double* sums = nullptr;             // [2][dim] of raw keys and values; nullptr: no means are wanted
  float* mean_k = nullptr;            // [dim], what the middle's keys lack on average; nullptr: nothing is added
  float* mean_v = nullptr;            // [dim], kept 0 only; nullptr there: the rows count for nothing
  float score = 0.0f;                 // kept 0: added to that of mean_k
};

// One layer.
struct CardOld {
  KvType type = KvType::kF16;  // of K and V: f16, kivi2, kivi4
  int kv_heads = 0;
  int dim = 0;
  int64_t sink = 0, window = 0;
  const int64_t* end = nullptr;    // on the card
  const OldHead* heads = nullptr;  // [kv_heads], on the card
};
// Where the middle of `rows` rows ends.
LONGKV_ON_BOTH inline int64_t old_end(int64_t rows, int64_t sink, int64_t window) {
  const int64_t old = rows - sink - window;
  return sink + (old > 0 ? old / kOldStep * kOldStep : 0);
}
bool card_old_supports(KvType type, int dim);
// Rows that came last and are not encoded yet, with a step more for rows that are cut off; steps of a middle; numbers
// that a row of so many channels takes.
inline int64_t old_ring(int64_t window) { return (window + 3 * kOldStep - 1) / kOldStep * kOldStep; }
inline int64_t old_steps(int64_t capacity, int64_t sink) {
  return capacity > sink ? (capacity - sink) / kOldStep + 1 : 1;
}
inline int old_kept(int64_t channels) { return int((channels + 31) / 32 * 32); }
// Bytes of K of a step with `kept` numbers a row, or of V with dim channels.
LONGKV_ON_BOTH constexpr int64_t old_step_bytes(KvType type, int64_t width) {
  return type == KvType::kF16 ? 64 * width : (type == KvType::kKivi2 ? 12 : 20) * width;
}

// Encodes rows [begin, end), whole steps, from `rows`.
Status encode_old(const CardOld& old, const CardKv& rows, int64_t begin, int64_t end, CardStreamHandle stream);
// Rows [begin, end) to the same rows of `to` (f16): encoded ones as they read back, the others from `rows`.
Status read_old(const CardOld& old, const CardKv& rows, int64_t begin, int64_t end, int64_t old_end, const CardKv& to,
                CardStreamHandle stream);
// Rows [begin, end) from one place to another, both f16 of the same heads.
Status copy_rows(const CardKv& from, int64_t begin, int64_t end, const CardKv& to, CardStreamHandle stream);

// Means: what was summed grows by rows [begin, end) of `rows`; or of `had` rows only `left` are left.
Status add_means(const CardOld& old, const CardKv& rows, int64_t begin, int64_t end, CardStreamHandle stream);
Status cut_means(const CardOld& old, int64_t had, int64_t left, CardStreamHandle stream);

// --- one decoded token
struct OldLayer {
  CardKv rows;
  CardOld old;
};
// The step that the row at *position completes, of every layer [layers] (on the card).
Status encode_last(const OldLayer* layers, int count, int kv_heads, KvType type, bool means, const int64_t* position,
                   CardStreamHandle stream);
// Queries as the middle's keys meet them, [heads][dim] halves, and what is added to their scores, [heads].
Status gather_queries(const half_t* q, int heads, const CardOld& old, float scale, half_t* to, float* shift,
                      CardStreamHandle stream);
// Attention over the middle's rows; list.tiles nullptr: all; tiles are neither marked nor placed. q: gathered, where
// heads keep some channels; shift nullptr: nothing is added.
struct AttendOldArgs {
  const half_t* q = nullptr;
  const float* shift = nullptr;
  int heads = 0;
  CardOld old;
  float scale = 0.0f;
  float softcap = 0.0f;
};
Status attend_old(const AttendOldArgs& a, const TileList& list, const DecodeScratch& scratch, CardStreamHandle stream);

}  // namespace longkv::card
