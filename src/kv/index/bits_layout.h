// Layout of the one-bit key index: tiles of 64 tokens, channels padded to groups of 32.
//
//   signs       [groups * 4][64] bytes; byte (g * 4 + i, t): channels 32 g + 8 i .. + 7 of token t, bit set = not
//   negative magnitudes  [groups][64] f16: mean |key| over the group's channels
//
// A key is approximated by magnitude * sign, the closest such vector. Four channels are a nibble, which selects one of
// 16 partial sums of the query; one byte shuffle serves a whole vector of tokens.
#pragma once

#include <cstdint>

#include "base/checked.h"
#include "base/float16.h"

namespace longkv {

constexpr int64_t kBitsTile = 64;
constexpr int64_t kBitsGroup = 32;

constexpr int64_t bits_groups(int64_t dim) { return ceil_div(dim, kBitsGroup); }
constexpr int64_t bits_token_bytes(int64_t dim) { return bits_groups(dim) * (kBitsGroup / 8 + int64_t(sizeof(f16_t))); }
constexpr int64_t bits_tile_bytes(int64_t dim) { return kBitsTile * bits_token_bytes(dim); }

// A query head's tables for one group: 8 nibbles x 16 sums as bytes. A byte is round(sum / step) + kBitsBias with
// step = (largest sum of |q| over a nibble) / kBitsBias, so four bytes add up without overflow and a group's dot
// product with the signs is off by at most 8 * step / 2.
constexpr int kBitsBias = 31;
constexpr int kBitsNibbles = 8;
struct BitsTables {
  alignas(64) uint8_t bytes[kBitsNibbles][16];
  float step;
};

// Fills the tables of `groups` groups from a rotated and zero-padded query.
void bits_tables(const float* q, int64_t groups, BitsTables* tables);

// scores[j * stride + t] = q_j . approximation of token t, for the 64 tokens of a tile. tables: [n_q][groups].
void bits_scan_tile(const uint8_t* tile, int64_t groups, const BitsTables* tables, int n_q, float* scores,
                    int64_t stride);

// Scores of the blocks that `rows` >= 1 consecutive token scores make up, the last one perhaps open:
// out[b] = root * ln(sum over the block's tokens of exp(score / root)), NaN if one of them is.
void bits_block_scores(const float* scores, int64_t block, int64_t rows, float root, float* out);

// Writes the signs and magnitudes of a rotated key ([groups * 32], of which `dim` count) as token t of a tile.
void bits_write_token(const float* key, int64_t dim, uint8_t* tile, int64_t t);

// In-place orthonormal Hadamard transform of each run of the largest power of two that divides dim.
void hadamard_rows(float* x, int64_t dim);

}  // namespace longkv
