// Int8 matrix-vector products in portable C++: the level for CPUs without the vector levels, and the plainest statement
// of what those compute.
#include "ops/matvec_rows.h"
#include "quant/block_formats.h"

namespace longkv {

namespace {

// One activation group of weights: x = scale[h] * q - min[h] for the half h of 16 values.
struct WeightGroup {
  int8_t q[kActivationGroup];
  float scale[2];
  float min[2];
};

void set_scales(WeightGroup& out, float scale, float min) {
  out.scale[0] = out.scale[1] = scale;
  out.min[0] = out.min[1] = min;
}

void unpack_nibbles(const uint8_t qs[16], int offset, WeightGroup& out) {
  for (int i = 0; i < 16; ++i) {
    out.q[i] = int8_t((qs[i] & 15) - offset);
    out.q[16 + i] = int8_t((qs[i] >> 4) - offset);
  }
}

void add_fifth_bits(const uint8_t qh[4], WeightGroup& out) {
  for (int i = 0; i < kSmallBlock; ++i) out.q[i] = int8_t(out.q[i] + (((qh[i / 8] >> (i % 8)) & 1) << 4));
}

void look_up_levels(WeightGroup& out) {
  for (int8_t& q : out.q) q = kIq4Values[q];
}

// unpack(block, g, out): group g of a block (g = 0 for blocks of 32).

void unpack(const BlockQ4_0& b, int, WeightGroup& out) {
  unpack_nibbles(b.qs, 8, out);
  set_scales(out, to_float(b.d), 0.0f);
}
void unpack(const BlockQ4_1& b, int, WeightGroup& out) {
  unpack_nibbles(b.qs, 0, out);
  set_scales(out, to_float(b.d), -to_float(b.m));
}
void unpack(const BlockQ5_0& b, int, WeightGroup& out) {
  unpack_nibbles(b.qs, 16, out);
  add_fifth_bits(b.qh, out);
  set_scales(out, to_float(b.d), 0.0f);
}
void unpack(const BlockQ5_1& b, int, WeightGroup& out) {
  unpack_nibbles(b.qs, 0, out);
  add_fifth_bits(b.qh, out);
  set_scales(out, to_float(b.d), -to_float(b.m));
}
void unpack(const BlockQ8_0& b, int, WeightGroup& out) {
  for (int i = 0; i < kSmallBlock; ++i) out.q[i] = b.qs[i];
  set_scales(out, to_float(b.d), 0.0f);
}
void unpack(const BlockIQ4_NL& b, int, WeightGroup& out) {
  unpack_nibbles(b.qs, 0, out);
  look_up_levels(out);
  set_scales(out, to_float(b.d), 0.0f);
}
void unpack(const BlockQ2_K& b, int g, WeightGroup& out) {
  for (int i = 0; i < 32; ++i) out.q[i] = int8_t((b.qs[32 * (g / 4) + i] >> (2 * (g % 4))) & 3);
  for (int h = 0; h < 2; ++h) {
    out.scale[h] = to_float(b.d) * float(b.scales[2 * g + h] & 15);
    out.min[h] = to_float(b.dmin) * float(b.scales[2 * g + h] >> 4);
  }
}
void unpack(const BlockQ3_K& b, int g, WeightGroup& out) {
  int8_t scale[16];
  unpack_q3_K_scales(b.scales, scale);
  for (int i = 0; i < 32; ++i) {
    const int low = (b.qs[32 * (g / 4) + i] >> (2 * (g % 4))) & 3;
    out.q[i] = int8_t(low - (((b.hmask[i] >> g) & 1) ? 0 : 4));
  }
  for (int h = 0; h < 2; ++h) {
    out.scale[h] = to_float(b.d) * float(scale[2 * g + h]);
    out.min[h] = 0.0f;
  }
}
template <class Block>
void unpack_4_or_5(const Block& b, int g, WeightGroup& out) {
  uint8_t scale[8], min[8];
  unpack_q4_K_scales(b.scales, scale, min);
  for (int i = 0; i < 32; ++i) out.q[i] = int8_t((b.qs[32 * (g / 2) + i] >> (4 * (g % 2))) & 15);
  set_scales(out, to_float(b.d) * float(scale[g]), to_float(b.dmin) * float(min[g]));
}
void unpack(const BlockQ4_K& b, int g, WeightGroup& out) { unpack_4_or_5(b, g, out); }
void unpack(const BlockQ5_K& b, int g, WeightGroup& out) {
  unpack_4_or_5(b, g, out);
  for (int i = 0; i < 32; ++i) out.q[i] = int8_t(out.q[i] | (((b.qh[i] >> g) & 1) << 4));
}
void unpack(const BlockQ6_K& b, int g, WeightGroup& out) {
  const int h = g / 4, s = g % 4;
  for (int i = 0; i < 32; ++i) {
    const int low = (b.ql[64 * h + 32 * (s & 1) + i] >> (4 * (s / 2))) & 15;
    const int high = (b.qh[32 * h + i] >> (2 * s)) & 3;
    out.q[i] = int8_t((low | (high << 4)) - 32);
  }
  for (int half = 0; half < 2; ++half) {
    out.scale[half] = to_float(b.d) * float(b.scales[2 * g + half]);
    out.min[half] = 0.0f;
  }
}
void unpack(const BlockIQ4_XS& b, int g, WeightGroup& out) {
  int8_t scale[8];
  unpack_iq4_xs_scales(b, scale);
  unpack_nibbles(b.qs + 16 * g, 0, out);
  look_up_levels(out);
  set_scales(out, to_float(b.d) * float(scale[g]), 0.0f);
}

int dot16(const int8_t* w, const int8_t* x) {
  int sum = 0;
  for (int i = 0; i < 16; ++i) sum += int(w[i]) * int(x[i]);
  return sum;
}

template <class Block>
void matvec_rows(const Weight& w, const QuantizedRows& x, int64_t begin, int64_t end, float* y, int64_t y_stride) {
  constexpr int kGroups = sizeof(Block) <= sizeof(BlockQ8_0) ? 1 : kSuperBlock / int(kActivationGroup);
  const int64_t groups = x.cols / kActivationGroup;
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t t = 0; t < x.tokens; ++t) y[t * y_stride + r] = 0.0f;
    const Block* block = reinterpret_cast<const Block*>(w.row(r));
    WeightGroup weights;
    for (int64_t g = 0; g < groups; ++g) {
      unpack(block[g / kGroups], int(g % kGroups), weights);
      for (int64_t t = 0; t < x.tokens; ++t) {
        const auto add = [&](const int8_t* q, const int16_t* sum, float scale) {
          float value = 0.0f;
          for (int h = 0; h < 2; ++h) {
            value += weights.scale[h] * float(dot16(weights.q + 16 * h, q + 16 * h)) - weights.min[h] * float(sum[h]);
          }
          y[t * y_stride + r] += value * scale;
        };
        const int64_t at = t * groups + g, f = x.fine_term[size_t(at)];
        add(x.q.data() + at * kActivationGroup, x.sum16.data() + 2 * at, x.scale[size_t(at)]);
        if (f >= 0) add(x.fine_q.data() + f * kActivationGroup, x.fine_sum16.data() + 2 * f, x.fine_scale[size_t(f)]);
      }
    }
  }
}

}  // namespace

MatvecRows matvec_rows_base(TensorType type) {
  switch (type) {
    case TensorType::kQ4_0: return matvec_rows<BlockQ4_0>;
    case TensorType::kQ4_1: return matvec_rows<BlockQ4_1>;
    case TensorType::kQ5_0: return matvec_rows<BlockQ5_0>;
    case TensorType::kQ5_1: return matvec_rows<BlockQ5_1>;
    case TensorType::kQ8_0: return matvec_rows<BlockQ8_0>;
    case TensorType::kIQ4_NL: return matvec_rows<BlockIQ4_NL>;
    case TensorType::kQ2_K: return matvec_rows<BlockQ2_K>;
    case TensorType::kQ3_K: return matvec_rows<BlockQ3_K>;
    case TensorType::kQ4_K: return matvec_rows<BlockQ4_K>;
    case TensorType::kQ5_K: return matvec_rows<BlockQ5_K>;
    case TensorType::kQ6_K: return matvec_rows<BlockQ6_K>;
    case TensorType::kIQ4_XS: return matvec_rows<BlockIQ4_XS>;
    default: return nullptr;
  }
}

}  // namespace longkv
