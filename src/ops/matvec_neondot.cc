// Int8 matrix-vector kernels for Armv8 with SDOT: one row at a time in the file's own order, one activation group of 32
// weights in two registers.
#include <arm_neon.h>

#include "ops/matvec_rows.h"
#include "quant/block_formats.h"

namespace longkv {

namespace {

constexpr int kMostGroups = kSuperBlock / int(kActivationGroup);

// Scales of one block, per half group of 16 values: x = scale[h] * q - min[h].
struct BlockScales {
  float scale[2 * kMostGroups];
  float min[2 * kMostGroups];
};

// kMin: the type has minima. kHalves: the two halves of a group have own scales.
template <class B, bool kHasMin, bool kOwnHalves>
struct Traits {
  using Block = B;
  static constexpr bool kMin = kHasMin, kHalves = kOwnHalves;
};

struct Quants {
  int8x16_t low, high;
};

inline Quants split_nibbles(uint8x16_t packed) {
  return {vreinterpretq_s8_u8(vandq_u8(packed, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8(packed, 4))};
}

inline Quants minus(Quants v, int8_t offset) {
  return {vsubq_s8(v.low, vdupq_n_s8(offset)), vsubq_s8(v.high, vdupq_n_s8(offset))};
}

inline int8x16_t either(int8x16_t a, uint8x16_t b) { return vorrq_s8(a, vreinterpretq_s8_u8(b)); }

inline Quants add_fifth_bit(Quants v, const uint8_t qh[4]) {
  const uint8x8_t bit = vcreate_u8(0x8040201008040201ull);
  const auto fifth = [&](uint8_t first, uint8_t second) {
    const uint8x16_t bits = vcombine_u8(vdup_n_u8(first), vdup_n_u8(second));
    return vandq_u8(vtstq_u8(bits, vcombine_u8(bit, bit)), vdupq_n_u8(16));
  };
  return {either(v.low, fifth(qh[0], qh[1])), either(v.high, fifth(qh[2], qh[3]))};
}

inline Quants look_up_levels(Quants v) {
  const int8x16_t levels = vld1q_s8(kIq4Values);
  return {vqtbl1q_s8(levels, vreinterpretq_u8_s8(v.low)), vqtbl1q_s8(levels, vreinterpretq_u8_s8(v.high))};
}

// (32 bytes at p, shifted right by `right`, masked) in two registers; bits then moved up by `left`.
struct Bytes {
  uint8x16_t low, high;
};
inline Bytes bits(const uint8_t* p, int right, uint8_t mask, int left) {
  const int8x16_t down = vdupq_n_s8(int8_t(-right)), up = vdupq_n_s8(int8_t(left));
  const uint8x16_t m = vdupq_n_u8(mask);
  return {vshlq_u8(vandq_u8(vshlq_u8(vld1q_u8(p), down), m), up),
          vshlq_u8(vandq_u8(vshlq_u8(vld1q_u8(p + 16), down), m), up)};
}
inline Quants joined(Bytes a, Bytes b) {
  return {vreinterpretq_s8_u8(vorrq_u8(a.low, b.low)), vreinterpretq_s8_u8(vorrq_u8(a.high, b.high))};
}

struct Q4_0 : Traits<BlockQ4_0, false, false> {
  static void scales(const Block& b, BlockScales& s) { s.scale[0] = to_float(b.d); }
  static Quants quants(const Block& b, int) { return minus(split_nibbles(vld1q_u8(b.qs)), 8); }
};
struct Q4_1 : Traits<BlockQ4_1, true, false> {
  static void scales(const Block& b, BlockScales& s) {
    s.scale[0] = to_float(b.d);
    s.min[0] = s.min[1] = -to_float(b.m);
  }
  static Quants quants(const Block& b, int) { return split_nibbles(vld1q_u8(b.qs)); }
};
struct Q5_0 : Traits<BlockQ5_0, false, false> {
  static void scales(const Block& b, BlockScales& s) { s.scale[0] = to_float(b.d); }
  static Quants quants(const Block& b, int) { return minus(add_fifth_bit(split_nibbles(vld1q_u8(b.qs)), b.qh), 16); }
};
struct Q5_1 : Traits<BlockQ5_1, true, false> {
  static void scales(const Block& b, BlockScales& s) {
    s.scale[0] = to_float(b.d);
    s.min[0] = s.min[1] = -to_float(b.m);
  }
  static Quants quants(const Block& b, int) { return add_fifth_bit(split_nibbles(vld1q_u8(b.qs)), b.qh); }
};
struct Q8_0 : Traits<BlockQ8_0, false, false> {
  static void scales(const Block& b, BlockScales& s) { s.scale[0] = to_float(b.d); }
  static Quants quants(const Block& b, int) { return {vld1q_s8(b.qs), vld1q_s8(b.qs + 16)}; }
};
struct Iq4Nl : Traits<BlockIQ4_NL, false, false> {
  static void scales(const Block& b, BlockScales& s) { s.scale[0] = to_float(b.d); }
  static Quants quants(const Block& b, int) { return look_up_levels(split_nibbles(vld1q_u8(b.qs))); }
};
struct Q2K : Traits<BlockQ2_K, true, true> {
  static void scales(const Block& b, BlockScales& s) {
    const float d = to_float(b.d), dmin = to_float(b.dmin);
    for (int h = 0; h < 16; ++h) {
      s.scale[h] = d * float(b.scales[h] & 15);
      s.min[h] = dmin * float(b.scales[h] >> 4);
    }
  }
  static Quants quants(const Block& b, int g) {
    const Bytes v = bits(b.qs + 32 * (g / 4), 2 * (g % 4), 3, 0);
    return {vreinterpretq_s8_u8(v.low), vreinterpretq_s8_u8(v.high)};
  }
};
struct Q3K : Traits<BlockQ3_K, false, true> {
  static void scales(const Block& b, BlockScales& s) {
    const float d = to_float(b.d);
    int8_t scale[16];
    unpack_q3_K_scales(b.scales, scale);
    for (int h = 0; h < 16; ++h) s.scale[h] = d * float(scale[h]);
  }
  static Quants quants(const Block& b, int g) {
    return minus(joined(bits(b.qs + 32 * (g / 4), 2 * (g % 4), 3, 0), bits(b.hmask, g, 1, 2)), 4);
  }
};
inline void scales_of_32(const uint8_t packed[12], float d, float dmin, BlockScales& s) {
  uint8_t scale[8], min[8];
  unpack_q4_K_scales(packed, scale, min);
  for (int g = 0; g < 8; ++g) {
    s.scale[2 * g] = d * float(scale[g]);
    s.min[2 * g] = s.min[2 * g + 1] = dmin * float(min[g]);
  }
}
struct Q4K : Traits<BlockQ4_K, true, false> {
  static void scales(const Block& b, BlockScales& s) { scales_of_32(b.scales, to_float(b.d), to_float(b.dmin), s); }
  static Quants quants(const Block& b, int g) {
    const Bytes v = bits(b.qs + 32 * (g / 2), 4 * (g % 2), 15, 0);
    return {vreinterpretq_s8_u8(v.low), vreinterpretq_s8_u8(v.high)};
  }
};
struct Q5K : Traits<BlockQ5_K, true, false> {
  static void scales(const Block& b, BlockScales& s) { scales_of_32(b.scales, to_float(b.d), to_float(b.dmin), s); }
  static Quants quants(const Block& b, int g) {
    return joined(bits(b.qs + 32 * (g / 2), 4 * (g % 2), 15, 0), bits(b.qh, g, 1, 4));
  }
};
struct Q6K : Traits<BlockQ6_K, false, true> {
  static void scales(const Block& b, BlockScales& s) {
    const float d = to_float(b.d);
    for (int h = 0; h < 16; ++h) s.scale[h] = d * float(b.scales[h]);
  }
  static Quants quants(const Block& b, int g) {
    const int h = g / 4, s = g % 4;
    return minus(joined(bits(b.ql + 64 * h + 32 * (s & 1), 4 * (s / 2), 15, 0), bits(b.qh + 32 * h, 2 * s, 3, 4)), 32);
  }
};
struct Iq4Xs : Traits<BlockIQ4_XS, false, false> {
  static void scales(const Block& b, BlockScales& s) {
    const float d = to_float(b.d);
    int8_t scale[8];
    unpack_iq4_xs_scales(b, scale);
    for (int g = 0; g < 8; ++g) s.scale[2 * g] = d * float(scale[g]);
  }
  static Quants quants(const Block& b, int g) { return look_up_levels(split_nibbles(vld1q_u8(b.qs + 16 * g))); }
};

template <class T>
void some_tokens(const Weight& w, const QuantizedRows& x, int64_t token, int tokens, int64_t begin, int64_t end,
                 float* y, int64_t y_stride) {
  using Block = typename T::Block;
  constexpr int kGroups = sizeof(Block) <= sizeof(BlockQ8_0) ? 1 : kMostGroups;
  const int64_t groups = x.cols / kActivationGroup;
  BlockScales s;
  for (int64_t r = begin; r < end; ++r) {
    const Block* block = reinterpret_cast<const Block*>(w.row(r));
    float32x4_t acc[kMatvecTokens];
    float min[kMatvecTokens] = {};
    for (int t = 0; t < tokens; ++t) acc[t] = vdupq_n_f32(0.0f);
    for (int64_t first = 0; first < groups; first += kGroups, ++block) {
      T::scales(*block, s);
      for (int g = 0; g < kGroups; ++g) {
        const Quants v = T::quants(*block, g);
        for (int t = 0; t < tokens; ++t) {
          const auto add = [&](const int8_t* q, const int16_t* sum, float xs) {
            const int8x16_t x_low = vld1q_s8(q), x_high = vld1q_s8(q + 16);
            const int32x4_t low = vdotq_s32(vdupq_n_s32(0), v.low, x_low);
            if constexpr (T::kHalves) {
              const int32x4_t high = vdotq_s32(vdupq_n_s32(0), v.high, x_high);
              acc[t] = vfmaq_n_f32(acc[t], vcvtq_f32_s32(low), s.scale[2 * g] * xs);
              acc[t] = vfmaq_n_f32(acc[t], vcvtq_f32_s32(high), s.scale[2 * g + 1] * xs);
            } else {
              acc[t] = vfmaq_n_f32(acc[t], vcvtq_f32_s32(vdotq_s32(low, v.high, x_high)), s.scale[2 * g] * xs);
            }
            if constexpr (T::kMin) {
              min[t] += (s.min[2 * g] * float(sum[0]) + s.min[2 * g + 1] * float(sum[1])) * xs;
            }
          };
          const int64_t at = (token + t) * groups + first + g, f = x.fine_term[size_t(at)];
          add(x.q.data() + at * kActivationGroup, x.sum16.data() + 2 * at, x.scale[size_t(at)]);
          if (f >= 0) add(x.fine_q.data() + f * kActivationGroup, x.fine_sum16.data() + 2 * f, x.fine_scale[size_t(f)]);
        }
      }
    }
    for (int t = 0; t < tokens; ++t) y[(token + t) * y_stride + r] = vaddvq_f32(acc[t]) - min[t];
  }
}

template <class T>
void matvec_rows(const Weight& w, const QuantizedRows& x, int64_t begin, int64_t end, float* y, int64_t y_stride) {
  for (int64_t t = 0; t < x.tokens; t += kMatvecTokens) {
    const int64_t left = x.tokens - t;
    // A constant count of one lets the compiler keep everything in registers.
    if (left == 1) {
      some_tokens<T>(w, x, t, 1, begin, end, y, y_stride);
    } else {
      some_tokens<T>(w, x, t, int(left < kMatvecTokens ? left : kMatvecTokens), begin, end, y, y_stride);
    }
  }
}

}  // namespace

MatvecRows matvec_rows_neondot(TensorType type) {
  switch (type) {
    case TensorType::kQ4_0: return matvec_rows<Q4_0>;
    case TensorType::kQ4_1: return matvec_rows<Q4_1>;
    case TensorType::kQ5_0: return matvec_rows<Q5_0>;
    case TensorType::kQ5_1: return matvec_rows<Q5_1>;
    case TensorType::kQ8_0: return matvec_rows<Q8_0>;
    case TensorType::kIQ4_NL: return matvec_rows<Iq4Nl>;
    case TensorType::kQ2_K: return matvec_rows<Q2K>;
    case TensorType::kQ3_K: return matvec_rows<Q3K>;
    case TensorType::kQ4_K: return matvec_rows<Q4K>;
    case TensorType::kQ5_K: return matvec_rows<Q5K>;
    case TensorType::kQ6_K: return matvec_rows<Q6K>;
    case TensorType::kIQ4_XS: return matvec_rows<Iq4Xs>;
    default: return nullptr;
  }
}

}  // namespace longkv
