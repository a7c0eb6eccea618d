// What the x86 levels of the int8 prompt kernel share. Included by NAME_LEVEL.cc files only: internal linkage.
#pragma once

#include <immintrin.h>

#include "ops/matmul_decode-inl.h"
#include "ops/packed_x86.h"

namespace longkv {
namespace {

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

inline int32_t load32(const void* p) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  return bits;
}

// rows[r] holds eight 32-bit elements of row r; afterwards rows[i] holds element i of the eight rows.
inline void transpose8x8(__m256i rows[8]) {
  __m256i a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
  }
}

// [column / 4][16 rows][4 columns] unsigned bytes; kByte levels move from signed to unsigned by 128.
struct ByteInterleave {
  static void store(const uint8_t* levels, int columns, const PanelType& type, uint8_t* dst, int64_t group) {
    const __m256i flip = _mm256_set1_epi8(type.form == PanelForm::kByte ? char(0x80) : 0);
    dst += group * 32 * kTileRows;
    __m256i rows[8];
    for (int c = 0; c < columns; c += 32) {
      for (int half = 0; half < 2; ++half) {
        for (int r = 0; r < 8; ++r) rows[r] = _mm256_xor_si256(load(levels + (half * 8 + r) * columns + c), flip);
        transpose8x8(rows);
        for (int i = 0; i < 8; ++i) longkv::store(dst + i * 64 + half * 32, rows[i]);
      }
      dst += 512;
    }
  }
};

// The unsigned level that stands for 0 in what ByteInterleave writes.
inline int byte_zero(const PanelType& type) { return type.form == PanelForm::kByte ? 128 : type.zero; }

// Packed rows hold eight rows side by side as panels do, so that decoding them is splitting their nibbles.
template <TensorType type, class T>
void decode_packed(const Weight& w, int64_t row, int valid, int64_t col, int64_t columns, const Panel& panel) {
  constexpr bool kOffset = Decoder<type>::kType.offset_group != 0;
  static_assert(Decoder<type>::kType.form == PanelForm::kGroup32);
  for (int half = 0; half < kTileRows / kPackedRows; ++half) {
    const int64_t first = row + half * kPackedRows;
    const uint8_t* p = w.packed + first * w.row_bytes + col / kSmallBlock * T::kBytes;
    uint8_t* levels = panel.levels + half * 32;
    float* scale = panel.scale + half * kPackedRows;
    float* offset = kOffset ? panel.offset + half * kPackedRows : nullptr;
    const bool there = half * kPackedRows < valid;
    for (int64_t b = 0; b < columns / kSmallBlock; ++b) {
      const auto vector = [&]<int j>() {
        const PackedPair pair =
            there ? packed_levels<T, j>(p) : PackedPair{_mm256_setzero_si256(), _mm256_setzero_si256()};
        store(levels + j * 64, pair.low);
        store(levels + (j + 4) * 64, pair.high);
      };
      [&]<int... j>(std::integer_sequence<int, j...>) { (vector.template operator()<j>(), ...); }
      (std::make_integer_sequence<int, 4>());
      const __m256 d = there ? packed_halves(p) : _mm256_setzero_ps();
      _mm256_storeu_ps(scale, d);
      if constexpr (kOffset) {
        const __m256 m = there ? packed_halves(p + 16) : _mm256_setzero_ps();
        _mm256_storeu_ps(offset, _mm256_fmadd_ps(_mm256_set1_ps(float(Decoder<type>::kType.zero)), d, m));
        offset += kTileRows;
      }
      p += T::kBytes;
      levels += 32 * kTileRows;
      scale += kTileRows;
    }
  }
}

template <class Interleave>
void decode_x86(const Weight& w, int64_t row, int valid, int64_t col, int64_t columns, const Panel& panel) {
  if (w.packed == nullptr) return decode_any<Interleave>(w, row, valid, col, columns, panel);
  switch (w.type) {
    case TensorType::kQ4_0: return decode_packed<TensorType::kQ4_0, PackedQ4_0>(w, row, valid, col, columns, panel);
    case TensorType::kQ4_1: return decode_packed<TensorType::kQ4_1, PackedQ4_1>(w, row, valid, col, columns, panel);
    case TensorType::kQ5_0: return decode_packed<TensorType::kQ5_0, PackedQ5_0>(w, row, valid, col, columns, panel);
    case TensorType::kQ5_1: return decode_packed<TensorType::kQ5_1, PackedQ5_1>(w, row, valid, col, columns, panel);
    default: return decode_any<Interleave>(w, row, valid, col, columns, panel);
  }
}

}  // namespace
}  // namespace longkv
