#include "cuda/matrix.h"

#include "base/checked.h"

namespace longkv {

PlaneLayout plane_layout(TensorType type) {
  switch (type) {
    case TensorType::kQ4_0:
    case TensorType::kIQ4_NL: return {16, 0, 2, false};
    case TensorType::kQ4_1: return {16, 0, 4, false};
    case TensorType::kQ5_0: return {16, 4, 2, false};
    case TensorType::kQ5_1: return {16, 4, 4, false};
    case TensorType::kQ8_0: return {32, 0, 2, false};
    case TensorType::kQ2_K: return {8, 0, 8, true};
    case TensorType::kQ3_K: return {8, 4, 4, true};
    case TensorType::kQ4_K: return {16, 0, 4, true};
    case TensorType::kQ5_K: return {16, 4, 4, true};
    case TensorType::kQ6_K: return {16, 8, 4, true};
    case TensorType::kIQ4_XS: return {16, 0, 2, true};
    case TensorType::kF32:
    case TensorType::kF16:
    case TensorType::kBF16: break;
  }
  return {};
}

namespace {

struct PlaneBytes {
  int64_t low = 0, high = 0, scale = 0, row_scale = 0;
};

PlaneBytes plane_bytes(TensorType type, int64_t rows, int64_t cols) {
  constexpr int64_t kAlign = 256;
  PlaneBytes b;
  if (type == TensorType::kF32 || type == TensorType::kF16 || type == TensorType::kBF16) {
    b.low = rows * cols * (type == TensorType::kF32 ? 4 : 2);
  } else {
    const PlaneLayout l = plane_layout(type);
    const int64_t groups = rows * (cols / 32);
    b = {groups * l.low, groups * l.high, groups * l.scale, l.row_scale ? rows * 4 : 0};
  }
  for (int64_t* bytes : {&b.low, &b.high, &b.scale, &b.row_scale}) *bytes = ceil_div(*bytes, kAlign) * kAlign;
  return b;
}

}  // namespace

int64_t card_matrix_bytes(TensorType type, int64_t rows, int64_t cols) {
  const PlaneBytes b = plane_bytes(type, rows, cols);
  return b.low + b.high + b.scale + b.row_scale;
}

void place_planes(CardMatrix& m, uint8_t* memory) {
  const PlaneBytes b = plane_bytes(m.type, m.rows, m.cols);
  m.low = memory;
  m.high = b.high > 0 ? memory + b.low : nullptr;
  m.scale = b.scale > 0 ? memory + b.low + b.high : nullptr;
  m.row_scale = b.row_scale > 0 ? reinterpret_cast<const float*>(memory + b.low + b.high + b.scale) : nullptr;
}

}  // namespace longkv
