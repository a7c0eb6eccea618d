// Layout of the index of low-bit keys: tiles of 64 tokens, keys padded to groups of 32 bits: 32, 16 or 8 channels of 1,
// 2 or 4 bits. `bits` below are those of a key, channels times bits per channel.
//
//   codes       [groups * 4][64] bytes; byte (g * 4 + i, t): bits 32 g + 8 i .. + 7 of token t. One bit per channel:
//   set = not negative; else a whole number c for the level c - 1.5 or c - 7.5
//   magnitudes  [groups][64] f16, the 32 even tokens before the 32 odd ones (bits_magnitude_at): the order in which
//   sums of byte pairs come out of a vector
//
// A key is approximated by magnitude * level, level 1 or -1 for one bit. A nibble of one, two or four channels selects
// one of 16 partial sums of the query; one byte shuffle serves a whole vector of tokens.
#pragma once

#include <cstdint>

#include "base/checked.h"
#include "base/float16.h"

namespace longkv {

constexpr int64_t kBitsTile = 64;
constexpr int64_t kBitsGroup = 32;
// Tokens whose scores one reduction takes together; blocks of a multiple are made of such units.
constexpr int64_t kBitsUnit = 16;
// Groups of the largest keys: of more the scans' sums would leave 16 bits.
constexpr int64_t kBitsMaxGroups = 32;

constexpr int64_t bits_groups(int64_t bits) { return ceil_div(bits, kBitsGroup); }
constexpr int64_t bits_code_bytes(int64_t bits) { return bits_groups(bits) * (kBitsGroup / 8); }
constexpr int64_t bits_token_bytes(int64_t bits) {
  return bits_code_bytes(bits) + bits_groups(bits) * int64_t(sizeof(f16_t));
}
constexpr int64_t bits_tile_bytes(int64_t bits) { return kBitsTile * bits_token_bytes(bits); }
constexpr int64_t bits_magnitude_at(int64_t t) { return t % 2 * (kBitsTile / 2) + t / 2; }

// A query head's tables for one group: 8 nibbles x 16 sums as bytes. A byte is round(sum / step) + kBitsBias with
// step = (largest sum of |q| over any nibble of the head) / kBitsBias, so four bytes add up without overflow and a
// group's dot product with the signs is off by at most 8 * step / 2.
constexpr int kBitsBias = 31;
constexpr int kBitsNibbles = 8;
struct BitsTables {
  alignas(64) uint8_t bytes[kBitsNibbles][16];
  float step;  // the same in all groups of a head; NaN for a query that is not finite
};

// How the tokens of a block give its score.
enum class BitsPool {
  kMass,  // root * ln(sum of exp(score / root)): the log of the block's softmax mass
  kMax,   // the largest score
};

// Fills the tables of `groups` groups from a rotated and zero-padded query. width: log2 of the bits per channel.
void bits_tables(const float* q, int64_t groups, int width, BitsTables* tables);

// scores[j * stride + t] ~ q_j . approximation of token t, for the tokens of consecutive tiles. tables: [n_q][groups].
// Sums are 16-bit numbers: beside the tables' error, each of up to 8 groups is off by at most step * (largest magnitude
// of the tile) / 15 from rounding magnitudes and two products, of up to 16 by twice and of more by four times that. A
// tile with a magnitude that is not finite is scored in fp32, so that such a token alone scores NaN or infinity.
void bits_scan_tiles(const uint8_t* tile, int64_t tiles, int64_t groups, const BitsTables* tables, int n_q,
                     float* scores, int64_t stride);

// scores[j * stride + u]: the pooled score of unit u (16 tokens) of `tiles` consecutive tiles. kMass uses an
// exponential of relative error below 6.2%, so a score is off by at most 0.062 * root more than its tokens are;
// tokens more than 15 binary orders below the best of their unit count as nothing.
void bits_scan_units(const uint8_t* tile, int64_t tiles, int64_t groups, const BitsTables* tables, int n_q,
                     BitsPool pool, float root, float* scores, int64_t stride);

// Scores of the blocks that `count` >= 1 consecutive scores make up, the last one perhaps open; NaN if one of them is.
void bits_block_scores(BitsPool pool, const float* scores, int64_t block, int64_t count, float root, float* out);

// Writes the codes and magnitudes of a rotated and zero-padded key of `dim` channels that count as token t of a tile;
// token 0 clears the magnitudes of the others. With `unbiased` a magnitude is
// |key|^2 over key.code, for which the expected estimate over random rotations is the dot product (RaBitQ, arXiv
// 2405.12497); without, the closest one for the codes, key.code over |code|^2 (one bit: the mean of |key|), whose
// estimates are 2 / pi of the products for one bit.
void bits_write_token(const float* key, int64_t dim, int width, bool unbiased, uint8_t* tile, int64_t t);
// Clears the magnitudes of tokens [first, 64): what a tile's scores are rounded by depends on none that is gone.
void bits_clear_tokens(int64_t bits, uint8_t* tile, int64_t first);

// In-place orthonormal Hadamard transform of each run of the largest power of two that divides dim.
void hadamard_rows(float* x, int64_t dim);

}  // namespace longkv
