// A weight matrix as it lies in the model file, and int8 activations shared by several products.
#pragma once

#include <cstdint>

#include "quant/tensor_type.h"

namespace longkv {

// Row-major: `rows` output features of `cols` input features each. Points into the mapped file; owns nothing.
struct Weight {
  TensorType type = TensorType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_bytes = 0;
  const uint8_t* data = nullptr;
  const uint8_t* packed = nullptr;  // the same rows in the form of ops/packed_rows.h; nullptr: there is none

  const uint8_t* row(int64_t r) const { return data + r * row_bytes; }
  explicit operator bool() const { return data != nullptr; }
};

// How products are computed.
enum class ProductType {
  kInt8,  // activations rounded to 8 bits per group of 32, integer dot products, fp32 accumulation over groups
  kF32,   // weights decoded to fp32
  kBf16,  // prompt products in bf16, on AMX tiles or through oneDNN; decode as kInt8
};

}  // namespace longkv
