// Int8 prompt kernel for Arm with SDOT: 16 rows in four vectors by up to 4 tokens; signed levels u - zero.
#include <arm_neon.h>

#include "ops/matmul_decode-inl.h"

namespace longkv {

namespace {

constexpr int kTokens = 4;
constexpr int kVectors = kTileRows / 4;

// [column / 4][16 rows][4 columns], signed.
struct SignedInterleave {
  static void store(const uint8_t* levels, int columns, const PanelType& type, uint8_t* dst, int64_t group) {
    uint8_t* out = dst + group * 32 * kTileRows;
    const uint32x4_t zero = vdupq_n_u32(uint32_t(type.zero) * 0x01010101u);
    for (int c = 0; c < columns; c += 4) {
      for (int v = 0; v < kVectors; ++v) {
        uint32_t quad[4];
        for (int r = 0; r < 4; ++r) std::memcpy(&quad[r], levels + (4 * v + r) * columns + c, 4);
        vst1q_u8(out, vsubq_u8(vreinterpretq_u8_u32(vld1q_u32(quad)), vreinterpretq_u8_u32(zero)));
        out += 16;
      }
    }
  }
};

template <int T>
inline void dots(const int8_t* w, const int8_t* q, int64_t q_stride, int quads, int32x4_t (&s)[T][kVectors]) {
  for (int t = 0; t < T; ++t) {
    for (int v = 0; v < kVectors; ++v) s[t][v] = vdupq_n_s32(0);
  }
  for (int i = 0; i < quads; ++i) {
    int8x16_t levels[kVectors];
    for (int v = 0; v < kVectors; ++v) levels[v] = vld1q_s8(w + (i * kVectors + v) * 16);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      int32_t four;
      std::memcpy(&four, q + t * q_stride + 4 * i, 4);
      const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) s[t][v] = vdotq_s32(s[t][v], levels[v], x);
    }
  }
}

template <bool pairs, int T>
void multiply_tokens(const Int8Tile& tile, int64_t t0) {
  const Int8Tile a = tile;  // a copy that no store can alias
  const int offsets = a.type->offset_group == 0 ? 0 : 32 / a.type->offset_group;
  const int8_t* levels = reinterpret_cast<const int8_t*>(a.panel.levels);
  float acc[T][kTileRows];
  for (int t = 0; t < T; ++t) {
    const float* y = a.row(t0 + t);
    for (int r = 0; r < kTileRows; ++r) acc[t][r] = a.accumulate ? y[r] : 0.0f;
  }
  for (int64_t g = 0; g < a.groups; ++g) {
    const int8_t* q = a.q + t0 * a.q_stride + 32 * g;
    int32x4_t s[T][kVectors];
    if constexpr (pairs) {
      int32x4_t half[2][T][kVectors];
      for (int h = 0; h < 2; ++h) dots<T>(levels + (2 * g + h) * 16 * kTileRows, q + 16 * h, a.q_stride, 4, half[h]);
      for (int v = 0; v < kVectors; ++v) {
        const int16_t* scale = a.panel.scale16 + 2 * g * 2 * kTileRows + 8 * v;
        const int32x4_t scale0 = vmovl_s16(vld2_s16(scale).val[0]);
        const int32x4_t scale1 = vmovl_s16(vld2_s16(scale + 2 * kTileRows).val[0]);
        for (int t = 0; t < T; ++t) s[t][v] = vmlaq_s32(vmulq_s32(half[0][t][v], scale0), half[1][t][v], scale1);
      }
    } else {
      dots<T>(levels + g * 32 * kTileRows, q, a.q_stride, 8, s);
    }
    for (int t = 0; t < T; ++t) {
      const float xs = a.x_scale[(t0 + t) * a.x_scale_stride + g];
      for (int v = 0; v < kVectors; ++v) {
        const float32x4_t scale = vmulq_n_f32(vld1q_f32(a.panel.scale + g * kTileRows + 4 * v), xs);
        float32x4_t sum = vfmaq_f32(vld1q_f32(acc[t] + 4 * v), vcvtq_f32_s32(s[t][v]), scale);
        for (int o = 0; o < offsets; ++o) {
          const float x_sum = a.x_sum[(t0 + t) * a.x_sum_stride + g * offsets + o];
          const float* offset = a.panel.offset + (g * offsets + o) * kTileRows + 4 * v;
          sum = vfmaq_n_f32(sum, vld1q_f32(offset), x_sum);
        }
        vst1q_f32(acc[t] + 4 * v, sum);
      }
    }
  }
  for (int t = 0; t < T; ++t) {
    for (int v = 0; v < kVectors; ++v) vst1q_f32(a.row(t0 + t) + 4 * v, vld1q_f32(acc[t] + 4 * v));
  }
}

template <bool pairs>
void multiply_form(const Int8Tile& a) {
  int64_t t = 0;
  for (; t + kTokens <= a.tokens; t += kTokens) multiply_tokens<pairs, kTokens>(a, t);
  for (; t < a.tokens; ++t) multiply_tokens<pairs, 1>(a, t);
}

void multiply_neondot(const Int8Tile& a) {
  a.type->form == PanelForm::kGroup16 ? multiply_form<true>(a) : multiply_form<false>(a);
}

}  // namespace

const Int8Level& int8_level_neondot() {
  static constexpr Int8Level level{
      .name = "neondot", .decode = decode_any<SignedInterleave>, .multiply = multiply_neondot};
  return level;
}

}  // namespace longkv
