#include "kv/codec/kivi.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/float16.h"

namespace longkv {

namespace {

struct Range {
  float lo = std::numeric_limits<float>::infinity();
  float hi = -std::numeric_limits<float>::infinity();
  float poison = 0.0f;  // NaN when a value is not finite

  void add(float x) {
    lo = x < lo ? x : lo;
    hi = x > hi ? x : hi;
    poison += x * 0.0f;
  }
};

// What a group of values is encoded with. Codes are formed with the scale and minimum as stored, so that their rounding
// does not add to that of the codes.
struct Grid {
  f16_t scale, minimum;
  float inverse, base;

  Grid(const Range& range, int levels) {
    scale = to_f16((range.hi - range.lo) / float(levels) + range.poison);
    minimum = to_f16(range.lo + range.poison);
    const float s = to_float(scale);
    inverse = s > 0.0f ? 1.0f / s : 0.0f;
    base = s == s ? to_float(minimum) : 0.0f;
  }
};

inline int code_of(float x, float base, float inverse, int levels) {
  const float q = (x - base) * inverse;
  // Adding 1.5 * 2^23 rounds to nearest even.
  const float clamped = std::min(std::max(q, 0.0f), float(levels));
  return int((clamped + 0x1.8p23f) - 0x1.8p23f);
}

inline float half_at(const uint8_t* halves, int64_t i) {
  f16_t h;
  std::memcpy(&h, halves + 2 * i, sizeof(h));
  return to_float(h);
}

inline void set_half(uint8_t* halves, int64_t i, f16_t h) { std::memcpy(halves + 2 * i, &h, sizeof(h)); }

}  // namespace

void kivi_encode_keys(KvType type, const float* src, int64_t src_stride, int64_t dim, uint8_t* block) {
  const int bits = kivi_bits(type), levels = (1 << bits) - 1;
  const int64_t code_bytes = dim * kKiviRows * bits / 8;
  uint8_t* scales = block + code_bytes;
  uint8_t* minima = scales + 2 * dim;
  constexpr int64_t kStep = 32;
  for (int64_t c0 = 0; c0 < dim; c0 += kStep) {
    const int64_t step = std::min(kStep, dim - c0);
    Range range[kStep];
    for (int64_t r = 0; r < kKiviRows; ++r) {
      for (int64_t c = 0; c < step; ++c) range[c].add(src[r * src_stride + c0 + c]);
    }
    float base[kStep], inverse[kStep];
    for (int64_t c = 0; c < step; ++c) {
      const Grid grid(range[c], levels);
      set_half(scales, c0 + c, grid.scale);
      set_half(minima, c0 + c, grid.minimum);
      base[c] = grid.base;
      inverse[c] = grid.inverse;
    }
    // The rows w, w + 8, ... of a byte.
    const int64_t vectors = bits / 2, per_byte = 8 / bits;
    for (int64_t v = 0; v < vectors; ++v) {
      for (int64_t w = 0; w < 8; ++w) {
        uint8_t bytes[kStep] = {};
        for (int64_t j = 0; j < per_byte; ++j) {
          const float* row = src + (16 * v + 8 * j + w) * src_stride + c0;
          for (int64_t c = 0; c < step; ++c) {
            bytes[c] = uint8_t(bytes[c] | code_of(row[c], base[c], inverse[c], levels) << (bits * j));
          }
        }
        for (int64_t i = 0; i < step / 4; ++i) {
          std::memcpy(block + (((c0 / 4 + i) * vectors + v) * 8 + w) * 4, bytes + 4 * i, 4);
        }
      }
    }
  }
}

void kivi_encode_values(KvType type, const float* src, int64_t src_stride, int64_t dim, uint8_t* block) {
  const int bits = kivi_bits(type), levels = (1 << bits) - 1;
  const int64_t groups = dim / kKiviRows;
  const int64_t group_bytes = kKiviRows * kKiviRows * bits / 8;
  uint8_t* scales = block + groups * group_bytes;
  uint8_t* minima = scales + 2 * dim;
  const int64_t pairs = 4 / bits;  // row pairs of a vector
  for (int64_t g = 0; g < groups; ++g) {
    uint8_t* codes = block + g * group_bytes;
    std::memset(codes, 0, size_t(group_bytes));
    for (int64_t r = 0; r < kKiviRows; ++r) {
      const float* row = src + r * src_stride + g * kKiviRows;
      Range range;
      for (int64_t c = 0; c < kKiviRows; ++c) range.add(row[c]);
      const Grid grid(range, levels);
      set_half(scales, g * kKiviRows + r, grid.scale);
      set_half(minima, g * kKiviRows + r, grid.minimum);
      const int64_t u = r / (2 * pairs), m = r / 2 % pairs, h = r % 2;
      uint16_t half[8];  // of words 0 to 7: this row's bits
      std::memset(half, 0, sizeof(half));
      for (int64_t c = 0; c < kKiviRows; ++c) {
        const int code = code_of(row[c], grid.base, grid.inverse, levels);
        half[c % 8] = uint16_t(half[c % 8] | code << (bits * (4 * m + c / 8)));
      }
      for (int64_t w = 0; w < 8; ++w) {
        uint8_t* at = codes + (u * 8 + w) * 4 + 2 * h;
        uint16_t old;
        std::memcpy(&old, at, 2);
        old = uint16_t(old | half[w]);
        std::memcpy(at, &old, 2);
      }
    }
  }
}

void kivi_decode_key(KvType type, const uint8_t* block, int64_t row, int64_t dim, float* dst) {
  const int bits = kivi_bits(type), levels = (1 << bits) - 1;
  const int64_t vectors = bits / 2, per_byte = 8 / bits;
  const uint8_t* scales = block + dim * kKiviRows * bits / 8;
  const uint8_t* minima = scales + 2 * dim;
  const int64_t v = row / (8 * per_byte), j = row / 8 % per_byte, w = row % 8;
  for (int64_t c = 0; c < dim; ++c) {
    const uint8_t byte = block[((c / 4 * vectors + v) * 8 + w) * 4 + c % 4];
    dst[c] = float(byte >> (bits * j) & levels) * half_at(scales, c) + half_at(minima, c);
  }
}

void kivi_decode_value(KvType type, const uint8_t* block, int64_t row, int64_t dim, float* dst) {
  const int bits = kivi_bits(type), levels = (1 << bits) - 1;
  const int64_t groups = dim / kKiviRows, group_bytes = kKiviRows * kKiviRows * bits / 8;
  const uint8_t* scales = block + groups * group_bytes;
  const uint8_t* minima = scales + 2 * dim;
  const int64_t pairs = 4 / bits;
  const int64_t u = row / (2 * pairs), m = row / 2 % pairs, h = row % 2;
  for (int64_t c = 0; c < dim; ++c) {
    const int64_t g = c / kKiviRows, i = c % kKiviRows / 8, w = c % 8;
    uint16_t half;
    std::memcpy(&half, block + g * group_bytes + (u * 8 + w) * 4 + 2 * h, 2);
    const int code = half >> (bits * (4 * m + i)) & levels;
    dst[c] = float(code) * half_at(scales, g * kKiviRows + row) + half_at(minima, g * kKiviRows + row);
  }
}

}  // namespace longkv
