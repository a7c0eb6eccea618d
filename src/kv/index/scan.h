// Scans over tiles of block summaries.
//
// A tile holds the summary vectors of kTileBlocks consecutive blocks, transposed: [slot][channel][block in tile], f16.
// One vector lane is one block, so a score needs no sum across lanes and every query head of a group uses what was
// loaded once.
#pragma once

#include <cstdint>

#include "base/float16.h"

namespace longkv {

constexpr int64_t kTileBlocks = 16;

// How the slots of a block give a score.
enum class ScanRule {
  kMaxDot,  // max over slots of q.slot
  kBox,     // slot 0 upper, slot 1 lower bounds: sum over channels of max(q * upper, q * lower)
  kCentre,  // slot 0 centre, slot 1 width: q.centre + |q|.width
  kOwn,     // query head j: q.slot j
};

// q: [n_q][dim]; scores[j * stride + block], `tiles` whole tiles from `first`.
void scan_tiles(ScanRule rule, const f16_t* first, int64_t tiles, int slots, int64_t dim, const float* q, int n_q,
                float* scores, int64_t stride);

// One vector [dim] for each of one or two slots: scores[block] = a.slot 0 + b.slot 1. ahead: a tile to prefetch behind
// the last one, or nullptr.
void scan_folded(const f16_t* first, int64_t tiles, int slots, int64_t dim, const float* a, const float* b,
                 const f16_t* ahead, float* scores);

// scan_tiles with kCentre and tiles of 8-bit numbers: [2][channel][kTileBlocks] bytes, centres signed and widths not,
// then fp32 scales [2][kTileBlocks]. Where queries are rounded, an error of 0.52 of a step in every channel of
// `bound` scores is added, so that they stay bounds: at most max |q| / 65000 of the largest centre per channel.
constexpr int64_t scan8_tile_bytes(int64_t dim) { return 2 * kTileBlocks * (dim + int64_t(sizeof(float))); }
void scan8_tiles(const uint8_t* first, int64_t tiles, int64_t dim, const float* q, int n_q, bool bound, float* scores,
                 int64_t stride);
// scores[block] = a.centre + b.width; b is not negative and, of bounds, not less than |a|.
void scan8_folded(const uint8_t* first, int64_t tiles, int64_t dim, const float* a, const float* b, bool bound,
                  const uint8_t* ahead, float* scores);
namespace avx512vnni {
// dim: a multiple of 4, at most 1024, so that sums fit.
void scan8_tiles(const uint8_t* first, int64_t tiles, int64_t dim, const float* q, int n_q, bool bound, float* scores,
                 int64_t stride);
void scan8_folded(const uint8_t* first, int64_t tiles, int64_t dim, const float* a, const float* b, bool bound,
                  const uint8_t* ahead, float* scores);
}  // namespace avx512vnni

}  // namespace longkv
