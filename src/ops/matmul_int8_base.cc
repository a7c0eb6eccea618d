// Int8 prompt kernel in portable C++, for CPUs without a level of their own. Also holds the table of types.
#include "ops/matmul_decode-inl.h"

namespace longkv {

namespace {

// [column / 4][16 rows][4 columns], signed: u - zero.
struct SignedInterleave {
  static void store(const uint8_t* levels, int columns, const PanelType& type, uint8_t* dst, int64_t group) {
    uint8_t* out = dst + group * 32 * kTileRows;
    for (int c = 0; c < columns; c += 4) {
      for (int r = 0; r < kTileRows; ++r) {
        for (int i = 0; i < 4; ++i) *out++ = uint8_t(levels[r * columns + c + i] - type.zero);
      }
    }
  }
};

// sums[r] = sum over `quads` groups of four columns.
inline void dot_quads(const int8_t* w, const int8_t* q, int quads, int32_t* sums) {
  for (int r = 0; r < kTileRows; ++r) sums[r] = 0;
  for (int i = 0; i < quads; ++i) {
    for (int r = 0; r < kTileRows; ++r) {
      for (int k = 0; k < 4; ++k) sums[r] += int32_t(w[(i * kTileRows + r) * 4 + k]) * int32_t(q[4 * i + k]);
    }
  }
}

void multiply_base(const Int8Tile& a) {
  const int8_t* levels = reinterpret_cast<const int8_t*>(a.panel.levels);
  const int offsets = a.type->offset_group == 0 ? 0 : 32 / a.type->offset_group;
  for (int64_t t = 0; t < a.tokens; ++t) {
    float acc[kTileRows];
    for (int r = 0; r < kTileRows; ++r) acc[r] = a.accumulate ? a.row(t)[r] : 0.0f;
    for (int64_t g = 0; g < a.groups; ++g) {
      const int8_t* w = levels + g * 32 * kTileRows;
      const int8_t* q = a.q + t * a.q_stride + 32 * g;
      const float x_scale = a.x_scale[t * a.x_scale_stride + g];
      int32_t sums[kTileRows];
      if (a.type->form == PanelForm::kGroup16) {
        int32_t half[2][kTileRows];
        dot_quads(w, q, 4, half[0]);
        dot_quads(w + 16 * kTileRows, q + 16, 4, half[1]);
        const int16_t* s = a.panel.scale16 + 2 * g * 2 * kTileRows;
        for (int r = 0; r < kTileRows; ++r) {
          sums[r] = half[0][r] * s[2 * r] + half[1][r] * s[2 * (kTileRows + r)];
        }
      } else {
        dot_quads(w, q, 8, sums);
      }
      for (int r = 0; r < kTileRows; ++r) {
        acc[r] += float(sums[r]) * (x_scale * a.panel.scale[g * kTileRows + r]);
      }
      for (int o = 0; o < offsets; ++o) {
        const float x_sum = a.x_sum[t * a.x_sum_stride + g * offsets + o];
        for (int r = 0; r < kTileRows; ++r) acc[r] += x_sum * a.panel.offset[(g * offsets + o) * kTileRows + r];
      }
    }
    for (int r = 0; r < kTileRows; ++r) a.row(t)[r] = acc[r];
  }
}

}  // namespace

const Int8Level& int8_level_base() {
  static constexpr Int8Level kLevel{.name = "base", .decode = decode_any<SignedInterleave>, .multiply = multiply_base};
  return kLevel;
}

const PanelType* panel_type(TensorType type) {
  switch (type) {
    case TensorType::kQ4_0: return &Decoder<TensorType::kQ4_0>::kType;
    case TensorType::kQ4_1: return &Decoder<TensorType::kQ4_1>::kType;
    case TensorType::kQ5_0: return &Decoder<TensorType::kQ5_0>::kType;
    case TensorType::kQ5_1: return &Decoder<TensorType::kQ5_1>::kType;
    case TensorType::kQ8_0: return &Decoder<TensorType::kQ8_0>::kType;
    case TensorType::kQ2_K: return &Decoder<TensorType::kQ2_K>::kType;
    case TensorType::kQ3_K: return &Decoder<TensorType::kQ3_K>::kType;
    case TensorType::kQ4_K: return &Decoder<TensorType::kQ4_K>::kType;
    case TensorType::kQ5_K: return &Decoder<TensorType::kQ5_K>::kType;
    case TensorType::kQ6_K: return &Decoder<TensorType::kQ6_K>::kType;
    case TensorType::kIQ4_NL: return &Decoder<TensorType::kIQ4_NL>::kType;
    case TensorType::kIQ4_XS: return &Decoder<TensorType::kIQ4_XS>::kType;
    case TensorType::kF32:
    case TensorType::kF16:
    case TensorType::kBF16: break;
  }
  return nullptr;
}

}  // namespace longkv
