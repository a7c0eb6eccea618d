// Super-blocks of 256 values: q2_K to q6_K, iq4_xs. The loops follow the bit layouts of quant/block_formats.h.
#include "quant/dequantize.h"

namespace longkv {

namespace {

// The two low bits of value i in q2_K and q3_K.
int two_bits(const uint8_t qs[64], int i) { return (qs[32 * (i / 128) + i % 32] >> (2 * ((i / 32) % 4))) & 3; }

// The nibble of value i in q4_K and q5_K.
int k_nibble(const uint8_t qs[128], int i) { return (qs[32 * (i / 64) + i % 32] >> (4 * ((i / 32) % 2))) & 15; }

}  // namespace

void decode_block(const BlockQ2_K& b, float out[kSuperBlock]) {
  const float d = to_float(b.d);
  const float dmin = to_float(b.dmin);
  for (int g = 0; g < 16; ++g) {
    const float scale = d * float(b.scales[g] & 15);
    const float min = dmin * float(b.scales[g] >> 4);
    for (int i = 16 * g; i < 16 * (g + 1); ++i) out[i] = scale * float(two_bits(b.qs, i)) - min;
  }
}

void decode_block(const BlockQ3_K& b, float out[kSuperBlock]) {
  const float d = to_float(b.d);
  int8_t scales[16];
  unpack_q3_K_scales(b.scales, scales);
  for (int g = 0; g < 16; ++g) {
    const float scale = d * float(scales[g]);
    for (int i = 16 * g; i < 16 * (g + 1); ++i) {
      const bool high = (b.hmask[i % 32] >> (i / 32)) & 1;
      out[i] = scale * float(two_bits(b.qs, i) - (high ? 0 : 4));
    }
  }
}

void decode_block(const BlockQ4_K& b, float out[kSuperBlock]) {
  const float d = to_float(b.d);
  const float dmin = to_float(b.dmin);
  uint8_t scales[8], mins[8];
  unpack_q4_K_scales(b.scales, scales, mins);
  for (int g = 0; g < 8; ++g) {
    const float scale = d * float(scales[g]);
    const float min = dmin * float(mins[g]);
    for (int i = 32 * g; i < 32 * (g + 1); ++i) out[i] = scale * float(k_nibble(b.qs, i)) - min;
  }
}

void decode_block(const BlockQ5_K& b, float out[kSuperBlock]) {
  const float d = to_float(b.d);
  const float dmin = to_float(b.dmin);
  uint8_t scales[8], mins[8];
  unpack_q4_K_scales(b.scales, scales, mins);
  for (int g = 0; g < 8; ++g) {
    const float scale = d * float(scales[g]);
    const float min = dmin * float(mins[g]);
    for (int i = 32 * g; i < 32 * (g + 1); ++i) {
      const int fifth = ((b.qh[i % 32] >> g) & 1) << 4;
      out[i] = scale * float(k_nibble(b.qs, i) | fifth) - min;
    }
  }
}

void decode_block(const BlockQ6_K& b, float out[kSuperBlock]) {
  const float d = to_float(b.d);
  for (int g = 0; g < 16; ++g) {
    const float scale = d * float(b.scales[g]);
    for (int i = 16 * g; i < 16 * (g + 1); ++i) {
      const int h = i / 128, s = (i / 32) % 4, l = i % 32;
      const int low = (b.ql[64 * h + 32 * (s & 1) + l] >> (4 * (s / 2))) & 15;
      const int high = (b.qh[32 * h + l] >> (2 * s)) & 3;
      out[i] = scale * float((low | (high << 4)) - 32);
    }
  }
}

void decode_block(const BlockIQ4_XS& b, float out[kSuperBlock]) {
  const float d = to_float(b.d);
  int8_t scales[8];
  unpack_iq4_xs_scales(b, scales);
  for (int g = 0; g < 8; ++g) {
    const float scale = d * float(scales[g]);
    const uint8_t* qs = b.qs + 16 * g;
    for (int l = 0; l < 16; ++l) {
      out[32 * g + l] = scale * float(kIq4Values[qs[l] & 15]);
      out[32 * g + 16 + l] = scale * float(kIq4Values[qs[l] >> 4]);
    }
  }
}

}  // namespace longkv
