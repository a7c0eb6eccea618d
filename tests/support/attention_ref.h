// Slow attention in double precision over stored rows, with its own decoder of the row formats, and random heads to run
// it on. Shares no code with what it checks.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "kv/attend.h"
#include "kv/types.h"

namespace longkv::test {

inline constexpr KvType kAllKvTypes[] = {KvType::kF32,  KvType::kF16,  KvType::kBf16,
                                         KvType::kQ8_0, KvType::kQ4_0, KvType::kFp8};

// An E4M3 byte (OCP FP8) by its definition; the NaN codes too.
double e4m3_value(uint8_t byte);
// One stored row, by the definition of the format.
std::vector<double> decode_row_ref(KvType type, const uint8_t* row, int64_t dim);

struct AttentionRef {
  std::vector<double> out;     // [dim_v]
  double lse = 0.0;            // -inf without rows
  std::vector<double> scores;  // per row of the ranges
  // Error that fp32 arithmetic may show in any channel; for quantised types, and fp8 at levels that multiply it as
  // integers, also the rounding of the query, of the weights and of codes to integers that kv/attend_quant.h states.
  double out_tolerance = 0.0;
  double score_tolerance = 0.0;  // ... in a score or lse
};

// One query head.
AttentionRef attention_ref(const float* q, const KvHeadView& kv, std::span<const RowRange> ranges,
                           const AttendParams& params);

// A head of `rows` rows with normally distributed keys (times key_scale) and values.
struct RandomHead {
  RandomHead(KvType k_type, KvType v_type, int dim_k, int dim_v, int64_t rows, uint32_t seed, float key_scale = 1.0f);
  KvHeadView view;
  std::vector<uint8_t> k, v;
};

std::vector<float> random_floats(int64_t n, uint32_t seed, float scale = 1.0f);

}  // namespace longkv::test
