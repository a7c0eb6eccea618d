// Blocks of 32 values: q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl.
#include "quant/dequantize.h"

namespace longkv {

namespace {

constexpr int kHalf = kSmallBlock / 2;

int nibble(const uint8_t* qs, int i) { return i < kHalf ? qs[i] & 15 : qs[i - kHalf] >> 4; }

int fifth_bit(const uint8_t qh[4], int i) { return ((qh[i / 8] >> (i % 8)) & 1) << 4; }

}  // namespace

void decode_block(const BlockQ4_0& b, float out[kSmallBlock]) {
  const float d = to_float(b.d);
  for (int i = 0; i < kSmallBlock; ++i) out[i] = d * float(nibble(b.qs, i) - 8);
}

void decode_block(const BlockQ4_1& b, float out[kSmallBlock]) {
  const float d = to_float(b.d);
  const float m = to_float(b.m);
  for (int i = 0; i < kSmallBlock; ++i) out[i] = d * float(nibble(b.qs, i)) + m;
}

void decode_block(const BlockQ5_0& b, float out[kSmallBlock]) {
  const float d = to_float(b.d);
  for (int i = 0; i < kSmallBlock; ++i) out[i] = d * float((nibble(b.qs, i) | fifth_bit(b.qh, i)) - 16);
}

void decode_block(const BlockQ5_1& b, float out[kSmallBlock]) {
  const float d = to_float(b.d);
  const float m = to_float(b.m);
  for (int i = 0; i < kSmallBlock; ++i) out[i] = d * float(nibble(b.qs, i) | fifth_bit(b.qh, i)) + m;
}

void decode_block(const BlockQ8_0& b, float out[kSmallBlock]) {
  const float d = to_float(b.d);
  for (int i = 0; i < kSmallBlock; ++i) out[i] = d * float(b.qs[i]);
}

void decode_block(const BlockIQ4_NL& b, float out[kSmallBlock]) {
  const float d = to_float(b.d);
  for (int i = 0; i < kSmallBlock; ++i) out[i] = d * float(kIq4Values[nibble(b.qs, i)]);
}

}  // namespace longkv
