// Decoding of weight blocks to the interleaved form of matmul_tile.h, compiled once per instruction-set level: included
// by NAME_LEVEL.cc files only, inside which everything here has internal linkage.
#pragma once

#include <cstring>

#include "ops/matmul_tile.h"
#include "quant/block_formats.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace longkv {
namespace {

inline float half_to_float(f16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h.bits);
#else
  return to_float(h);
#endif
}

struct BlockScales {
  float scale[8];       // per group of 32
  float offset[16];     // per offset group
  int16_t scale16[16];  // per 16 values; kGroup16
};

// u[i] = levels of the low nibbles of qs[0 .. n), u[n + i] of the high ones; n is 16, 32 or 64. A level is the nibble
// itself or, with a codebook, kIq4Values of it. Stores are as wide as the loads that follow them.
template <int n, bool codebook = false>
inline void unpack_nibbles(const uint8_t* qs, uint8_t* u) {
#if defined(__AVX2__)
  const __m256i mask = _mm256_set1_epi8(15);
  const auto finish = [&](__m256i levels, uint8_t* out) {
    levels = _mm256_and_si256(levels, mask);
    if constexpr (codebook) {
      const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kIq4Values));
      levels = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), levels);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), levels);
  };
  if constexpr (n == 16) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(qs));
    finish(_mm256_set_m128i(_mm_srli_epi16(packed, 4), packed), u);
  } else {
    for (int i = 0; i < n; i += 32) {
      const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(qs + i));
      finish(packed, u + i);
      finish(_mm256_srli_epi16(packed, 4), u + n + i);
    }
  }
#else
  for (int i = 0; i < n; ++i) {
    u[i] = codebook ? uint8_t(kIq4Values[qs[i] & 15]) : uint8_t(qs[i] & 15);
    u[n + i] = codebook ? uint8_t(kIq4Values[qs[i] >> 4]) : uint8_t(qs[i] >> 4);
  }
#endif
}

// u[i] |= (bits `shift` .. of from[i], cut by `mask`) << left, for 32 values.
inline void add_bits(const uint8_t* from, int shift, int mask, int left, uint8_t* u) {
#if defined(__AVX2__)
  // Shifts of 16-bit lanes: bits that cross a byte border are cut by the mask.
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m256i kept = _mm256_and_si256(_mm256_srli_epi16(bits, shift), _mm256_set1_epi8(char(mask)));
  __m256i* out = reinterpret_cast<__m256i*>(u);
  _mm256_storeu_si256(out, _mm256_or_si256(_mm256_loadu_si256(out), _mm256_slli_epi16(kept, left)));
#else
  for (int i = 0; i < 32; ++i) u[i] = uint8_t(u[i] | (((from[i] >> shift) & mask) << left));
#endif
}

// Value i gets bit i of qh as its fifth bit.
inline void add_fifth_bits(const uint8_t qh[4], uint8_t* u) {
#if defined(__AVX2__)
  int32_t bits;
  std::memcpy(&bits, qh, 4);
  const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit_of = _mm256_set1_epi64x(int64_t(0x8040201008040201ull));
  const __m256i spread = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), byte_of), bit_of);
  const __m256i fifth = _mm256_and_si256(_mm256_cmpeq_epi8(spread, bit_of), _mm256_set1_epi8(16));
  __m256i* out = reinterpret_cast<__m256i*>(u);
  _mm256_storeu_si256(out, _mm256_or_si256(_mm256_loadu_si256(out), fifth));
#else
  for (int byte = 0; byte < 4; ++byte) {
    for (int bit = 0; bit < 8; ++bit) u[8 * byte + bit] |= uint8_t(((qh[byte] >> bit) & 1) << 4);
  }
#endif
}

template <TensorType type>
struct Decoder;

template <>
struct Decoder<TensorType::kQ4_0> {
  using Block = BlockQ4_0;
  static constexpr PanelType kType{PanelForm::kGroup32, 8, 0, 32};
  static void decode(const Block& b, uint8_t* u, BlockScales& s) {
    unpack_nibbles<16>(b.qs, u);
    s.scale[0] = half_to_float(b.d);
  }
};

template <>
struct Decoder<TensorType::kQ4_1> {
  using Block = BlockQ4_1;
  static constexpr PanelType kType{PanelForm::kGroup32, 0, 32, 32};
  static void decode(const Block& b, uint8_t* u, BlockScales& s) {
    unpack_nibbles<16>(b.qs, u);
    s.scale[0] = half_to_float(b.d);
    s.offset[0] = half_to_float(b.m);
  }
};

template <>
struct Decoder<TensorType::kQ5_0> {
  using Block = BlockQ5_0;
  static constexpr PanelType kType{PanelForm::kGroup32, 16, 0, 32};
  static void decode(const Block& b, uint8_t* u, BlockScales& s) {
    unpack_nibbles<16>(b.qs, u);
    add_fifth_bits(b.qh, u);
    s.scale[0] = half_to_float(b.d);
  }
};

// Types with 5 bits and a minimum are centred too: 16-bit sums of u - 16 over a group cannot overflow, those of u can.
template <>
struct Decoder<TensorType::kQ5_1> {
  using Block = BlockQ5_1;
  static constexpr PanelType kType{PanelForm::kGroup32, 16, 32, 32};
  static void decode(const Block& b, uint8_t* u, BlockScales& s) {
    unpack_nibbles<16>(b.qs, u);
    add_fifth_bits(b.qh, u);
    s.scale[0] = half_to_float(b.d);
    s.offset[0] = half_to_float(b.m) + 16.0f * s.scale[0];
  }
};

template <>
struct Decoder<TensorType::kQ8_0> {
  using Block = BlockQ8_0;
  static constexpr PanelType kType{PanelForm::kByte, 0, 0, 32};
  static void decode(const Block& b, uint8_t* u, BlockScales& s) {
    std::memcpy(u, b.qs, 32);
    s.scale[0] = half_to_float(b.d);
  }
};

template <>
struct Decoder<TensorType::kIQ4_NL> {
  using Block = BlockIQ4_NL;
  static constexpr PanelType kType{PanelForm::kByte, 0, 0, 32};
  static void decode(const Block& b, uint8_t* u, BlockScales& s) {
    unpack_nibbles<16, true>(b.qs, u);
    s.scale[0] = half_to_float(b.d);
  }
};

template <>
struct Decoder<TensorType::kIQ4_XS> {
  using Block = BlockIQ4_XS;
  static constexpr PanelType kType{PanelForm::kByte, 0, 0, 256};
  static void decode(const Block& b, uint8_t* u, BlockScales& s) {
    int8_t scale[8];
    unpack_iq4_xs_scales(b, scale);
    const float d = half_to_float(b.d);
    for (int g = 0; g < 8; ++g) {
      unpack_nibbles<16, true>(b.qs + 16 * g, u + 32 * g);
      s.scale[g] = d * float(scale[g]);
    }
  }
};

template <>
struct Decoder<TensorType::kQ2_K> {
  using Block = BlockQ2_K;
  static constexpr PanelType kType{PanelForm::kGroup16, 0, 16, 256};
  static void decode(const Block& b, uint8_t* u, BlockScales& s) {
    std::memset(u, 0, kSuperBlock);
    for (int i = 0; i < 8; ++i) add_bits(b.qs + 32 * (i / 4), 2 * (i % 4), 3, 0, u + 32 * i);
    const float d = half_to_float(b.d), dmin = half_to_float(b.dmin);
    for (int g = 0; g < 8; ++g) s.scale[g] = d;
    for (int g = 0; g < 16; ++g) {
      s.scale16[g] = b.scales[g] & 15;
      s.offset[g] = -dmin * float(b.scales[g] >> 4);
    }
  }
};

template <>
struct Decoder<TensorType::kQ3_K> {
  using Block = BlockQ3_K;
  static constexpr PanelType kType{PanelForm::kGroup16, 4, 0, 256};
  static void decode(const Block& b, uint8_t* u, BlockScales& s) {
    std::memset(u, 0, kSuperBlock);
    for (int i = 0; i < 8; ++i) {
      add_bits(b.qs + 32 * (i / 4), 2 * (i % 4), 3, 0, u + 32 * i);
      add_bits(b.hmask, i, 1, 2, u + 32 * i);
    }
    int8_t scale[16];
    unpack_q3_K_scales(b.scales, scale);
    const float d = half_to_float(b.d);
    for (int g = 0; g < 8; ++g) s.scale[g] = d;
    for (int g = 0; g < 16; ++g) s.scale16[g] = scale[g];
  }
};

template <>
struct Decoder<TensorType::kQ4_K> {
  using Block = BlockQ4_K;
  static constexpr PanelType kType{PanelForm::kGroup32, 0, 32, 256};
  static void decode(const Block& b, uint8_t* u, BlockScales& s) {
    for (int c = 0; c < 4; ++c) unpack_nibbles<32>(b.qs + 32 * c, u + 64 * c);
    uint8_t scale[8], min[8];
    unpack_q4_K_scales(b.scales, scale, min);
    const float d = half_to_float(b.d), dmin = half_to_float(b.dmin);
    for (int g = 0; g < 8; ++g) {
      s.scale[g] = d * float(scale[g]);
      s.offset[g] = -dmin * float(min[g]);
    }
  }
};

template <>
struct Decoder<TensorType::kQ5_K> {
  using Block = BlockQ5_K;
  static constexpr PanelType kType{PanelForm::kGroup32, 16, 32, 256};
  static void decode(const Block& b, uint8_t* u, BlockScales& s) {
    for (int c = 0; c < 4; ++c) unpack_nibbles<32>(b.qs + 32 * c, u + 64 * c);
    for (int g = 0; g < 8; ++g) add_bits(b.qh, g, 1, 4, u + 32 * g);
    uint8_t scale[8], min[8];
    unpack_q4_K_scales(b.scales, scale, min);
    const float d = half_to_float(b.d), dmin = half_to_float(b.dmin);
    for (int g = 0; g < 8; ++g) {
      s.scale[g] = d * float(scale[g]);
      s.offset[g] = 16.0f * s.scale[g] - dmin * float(min[g]);
    }
  }
};

template <>
struct Decoder<TensorType::kQ6_K> {
  using Block = BlockQ6_K;
  static constexpr PanelType kType{PanelForm::kGroup16, 32, 0, 256};
  static void decode(const Block& b, uint8_t* u, BlockScales& s) {
    for (int h = 0; h < 2; ++h) unpack_nibbles<64>(b.ql + 64 * h, u + 128 * h);
    for (int i = 0; i < 8; ++i) add_bits(b.qh + 32 * (i / 4), 2 * (i % 4), 3, 4, u + 32 * i);
    const float d = half_to_float(b.d);
    for (int g = 0; g < 8; ++g) s.scale[g] = d;
    for (int g = 0; g < 16; ++g) s.scale16[g] = b.scales[g];
  }
};

// Interleave::store(levels[16][columns], columns, type, dst, group) writes the layout of a level from its group `group`
// of 32 columns on.
template <TensorType type, class Interleave>
void decode_rows(const Weight& w, int64_t row, int valid, int64_t col, int64_t columns, const Panel& panel) {
  using D = Decoder<type>;
  using Block = typename D::Block;
  constexpr PanelType kType = D::kType;
  constexpr int kValues = int(kType.block), kGroups = kValues / 32;
  constexpr int kOffsets = kType.offset_group == 0 ? 0 : kValues / kType.offset_group;
  alignas(64) uint8_t levels[kTileRows][kValues];
  BlockScales s;
  if (valid < kTileRows) {
    std::memset(levels, 0, sizeof(levels));
    std::memset(panel.scale, 0, size_t(columns / 32) * kTileRows * sizeof(float));
    if constexpr (kOffsets > 0) {
      std::memset(panel.offset, 0, size_t(columns / kType.offset_group) * kTileRows * sizeof(float));
    }
    if constexpr (kType.form == PanelForm::kGroup16) {
      std::memset(panel.scale16, 0, size_t(columns / 16) * kTileRows * 2 * sizeof(int16_t));
    }
  }
  const uint8_t* first = w.row(row) + col / kValues * int64_t(sizeof(Block));
  for (int64_t b = 0; b < columns / kValues; ++b) {
    for (int r = 0; r < valid; ++r) {
      const uint8_t* src = first + r * w.row_bytes + b * int64_t(sizeof(Block));
      D::decode(*reinterpret_cast<const Block*>(src), levels[r], s);
      for (int g = 0; g < kGroups; ++g) panel.scale[(b * kGroups + g) * kTileRows + r] = s.scale[g];
      for (int g = 0; g < kOffsets; ++g) panel.offset[(b * kOffsets + g) * kTileRows + r] = s.offset[g];
      if constexpr (kType.form == PanelForm::kGroup16) {
        for (int g = 0; g < kValues / 16; ++g) {
          int16_t* pair = panel.scale16 + ((b * (kValues / 16) + g) * kTileRows + r) * 2;
          pair[0] = pair[1] = s.scale16[g];
        }
      }
    }
    Interleave::store(&levels[0][0], kValues, kType, panel.levels, b * kGroups);
  }
}

template <class Interleave>
void decode_any(const Weight& w, int64_t row, int valid, int64_t col, int64_t columns, const Panel& panel) {
  switch (w.type) {
    case TensorType::kQ4_0: return decode_rows<TensorType::kQ4_0, Interleave>(w, row, valid, col, columns, panel);
    case TensorType::kQ4_1: return decode_rows<TensorType::kQ4_1, Interleave>(w, row, valid, col, columns, panel);
    case TensorType::kQ5_0: return decode_rows<TensorType::kQ5_0, Interleave>(w, row, valid, col, columns, panel);
    case TensorType::kQ5_1: return decode_rows<TensorType::kQ5_1, Interleave>(w, row, valid, col, columns, panel);
    case TensorType::kQ8_0: return decode_rows<TensorType::kQ8_0, Interleave>(w, row, valid, col, columns, panel);
    case TensorType::kQ2_K: return decode_rows<TensorType::kQ2_K, Interleave>(w, row, valid, col, columns, panel);
    case TensorType::kQ3_K: return decode_rows<TensorType::kQ3_K, Interleave>(w, row, valid, col, columns, panel);
    case TensorType::kQ4_K: return decode_rows<TensorType::kQ4_K, Interleave>(w, row, valid, col, columns, panel);
    case TensorType::kQ5_K: return decode_rows<TensorType::kQ5_K, Interleave>(w, row, valid, col, columns, panel);
    case TensorType::kQ6_K: return decode_rows<TensorType::kQ6_K, Interleave>(w, row, valid, col, columns, panel);
    case TensorType::kIQ4_NL: return decode_rows<TensorType::kIQ4_NL, Interleave>(w, row, valid, col, columns, panel);
    case TensorType::kIQ4_XS: return decode_rows<TensorType::kIQ4_XS, Interleave>(w, row, valid, col, columns, panel);
    case TensorType::kF32:
    case TensorType::kF16:
    case TensorType::kBF16: return;  // no int8 form: panel_type() is null and the driver never comes here
  }
}

}  // namespace
}  // namespace longkv
