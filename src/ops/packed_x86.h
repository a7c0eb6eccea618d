// Reading of packed rows (ops/packed_rows.h) on AVX2 and up. Included by one file per level; internal linkage.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "ops/packed_rows.h"
#include "quant/block_formats.h"

namespace longkv {
namespace {

// kMin: a block has an own minimum; kFifth: quants of five bits.
template <class BlockType, int kOffsetOfType, bool kMinimum, bool kFiveBits>
struct Packed {
  using Block = BlockType;
  static constexpr int kOffset = kOffsetOfType;  // subtracted from the unsigned quants
  static constexpr bool kMin = kMinimum, kFifth = kFiveBits;
  static constexpr int64_t kBytes = kPackedRows * int64_t(sizeof(Block));  // of one column of blocks
  static constexpr int64_t kLevels = kMin ? 32 : 16;                       // where its nibbles start
};
using PackedQ4_0 = Packed<BlockQ4_0, 8, false, false>;
using PackedQ4_1 = Packed<BlockQ4_1, 0, true, false>;
using PackedQ5_0 = Packed<BlockQ5_0, 16, false, true>;
using PackedQ5_1 = Packed<BlockQ5_1, 0, true, true>;

inline __m256 packed_halves(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Bit k of every byte, moved to bit 4.
template <int k>
inline __m256i fifth_bit(__m256i bits) {
  if constexpr (k < 4) bits = _mm256_slli_epi16(bits, 4 - k);
  if constexpr (k > 4) bits = _mm256_srli_epi16(bits, k - 4);
  return _mm256_and_si256(bits, _mm256_set1_epi8(16));
}

struct PackedPair {
  __m256i low;   // values 4 j .. 4 j + 3 of eight rows
  __m256i high;  // values 16 + 4 j .. 16 + 4 j + 3
};

// Unsigned quants of vector j of the column of blocks at `p`.
template <class T, int j>
inline PackedPair packed_levels(const uint8_t* p) {
  const auto vector = [&](int i) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + T::kLevels + 32 * i));
  };
  const __m256i mask = _mm256_set1_epi8(15), v = vector(j);
  PackedPair out{_mm256_and_si256(v, mask), _mm256_and_si256(_mm256_srli_epi16(v, 4), mask)};
  if constexpr (T::kFifth) {
    const __m256i bits = vector(4);
    out.low = _mm256_or_si256(out.low, fifth_bit<j>(bits));
    out.high = _mm256_or_si256(out.high, fifth_bit<j + 4>(bits));
  }
  return out;
}

}  // namespace
}  // namespace longkv
