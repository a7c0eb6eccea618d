// What the one-bit index does to keys and queries before the scan.
#include <algorithm>
#include <cmath>

#include "kv/index/bits_layout.h"

namespace longkv {

void hadamard_rows(float* x, int64_t dim) {
  const int64_t run = dim & -dim;  // the largest power of two that divides dim
  const float norm = 1.0f / std::sqrt(float(run));
  for (int64_t first = 0; first < dim; first += run) {
    float* r = x + first;
    for (int64_t half = 1; half < run; half *= 2) {
      for (int64_t i = 0; i < run; i += 2 * half) {
        for (int64_t k = i; k < i + half; ++k) {
          const float a = r[k], b = r[k + half];
          r[k] = a + b;
          r[k + half] = a - b;
        }
      }
    }
    for (int64_t i = 0; i < run; ++i) r[i] *= norm;
  }
}

void bits_tables(const float* q, int64_t groups, BitsTables* tables) {
  for (int64_t g = 0; g < groups; ++g, q += kBitsGroup) {
    BitsTables& table = tables[g];
    float largest = 0;
    for (int n = 0; n < kBitsNibbles; ++n) {
      const float* x = q + 4 * n;
      largest = std::max(largest, std::abs(x[0]) + std::abs(x[1]) + std::abs(x[2]) + std::abs(x[3]));
    }
    table.step = largest / float(kBitsBias);
    const float inverse = largest > 0 && std::isfinite(largest) ? float(kBitsBias) / largest : 0.0f;
    for (int n = 0; n < kBitsNibbles; ++n) {
      const float* x = q + 4 * n;
      for (int p = 0; p < 16; ++p) {
        float sum = 0;
        for (int i = 0; i < 4; ++i) sum += (p >> i & 1) != 0 ? x[i] : -x[i];
        // Adding 1.5 * 2^23 rounds to the nearest whole number without a library call.
        // Adding 1.5 * 2^23 rounds to the nearest whole number without a library call.
        float level = inverse > 0 ? (sum * inverse + 12582912.0f) - 12582912.0f : 0.0f;
        if (level != level) {  // a NaN query scores NaN
          table.step = level;
          level = 0;
        }
        table.bytes[n][p] = uint8_t(std::clamp(int(level) + kBitsBias, 0, 2 * kBitsBias));
      }
    }
  }
}

void bits_write_token(const float* key, int64_t dim, uint8_t* tile, int64_t t) {
  const int64_t groups = bits_groups(dim);
  auto* magnitudes = reinterpret_cast<f16_t*>(tile + groups * (kBitsGroup / 8) * kBitsTile);
  for (int64_t g = 0; g < groups; ++g, key += kBitsGroup) {
    for (int64_t i = 0; i < kBitsGroup / 8; ++i) {
      unsigned byte = 0;
      for (int c = 0; c < 8; ++c) byte |= unsigned(key[8 * i + c] >= 0) << c;
      tile[(g * (kBitsGroup / 8) + i) * kBitsTile + t] = uint8_t(byte);
    }
    const int64_t channels = std::min(kBitsGroup, dim - g * kBitsGroup);
    float sum = 0;
    for (int64_t c = 0; c < channels; ++c) sum += std::abs(key[c]);
    magnitudes[g * kBitsTile + t] = to_f16(sum / float(channels));
  }
}

}  // namespace longkv
