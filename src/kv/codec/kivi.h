// Asymmetric 2- and 4-bit storage of blocks of 32 rows (KIVI, arXiv 2402.02750): keys with one scale and minimum per
// channel and block, values with one per row and 32 channels. value = code * scale + minimum, both f16;
// scale = (max - min) / (2^bits - 1), codes rounded to nearest even. A group of equal values gets scale 0; one with a
// value that is not finite decodes to NaN.
//
// A block is 32 rows of `dim` channels (of keys a multiple of 8, of values of 32) in kivi_block_bytes: codes, then
// scales, then minima. Codes lie as the products read them, without unpacking to memory:
//   keys     32-bit words [dim / 4][vectors][8]: byte b of word w holds channel 4 * i + b; with 2 bits one vector, row
//            8 * j + w in bits 2j of the byte; with 4 bits two vectors v, row 16 * v + 8 * j + w in bits 4j.
//            scales [dim], minima [dim]
//   values   per group of 32 channels 32-bit words [vectors][8], half-words h: with 2 bits eight vectors u, channel
//            8 * i + w of row 4 * u + 2 * m + h in bits 2 * (4 * m + i) of the half-word; with 4 bits sixteen vectors,
//            row 2 * u + h in bits 4 * i. scales [dim / 32][32], minima [dim / 32][32]
#pragma once

#include <cstdint>

#include "kv/types.h"

namespace longkv {

inline constexpr int64_t kKiviRows = 32;     // rows of a block, and channels that share a value's scale
inline constexpr int64_t kKiviChannels = 8;  // keys have multiples of so many

constexpr int kivi_bits(KvType type) { return type == KvType::kKivi2 ? 2 : 4; }
constexpr int64_t kivi_block_bytes(KvType type, int64_t dim) { return dim * kKiviRows * kivi_bits(type) / 8 + dim * 4; }

// src: 32 rows of `dim` floats, src_stride floats apart.
void kivi_encode_keys(KvType type, const float* src, int64_t src_stride, int64_t dim, uint8_t* block);
void kivi_encode_values(KvType type, const float* src, int64_t src_stride, int64_t dim, uint8_t* block);
// Row `row` of a block, dst[dim].
void kivi_decode_key(KvType type, const uint8_t* block, int64_t row, int64_t dim, float* dst);
void kivi_decode_value(KvType type, const uint8_t* block, int64_t row, int64_t dim, float* dst);

}  // namespace longkv
