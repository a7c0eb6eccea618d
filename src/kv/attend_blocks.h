// Decode attention over rows in blocks of 32 (kivi2, kivi4), on the encoded form.
//
// Scores: the scales of a block's channels are folded into the query, s_t = sum_c (q_c scale_c) code_tc +
// sum_c q_c min_c. Values: those of a row into its weight, out_c = sum_t (p_t scale_t) code_tc + sum_t p_t min_t.
// Where the CPU has integer products, folded queries are rounded to int8 (one scale per head and block: error of a
// channel at most 1 / 254 of the largest) and folded weights to int16 (1 / 65534 of the largest; with VNNI 1 / 131070);
// sums are exact.
#pragma once

#include <cstdint>

#include "kv/attend_kernel.h"
#include "kv/types.h"

namespace longkv {

// As attend_run() and score_run() for views whose types are blocked: kv.k and kv.v point to blocks, strides are those
// of blocks, rows are counted from the first block's.
void attend_blocks_run(const AttendRun& run);
void score_blocks_run(const AttendRun& run, float* dst, int64_t dst_stride);

// Blocks whose products are formed side by side: each step of one waits for the step before.
inline constexpr int kBlocksAtOnce = 2;

// The products of a block for `heads` (1 to 4) query heads.
struct BlockKeys {
  KvType type = KvType::kKivi2;
  const uint8_t* block = nullptr;
  int64_t dim = 0;
  const float* q = nullptr;  // [heads][q_stride]
  int64_t q_stride = 0;
  int heads = 0;
  float* s = nullptr;  // [heads][s_stride], 32 each
  int64_t s_stride = 0;
  const uint8_t* ahead = nullptr;  // a block to prefetch meanwhile, or nullptr
  int64_t ahead_bytes = 0;
};
struct BlockValues {
  KvType type = KvType::kKivi2;
  const uint8_t* block = nullptr;
  int64_t dim = 0;
  const float* p = nullptr;  // [heads][p_stride], 32 each; rows of weight 0 do not count, whatever they hold
  int64_t p_stride = 0;
  int heads = 0;
  float* sums = nullptr;  // [heads][stride], added to
  int64_t stride = 0;
  const uint8_t* ahead = nullptr;
  int64_t ahead_bytes = 0;
};

// `n` <= kBlocksAtOnce blocks of the same type, channels and heads.
namespace avx2 {
void block_key_products(const BlockKeys* b, int n);
void block_value_products(const BlockValues* b, int n);
}  // namespace avx2
namespace avx512vnni {
void block_key_products(const BlockKeys* b, int n);
void block_value_products(const BlockValues* b, int n);
}  // namespace avx512vnni

}  // namespace longkv
