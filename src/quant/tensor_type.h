// Element types of GGUF tensors and their block sizes.
#pragma once

#include <cstdint>

#include "longkv/status.h"

namespace longkv {

// Values are those of the GGUF file format.
enum class TensorType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ4_NL = 20,
  kIQ4_XS = 23,
  kBF16 = 30,
};

struct TensorTypeInfo {
  const char* name;      // as users write it: "q4_K"
  int64_t block_values;  // consecutive values of a row that share one block
  int64_t block_bytes;
};

// nullptr for ids that longkv cannot read.
const TensorTypeInfo* tensor_type_info(TensorType type);

// Bytes of a row of `cols` values. Errors: kCorrupt when cols is not a multiple of the block or the product overflows.
Result<int64_t> row_bytes(TensorType type, int64_t cols);

// Reference decode of `n` values (a multiple of the block) to fp32. The single definition of what a block means.
void dequantize(TensorType type, const uint8_t* src, float* dst, int64_t n);

}  // namespace longkv
