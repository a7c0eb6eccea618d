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

void bits_tables(const float* q, int64_t groups, int width, BitsTables* tables) {
  const int per_nibble = 4 >> width, code_bits = 1 << width;
  const unsigned mask = (1u << code_bits) - 1;
  // Of code c: 2 c - 1 for signs, else c minus the middle of the codes.
  const float slope = width == 0 ? 2.0f : 1.0f, middle = slope * 0.5f * float(mask);
  float largest = 0;
  bool finite = true;
  for (int64_t n = 0; n < groups * kBitsNibbles; ++n) {
    float sum = 0;
    for (int i = 0; i < per_nibble; ++i) sum += std::abs(q[n * per_nibble + i]) * middle;
    finite &= std::isfinite(sum);
    largest = std::max(largest, sum);
  }
  const float step = finite ? largest / float(kBitsBias) : std::numeric_limits<float>::quiet_NaN();
  const float inverse = finite && largest > 0 ? float(kBitsBias) / largest : 0.0f;
  for (int64_t g = 0; g < groups; ++g) {
    BitsTables& table = tables[g];
    table.step = step;
    for (int n = 0; n < kBitsNibbles; ++n, q += per_nibble) {
      for (unsigned p = 0; p < 16; ++p) {
        float sum = 0;
        for (int i = 0; i < per_nibble; ++i) {
          sum += (slope * float(p >> (i * code_bits) & mask) - middle) * q[i];
        }
        // Adding 1.5 * 2^23 rounds to the nearest whole number without a library call.
        const float level = inverse > 0 ? (sum * inverse + 12582912.0f) - 12582912.0f : 0.0f;
        table.bytes[n][p] = uint8_t(std::clamp(int(level) + kBitsBias, 0, 2 * kBitsBias));
      }
    }
  }
}

namespace {

// One bit per channel of a group.
float write_signs(const float* key, int64_t channels, bool unbiased, uint8_t* tile, int64_t t) {
  for (int64_t i = 0; i < kBitsGroup / 8; ++i) {
    unsigned byte = 0;
    for (int c = 0; c < 8; ++c) byte |= unsigned(key[8 * i + c] >= 0) << c;
    tile[i * kBitsTile + t] = uint8_t(byte);
  }
  float sum = 0, square = 0;
  for (int64_t c = 0; c < channels; ++c) sum += std::abs(key[c]);
  for (int64_t c = 0; c < channels; ++c) square += key[c] * key[c];
  if (unbiased) return sum == 0 ? 0.0f : square / sum;
  return sum / float(channels);
}

// Two or four bits per channel of a group: levels from a first scale, then the scale that fits them best.
float write_levels(const float* key, int64_t channels, int width, bool unbiased, uint8_t* tile, int64_t t) {
  const int code_bits = 1 << width, per_byte = 8 / code_bits;
  const float middle = 0.5f * float((1 << code_bits) - 1);
  float largest = 0, sum = 0;
  for (int64_t c = 0; c < channels; ++c) {
    largest = std::max(largest, std::abs(key[c]));
    sum += std::abs(key[c]);
  }
  if (!std::isfinite(sum)) largest = 0;
  // Four levels: the step that suits normal values, 0.996 of their deviation.
  const float scale = width == 1 ? 1.248f * sum / float(channels) : largest / middle;
  const float inverse = largest > 0 ? 1.0f / scale : 0.0f;
  float product = 0, square = 0, own = 0;
  for (int64_t i = 0; i < kBitsGroup / 8; ++i) {
    unsigned byte = 0;
    for (int p = 0; p < per_byte; ++p) {
      const int64_t c = i * per_byte + p;
      const float code = std::clamp(std::nearbyint(key[c] * inverse + middle), 0.0f, 2.0f * middle);
      byte |= unsigned(code) << (p * code_bits);
      if (c < channels) {
        product += key[c] * (code - middle);
        square += (code - middle) * (code - middle);
        own += key[c] * key[c];
      }
    }
    tile[i * kBitsTile + t] = uint8_t(byte);
  }
  if (!std::isfinite(sum)) return std::numeric_limits<float>::quiet_NaN();
  if (unbiased) return product > 0 ? own / product : 0.0f;
  return std::max(0.0f, product / square);
}

}  // namespace

void bits_write_token(const float* key, int64_t dim, int width, bool unbiased, uint8_t* tile, int64_t t) {
  const int64_t bits = dim << width, per_group = kBitsGroup >> width;
  if (t == 0) bits_clear_tokens(bits, tile, 0);
  const int64_t groups = bits_groups(bits);
  auto* magnitudes = reinterpret_cast<f16_t*>(tile + bits_code_bytes(bits) * kBitsTile);
  for (int64_t g = 0; g < groups; ++g, key += per_group) {
    const int64_t channels = std::min(per_group, dim - g * per_group);
    uint8_t* codes = tile + g * (kBitsGroup / 8) * kBitsTile;
    const float magnitude = width == 0 ? write_signs(key, channels, unbiased, codes, t)
                                       : write_levels(key, channels, width, unbiased, codes, t);
    // NaN that x86 makes is negative; what is not finite is found as a large positive half.
    magnitudes[g * kBitsTile + bits_magnitude_at(t)] = to_f16(std::abs(magnitude));
  }
}

void bits_clear_tokens(int64_t bits, uint8_t* tile, int64_t first) {
  auto* magnitudes = reinterpret_cast<f16_t*>(tile + bits_code_bytes(bits) * kBitsTile);
  for (int64_t g = 0; g < bits_groups(bits); ++g) {
    for (int64_t t = first; t < kBitsTile; ++t) magnitudes[g * kBitsTile + bits_magnitude_at(t)] = f16_t{0};
  }
}

}  // namespace longkv
