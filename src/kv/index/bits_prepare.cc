// What the one-bit index does to keys and queries before the scan.
#include <algorithm>
#include <cmath>
#include <limits>

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
  float largest = 0;
  bool finite = true;
  for (int64_t n = 0; n < groups * kBitsNibbles; ++n) {
    const float* x = q + 4 * n;
    const float sum = std::abs(x[0]) + std::abs(x[1]) + std::abs(x[2]) + std::abs(x[3]);
    finite &= std::isfinite(sum);
    largest = std::max(largest, sum);
  }
  const float step = finite ? largest / float(kBitsBias) : std::numeric_limits<float>::quiet_NaN();
  const float inverse = finite && largest > 0 ? float(kBitsBias) / largest : 0.0f;
  for (int64_t g = 0; g < groups; ++g, q += kBitsGroup) {
    BitsTables& table = tables[g];
    table.step = step;
    for (int n = 0; n < kBitsNibbles; ++n) {
      const float* x = q + 4 * n;
      for (int p = 0; p < 16; ++p) {
        float sum = 0;
        for (int i = 0; i < 4; ++i) sum += (p >> i & 1) != 0 ? x[i] : -x[i];
        // Adding 1.5 * 2^23 rounds to the nearest whole number without a library call.
        const float level = inverse > 0 ? (sum * inverse + 12582912.0f) - 12582912.0f : 0.0f;
        table.bytes[n][p] = uint8_t(std::clamp(int(level) + kBitsBias, 0, 2 * kBitsBias));
      }
    }
  }
}

void bits_write_token(const float* key, int64_t dim, bool unbiased, uint8_t* tile, int64_t t) {
  if (t == 0) bits_clear_tokens(dim, tile, 0);
  const int64_t groups = bits_groups(dim);
  auto* magnitudes = reinterpret_cast<f16_t*>(tile + bits_sign_bytes(dim) * kBitsTile);
  for (int64_t g = 0; g < groups; ++g, key += kBitsGroup) {
    for (int64_t i = 0; i < kBitsGroup / 8; ++i) {
      unsigned byte = 0;
      for (int c = 0; c < 8; ++c) byte |= unsigned(key[8 * i + c] >= 0) << c;
      tile[(g * (kBitsGroup / 8) + i) * kBitsTile + t] = uint8_t(byte);
    }
    const int64_t channels = std::min(kBitsGroup, dim - g * kBitsGroup);
    float sum = 0, square = 0;
    for (int64_t c = 0; c < channels; ++c) sum += std::abs(key[c]);
    for (int64_t c = 0; c < channels; ++c) square += key[c] * key[c];
    const float magnitude = unbiased ? (sum == 0 ? 0.0f : square / sum) : sum / float(channels);
    magnitudes[g * kBitsTile + bits_magnitude_at(t)] = to_f16(magnitude);
  }
}

void bits_clear_tokens(int64_t dim, uint8_t* tile, int64_t first) {
  auto* magnitudes = reinterpret_cast<f16_t*>(tile + bits_sign_bytes(dim) * kBitsTile);
  for (int64_t g = 0; g < bits_groups(dim); ++g) {
    for (int64_t t = first; t < kBitsTile; ++t) magnitudes[g * kBitsTile + bits_magnitude_at(t)] = f16_t{0};
  }
}

}  // namespace longkv
