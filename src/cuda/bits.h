// One bit a channel and token as the index: signs of rotated keys with a magnitude per 32 channels. Counterpart of
// kv/index/bits.cc for index=bits with width 1 and the mass of a block's tokens as its score.
#pragma once

#include <cstdint>

#include "cuda/kv.h"
#include "cuda/select.h"

namespace longkv::card {

// Of one layer: tokens of all blocks, open ones too.
struct CardBits {
  static constexpr int kChunk = 64;  // tokens that are scanned together; their layout: bits_rows.cuh
  int block = 16;                    // tokens; a multiple of 16
  int64_t capacity = 0;              // blocks of a head
  int64_t tokens = 0;                // of a head, whole chunks
  bool rotate = true, unbiased = true;
  uint32_t* codes = nullptr;     // [kv_heads][tokens * dim / 32]
  half_t* magnitudes = nullptr;  // the same
  static int64_t tokens_of(int block, int64_t capacity) { return (capacity * block + kChunk - 1) / kChunk * kChunk; }
};
int64_t bits_bytes(int block, int kv_heads, int dim, int64_t capacity);
CardBits place_bits(int block, int kv_heads, int dim, int64_t capacity, bool rotate, bool unbiased, uint8_t* memory);

// Rows [first, first + n).
Status write_bits(const CardKv& kv, const CardBits& bits, int64_t first, int64_t n, CardStreamHandle stream);
// The row at *position (on the card).
Status write_bits_last(const CardKv& kv, const CardBits& bits, const int64_t* position, CardStreamHandle stream);
Status write_bits_last(const BlockStore& rows, const CardBits& bits, const int64_t* position, CardStreamHandle stream);

// scores[kv_heads][capacity] of the blocks that `rules` leave to choose from: the sum over a KV head's query heads of
// the share of each one's estimated softmax mass that the block has. scale: of the softmax.
struct BitsScratch {
  // Blocks of threads that a KV head's scan is cut into: with 8 heads as many as run at once on 132 multiprocessors.
  static constexpr int kParts = 66;
  float* masses = nullptr;   // [kv_heads][sets of four query heads][tokens / 16][4], in log 2
  float* partial = nullptr;  // [heads][parts][2]: largest, sum of exponentials below it
  static int64_t bytes(int heads, int kv_heads, int block, int64_t capacity);
  static BitsScratch at(uint8_t* memory, int heads);
};
Status score_bits(const half_t* q, int heads, const CardKv& kv, const CardBits& bits, const ChoiceRules& rules,
                  float scale, const int64_t* position, const BitsScratch& scratch, float* scores,
                  CardStreamHandle stream);

}  // namespace longkv::card
