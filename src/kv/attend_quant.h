// Products of quantised rows with int16 and int8 multiply-adds, where the CPU has them, and of fp8 rows where it has
// VNNI; elsewhere the Highway kernels of attend_products-inl.h widen to fp32.
//
// Scores: the query is rounded once, to int16 with one scale per head for q8_0 keys (error of a channel at most
// amax / 65534) and to int8 with one scale per 32 channels for q4_0 keys (at most amax / 254 of the group). Sums of
// values: a tile's weights times row scales are rounded to int16, one scale per tile, head and group of 32 channels
// (error of a weight at most 1 / 65534 of the largest). All sums of products are exact in int32.
//
// fp8: codes are rounded to multiples of 2^-5, where a row's largest is 448: codes from 1/4 on lose nothing, others at
// most 2^-6 (of a row's largest 3.5e-5). Queries have a step per head, weights one per tile and head, small enough for
// 16 bits and large enough for sums in int32: 1/32767 of the largest, or 1/139000 of the largest sum of magnitudes, in
// queries over 16 of every 64 channels (up to 256 together), in weights over the tile. Rounding is by half a step.
// Codes 0x7f and 0xff, which nothing writes, count as 480 and -480 here as there; a row that is not finite has a scale
// that is NaN.
#pragma once

#include <cstdint>

#include "kv/types.h"

namespace longkv {

// Bytes of a prepared query head, a multiple of 4; of fp8 one of 64.
int64_t quant_query_bytes(KvType type, int64_t dim);
// True when the functions below exist for this type on this CPU at the active level.
bool has_quant_kernels(KvType type);

// One query head of `dim` channels (a multiple of 32 but for fp8), already multiplied by the softmax scale. A value
// that is not finite makes all scores NaN. fp8: `prepared` begins on a cache line.
void prepare_quant_query(KvType type, const float* q, int64_t dim, uint8_t* prepared);

// Rows to prefetch while others are multiplied: `near` into the nearest cache; what lies `far_offset` bytes behind each
// of them into the second, since the nearest has too few open requests to bring whole streams from memory.
struct AheadRows {
  const uint8_t* const* near = nullptr;
  int64_t near_rows = 0;
  int64_t bytes = 0;       // of a row
  int64_t far_offset = 0;  // 0: nothing
};

struct QuantKeyTile {
  KvType type = KvType::kQ8_0;
  const uint8_t* const* row = nullptr;  // [rows padded to 8]
  int64_t rows = 0;
  int64_t dim = 0;
  const uint8_t* q = nullptr;  // [heads] prepared queries
  int64_t q_stride = 0;
  int heads = 0;
  AheadRows ahead;
  float* s = nullptr;  // [heads][s_stride], written for the padded rows
  int64_t s_stride = 0;
};
void quant_key_product(const QuantKeyTile& tile);

struct QuantValueTile {
  KvType type = KvType::kQ8_0;
  const uint8_t* const* row = nullptr;  // [rows padded to 8]
  int64_t rows = 0;                     // at most 64
  int64_t dim = 0;
  const float* p = nullptr;  // [heads][p_stride], zero from `rows` to the padded rows
  int64_t p_stride = 0;
  int heads = 0;  // 1 to 4
  AheadRows ahead;
  float* sums = nullptr;  // [heads][stride], added to
  int64_t stride = 0;
};
void quant_value_product(const QuantValueTile& tile);

// Each has its own form of a prepared query.
namespace avx2 {
void prepare_quant_query(KvType type, const float* q, int64_t dim, uint8_t* prepared);
void quant_key_product(const QuantKeyTile& tile);
void quant_value_product(const QuantValueTile& tile);
}  // namespace avx2
namespace avx512vnni {
void prepare_quant_query(KvType type, const float* q, int64_t dim, uint8_t* prepared);
void quant_key_product(const QuantKeyTile& tile);
void quant_value_product(const QuantValueTile& tile);
void prepare_fp8_query(const float* q, int64_t dim, uint8_t* prepared);
void fp8_key_product(const QuantKeyTile& tile);
void fp8_value_product(const QuantValueTile& tile);
}  // namespace avx512vnni

}  // namespace longkv
