#include "quant/dequantize.h"

#include <cstring>

#include "quant/tensor_type.h"

namespace longkv {

namespace {

// Blocks are copied out first, so `src` may lie at any address.
template <class Block, int kValues>
void decode_blocks(const uint8_t* src, float* dst, int64_t n) {
  for (int64_t i = 0; i < n; i += kValues) {
    Block block;
    std::memcpy(&block, src, sizeof block);
    decode_block(block, dst + i);
    src += sizeof block;
  }
}

template <class Half>
void decode_halves(const uint8_t* src, float* dst, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    Half h;
    std::memcpy(&h, src + i * int64_t(sizeof h), sizeof h);
    dst[i] = to_float(h);
  }
}

}  // namespace

void dequantize(TensorType type, const uint8_t* src, float* dst, int64_t n) {
  switch (type) {
    case TensorType::kF32:
      if (n > 0) std::memcpy(dst, src, size_t(n) * sizeof(float));
      return;
    case TensorType::kF16: return decode_halves<f16_t>(src, dst, n);
    case TensorType::kBF16: return decode_halves<bf16_t>(src, dst, n);
    case TensorType::kQ4_0: return decode_blocks<BlockQ4_0, kSmallBlock>(src, dst, n);
    case TensorType::kQ4_1: return decode_blocks<BlockQ4_1, kSmallBlock>(src, dst, n);
    case TensorType::kQ5_0: return decode_blocks<BlockQ5_0, kSmallBlock>(src, dst, n);
    case TensorType::kQ5_1: return decode_blocks<BlockQ5_1, kSmallBlock>(src, dst, n);
    case TensorType::kQ8_0: return decode_blocks<BlockQ8_0, kSmallBlock>(src, dst, n);
    case TensorType::kIQ4_NL: return decode_blocks<BlockIQ4_NL, kSmallBlock>(src, dst, n);
    case TensorType::kQ2_K: return decode_blocks<BlockQ2_K, kSuperBlock>(src, dst, n);
    case TensorType::kQ3_K: return decode_blocks<BlockQ3_K, kSuperBlock>(src, dst, n);
    case TensorType::kQ4_K: return decode_blocks<BlockQ4_K, kSuperBlock>(src, dst, n);
    case TensorType::kQ5_K: return decode_blocks<BlockQ5_K, kSuperBlock>(src, dst, n);
    case TensorType::kQ6_K: return decode_blocks<BlockQ6_K, kSuperBlock>(src, dst, n);
    case TensorType::kIQ4_XS: return decode_blocks<BlockIQ4_XS, kSuperBlock>(src, dst, n);
  }
}

}  // namespace longkv
