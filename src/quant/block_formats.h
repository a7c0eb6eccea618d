// Byte layouts of the quantised weight blocks of GGUF files, shared by the reference decoder and the kernels.
//
// Little-endian, exactly as in the file; `x` below is the decoded value, `i` an index inside the block. Layouts follow
// the GGUF format; the text here is the definition that src/quant/dequantize*.cc and every kernel obey.
#pragma once

#include <cstdint>

#include "base/float16.h"

namespace longkv {

constexpr int kSmallBlock = 32;   // values of q4_0 .. q8_0 and iq4_nl
constexpr int kSuperBlock = 256;  // values of q2_K .. q6_K and iq4_xs

// Blocks of 32. The nibble of value i < 16 is the low half of qs[i]; of value i >= 16 the high half of qs[i - 16].

struct BlockQ4_0 {  // x = d * (q - 8)
  f16_t d;
  uint8_t qs[16];
};
struct BlockQ4_1 {  // x = d * q + m
  f16_t d;
  f16_t m;
  uint8_t qs[16];
};
struct BlockQ5_0 {  // x = d * (q - 16); bit i of qh (32 bits, little-endian) is the fifth bit of value i
  f16_t d;
  uint8_t qh[4];
  uint8_t qs[16];
};
struct BlockQ5_1 {  // x = d * q + m; qh as in q5_0
  f16_t d;
  f16_t m;
  uint8_t qh[4];
  uint8_t qs[16];
};
struct BlockQ8_0 {  // x = d * q
  f16_t d;
  int8_t qs[32];
};
struct BlockIQ4_NL {  // x = d * kIq4Values[q]
  f16_t d;
  uint8_t qs[16];
};

// Super-blocks of 256 with a scale per group of 16 or 32 values.

// x = d * (scales[i/16] & 15) * q - dmin * (scales[i/16] >> 4). Each half of 128 values uses 32 bytes of qs: value
// 128*h + 32*s + l is bits 2s, 2s+1 of qs[32*h + l].
struct BlockQ2_K {
  uint8_t scales[16];
  uint8_t qs[64];
  f16_t d;
  f16_t dmin;
};
// x = d * scale[i/16] * q, scale by unpack_q3_K_scales (-32 .. 31), q in -4 .. 3. Low two bits as in q2_K; a set bit
// i/32 of hmask[i % 32] adds 4 to (low - 4).
struct BlockQ3_K {
  uint8_t hmask[32];
  uint8_t qs[64];
  uint8_t scales[12];
  f16_t d;
};
// x = d * scale[i/32] * q - dmin * min[i/32], both by unpack_q4_K_scales (0 .. 63). Value 64*c + l is the low nibble of
// qs[32*c + l], value 64*c + 32 + l the high one.
struct BlockQ4_K {
  f16_t d;
  f16_t dmin;
  uint8_t scales[12];
  uint8_t qs[128];
};
// As q4_K with a fifth bit: bit i/32 of qh[i % 32].
struct BlockQ5_K {
  f16_t d;
  f16_t dmin;
  uint8_t scales[12];
  uint8_t qh[32];
  uint8_t qs[128];
};
// x = d * scales[i/16] * (q - 32). For value 128*h + 32*s + l (s in 0 .. 3): low nibble bits from ql[64*h + 32*(s & 1)
// + l], its low half for s < 2 and its high half otherwise; bits 4 and 5 are bits 2s, 2s+1 of qh[32*h + l].
struct BlockQ6_K {
  uint8_t ql[128];
  uint8_t qh[64];
  int8_t scales[16];
  f16_t d;
};
// x = d * (scale[i/32] - 32) * kIq4Values[q]. Group g has four low scale bits in nibble g & 1 of scales_l[g/2] and two
// high ones in bits 2g, 2g+1 of scales_h. Nibbles of group g lie in qs[16*g ..] as in a block of 32.
struct BlockIQ4_XS {
  f16_t d;
  uint8_t scales_h[2];  // 16 bits, little-endian
  uint8_t scales_l[4];
  uint8_t qs[128];
};

static_assert(sizeof(BlockQ4_0) == 18);
static_assert(sizeof(BlockQ4_1) == 20);
static_assert(sizeof(BlockQ5_0) == 22);
static_assert(sizeof(BlockQ5_1) == 24);
static_assert(sizeof(BlockQ8_0) == 34);
static_assert(sizeof(BlockIQ4_NL) == 18);
static_assert(sizeof(BlockQ2_K) == 84);
static_assert(sizeof(BlockQ3_K) == 110);
static_assert(sizeof(BlockQ4_K) == 144);
static_assert(sizeof(BlockQ5_K) == 176);
static_assert(sizeof(BlockQ6_K) == 210);
static_assert(sizeof(BlockIQ4_XS) == 136);
static_assert(alignof(BlockQ4_K) == 2 && alignof(BlockIQ4_XS) == 2, "blocks lie at any even address");

// The 16 levels of iq4_nl and iq4_xs.
alignas(16) inline constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                      1,    13,   25,  38,  53,  69,  89,  113};

// Eight 6-bit scales and eight 6-bit minima of q4_K and q5_K from their 12 bytes. Groups 0-3 lie in the low six bits of
// bytes 0-3 (scale) and 4-7 (min); groups 4-7 have their low nibbles in bytes 8-11 and their high two bits in the top
// of bytes 0-7.
inline void unpack_q4_K_scales(const uint8_t packed[12], uint8_t scale[8], uint8_t min[8]) {
  for (int g = 0; g < 4; ++g) {
    scale[g] = packed[g] & 63;
    min[g] = packed[4 + g] & 63;
    scale[4 + g] = uint8_t((packed[8 + g] & 15) | ((packed[g] >> 6) << 4));
    min[4 + g] = uint8_t((packed[8 + g] >> 4) | ((packed[4 + g] >> 6) << 4));
  }
}

// Sixteen scales of q3_K, already minus 32. Low nibbles: groups 0-7 in the low halves of bytes 0-7, groups 8-15 in the
// high halves; the two high bits of group g are bits 2*(g/4), 2*(g/4)+1 of byte 8 + g % 4.
inline void unpack_q3_K_scales(const uint8_t packed[12], int8_t scale[16]) {
  for (int g = 0; g < 16; ++g) {
    const int low = g < 8 ? packed[g] & 15 : packed[g - 8] >> 4;
    const int high = (packed[8 + g % 4] >> (2 * (g / 4))) & 3;
    scale[g] = int8_t((low | (high << 4)) - 32);
  }
}

// Eight scales of iq4_xs, already minus 32.
inline void unpack_iq4_xs_scales(const BlockIQ4_XS& b, int8_t scale[8]) {
  const unsigned high_bits = unsigned(b.scales_h[0]) | unsigned(b.scales_h[1]) << 8;
  for (int g = 0; g < 8; ++g) {
    const unsigned low = (b.scales_l[g / 2] >> (4 * (g & 1))) & 15u;
    scale[g] = int8_t(int(low | (((high_bits >> (2 * g)) & 3u) << 4)) - 32);
  }
}

}  // namespace longkv
