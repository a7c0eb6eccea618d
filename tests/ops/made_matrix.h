// Weight matrices of every type with their decoded values, for tests of products.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "base/float16.h"
#include "ops/weight.h"
#include "quant/block_formats.h"
#include "quant/tensor_type.h"

namespace longkv {

inline constexpr TensorType kInt8Types[] = {
    TensorType::kQ4_0, TensorType::kQ4_1, TensorType::kQ5_0,   TensorType::kQ5_1,
    TensorType::kQ8_0, TensorType::kQ2_K, TensorType::kQ3_K,   TensorType::kQ4_K,
    TensorType::kQ5_K, TensorType::kQ6_K, TensorType::kIQ4_NL, TensorType::kIQ4_XS,
};
inline constexpr TensorType kFloatTypes[] = {TensorType::kF32, TensorType::kF16, TensorType::kBF16};

using Random = std::mt19937;

enum class Fill {
  kRandom,   // random bits, scales of random sign and size
  kLowest,   // all bits of the levels clear, unit scales
  kHighest,  // all set
  kUnit,     // random bits, unit scales
};

template <class Block>
void set_scale(uint8_t* block, f16_t Block::*field, float value) {
  Block b;
  std::memcpy(&b, block, sizeof b);
  b.*field = to_f16(value);
  std::memcpy(block, &b, sizeof b);
}

struct Matrix {
  std::vector<uint8_t> bytes;
  std::vector<float> decoded;
  Weight weight;
};

inline Matrix make_matrix(TensorType type, int64_t rows, int64_t cols, Fill fill, Random& random) {
  Matrix m;
  const TensorTypeInfo& info = *tensor_type_info(type);
  const int64_t row_size = row_bytes(type, cols).value();
  m.bytes.resize(size_t(rows * row_size));
  std::normal_distribution<float> normal;
  for (uint8_t& b : m.bytes) b = fill == Fill::kLowest ? 0 : fill == Fill::kHighest ? 0xff : uint8_t(random());
  for (int64_t i = 0; i < rows * cols / info.block_values; ++i) {
    uint8_t* block = m.bytes.data() + i * info.block_bytes;
    const float d = fill == Fill::kRandom ? normal(random) : 1.0f;
    const float min = fill == Fill::kRandom ? normal(random) : 1.0f;
    switch (type) {
      case TensorType::kF32: std::memcpy(block, &d, 4); break;
      case TensorType::kF16: {
        const f16_t h = to_f16(d);
        std::memcpy(block, &h, 2);
        break;
      }
      case TensorType::kBF16: {
        const bf16_t h = to_bf16(d);
        std::memcpy(block, &h, 2);
        break;
      }
      case TensorType::kQ4_0: set_scale(block, &BlockQ4_0::d, d); break;
      case TensorType::kQ4_1:
        set_scale(block, &BlockQ4_1::d, d);
        set_scale(block, &BlockQ4_1::m, min);
        break;
      case TensorType::kQ5_0: set_scale(block, &BlockQ5_0::d, d); break;
      case TensorType::kQ5_1:
        set_scale(block, &BlockQ5_1::d, d);
        set_scale(block, &BlockQ5_1::m, min);
        break;
      case TensorType::kQ8_0:
        set_scale(block, &BlockQ8_0::d, d);
        if (fill == Fill::kLowest || fill == Fill::kHighest)
          std::memset(block + 2, fill == Fill::kLowest ? 0x80 : 0x7f, 32);
        break;
      case TensorType::kIQ4_NL: set_scale(block, &BlockIQ4_NL::d, d); break;
      case TensorType::kIQ4_XS: set_scale(block, &BlockIQ4_XS::d, d); break;
      case TensorType::kQ2_K:
        set_scale(block, &BlockQ2_K::d, d);
        set_scale(block, &BlockQ2_K::dmin, min);
        break;
      case TensorType::kQ3_K: set_scale(block, &BlockQ3_K::d, d); break;
      case TensorType::kQ4_K:
        set_scale(block, &BlockQ4_K::d, d);
        set_scale(block, &BlockQ4_K::dmin, min);
        break;
      case TensorType::kQ5_K:
        set_scale(block, &BlockQ5_K::d, d);
        set_scale(block, &BlockQ5_K::dmin, min);
        break;
      case TensorType::kQ6_K: {
        set_scale(block, &BlockQ6_K::d, d);
        // Extreme levels with the extreme scale of the same sign.
        if (fill == Fill::kLowest) std::memset(block + offsetof(BlockQ6_K, scales), 0x80, 16);
        if (fill == Fill::kHighest) std::memset(block + offsetof(BlockQ6_K, scales), 0x7f, 16);
        break;
      }
    }
  }
  m.decoded.resize(size_t(rows * cols));
  for (int64_t r = 0; r < rows; ++r) {
    dequantize(type, m.bytes.data() + r * row_size, m.decoded.data() + r * cols, cols);
  }
  m.weight = {type, rows, cols, row_size, m.bytes.data()};
  return m;
}

}  // namespace longkv
