// Weight matrices as they lie on the card.
//
// A row of a GGUF file mixes quants and scales in blocks of odd sizes, which a card reads badly. On upload every
// quantised type is split into planes of 32-value groups: low bits, high bits, scales. All types then read as
//   value = row_scale * (scale * (q - zero))          symmetric
//   value = row_scale * (scale * q + min)             with a minimum
//   value = row_scale * (scale * kIq4Values[q])       by table
// The scales of super-blocks (6 or 8 bits times a half) are multiplied out to one half per 16 or 32 values, relative to
// a power of two of the row, so that none is subnormal.
#pragma once

#include <cstdint>

#include "quant/tensor_type.h"

struct CUstream_st;

namespace longkv {

using CardStreamHandle = CUstream_st*;

struct CardMatrix {
  TensorType type = TensorType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  const uint8_t* low = nullptr;      // [rows][cols / 32][bytes of PlaneLayout]; float types: [rows][cols] values
  const uint8_t* high = nullptr;     // [rows][cols / 32][...]
  const uint8_t* scale = nullptr;    // [rows][cols / 32][halves]: scales, then minima
  const float* row_scale = nullptr;  // [rows]; nullptr: 1

  bool is_float() const { return type == TensorType::kF32 || type == TensorType::kF16 || type == TensorType::kBF16; }
};

// Bytes that 32 values take in each plane.
struct PlaneLayout {
  int low = 0, high = 0, scale = 0;
  bool row_scale = false;
};
PlaneLayout plane_layout(TensorType type);  // quantised types only
// Bytes of a matrix of this type on the card, each plane rounded up to 256 bytes.
int64_t card_matrix_bytes(TensorType type, int64_t rows, int64_t cols);
// Places the planes of `m` (type, rows, cols set) into `memory`.
void place_planes(CardMatrix& m, uint8_t* memory);

}  // namespace longkv
