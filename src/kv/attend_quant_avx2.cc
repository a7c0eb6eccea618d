// AVX2 bodies of attend_quant.h; they serve the levels avx2 and avx512.
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "kv/attend_ahead.h"
#include "kv/attend_heads.h"
#include "kv/attend_quant.h"
#include "kv/attend_quant_query.h"
#include "kv/attend_weights_avx2.h"

namespace longkv::avx2 {

namespace {

// Vectors of a prepared query per 64 channels, a pair of groups g and g + 1. The low 128 bits of all belong to group g,
// the high ones to g + 1, as the bytes of two q4_0 groups lie in one load.
//   q4_0: int8 of channels 0-15 | channels 16-31 | 8 floats: scale of q | 8 int32: 8 * sum of q | unused
//   q8_0: int16 of even, odd channels of 0-15 | even, odd channels of 16-31 | 8 floats: scale of q
constexpr int64_t kPairBytes = 160;

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m256i load_two(const uint8_t* low, const uint8_t* high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low))),
                                 _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1);
}
inline __m256i load_low(const uint8_t* low) {
  return _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low)));
}

// Scales of groups g and g + 1 (kHalf: of g alone, then zeros) of four rows: group g's in the low four lanes. `at`:
// byte of the scale of g in a row.
template <bool kHalf>
inline __m256 four_scales(const uint8_t* const* row, int64_t at) {
  const auto bits = [&](int r) {
    if (kHalf) {
      uint16_t one;
      std::memcpy(&one, row[r] + at, sizeof(one));
      return int(one);
    }
    int two;
    std::memcpy(&two, row[r] + at, sizeof(two));
    return two;
  };
  const __m256 x = _mm256_cvtph_ps(_mm_setr_epi32(bits(0), bits(1), bits(2), bits(3)));
  return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
}

// Per 128-bit half the sums of lanes i and i + 2 of a and b: a, b, a, b; of two such results those of four vectors. An
// addition of neighbours, vphaddd, takes twice as long.
inline __m256i two_sums(__m256i a, __m256i b) {
  return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
}
inline __m256i four_sums(__m256i ab, __m256i cd) {
  return _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
}

// Ends the computation of x here: GCC otherwise gathers the products of all heads before it adds them and spills sums.
inline void settle(__m256i& x) { asm volatile("" : "+x"(x)); }

struct Q4Key {
  static constexpr int64_t scales_at(int64_t dim) { return dim / 2; }
  struct Row {
    __m256i low, high;
  };
  // kHalf: only group g exists.
  template <bool kHalf>
  static Row read(const uint8_t* row, int64_t pair) {
    const uint8_t* at = row + pair * 32;
    const __m256i bytes = kHalf ? load_low(at) : load(at);
    const __m256i nibble = _mm256_set1_epi8(15);
    return {_mm256_and_si256(bytes, nibble), _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble)};
  }
  // A row by the pair's channels, to be summed over the lanes of a half. Two vpmaddubsw give at most 2 * 2 * 15 * 127
  // in 16 bits.
  static __m256i product(const Row& k, const uint8_t* q) {
    return _mm256_madd_epi16(
        _mm256_add_epi16(_mm256_maddubs_epi16(k.low, load(q)), _mm256_maddubs_epi16(k.high, load(q + 32))),
        _mm256_set1_epi16(1));
  }
  static __m256i finish(__m256i sums, const uint8_t* q) { return _mm256_sub_epi32(sums, load(q + 96)); }
  static __m256 scale(const uint8_t* q) { return _mm256_loadu_ps(reinterpret_cast<const float*>(q + 64)); }
};

struct Q8Key {
  static constexpr int64_t scales_at(int64_t dim) { return dim; }
  struct Row {
    __m256i even0, odd0, even1, odd1;
  };
  template <bool kHalf>
  static Row read(const uint8_t* row, int64_t pair) {
    const uint8_t* at = row + pair * 64;
    const __m256i x = kHalf ? load_low(at) : load_two(at, at + 32);
    const __m256i y = kHalf ? load_low(at + 16) : load_two(at + 16, at + 48);
    return {_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_srai_epi16(x, 8),
            _mm256_srai_epi16(_mm256_slli_epi16(y, 8), 8), _mm256_srai_epi16(y, 8)};
  }
  // A lane sums 8 products of at most 127 * 32767, a half four lanes: below 2^28.
  static __m256i product(const Row& k, const uint8_t* q) {
    return _mm256_add_epi32(
        _mm256_add_epi32(_mm256_madd_epi16(k.even0, load(q)), _mm256_madd_epi16(k.odd0, load(q + 32))),
        _mm256_add_epi32(_mm256_madd_epi16(k.even1, load(q + 64)), _mm256_madd_epi16(k.odd1, load(q + 96))));
  }
  static __m256i finish(__m256i sums, const uint8_t*) { return sums; }
  static __m256 scale(const uint8_t* q) { return _mm256_loadu_ps(reinterpret_cast<const float*>(q + 128)); }
};

// Adds one pair of groups of four rows to the heads' sums. Two rows at a time: four do not fit the registers.
template <class Key, int kH, bool kHalf>
inline void key_pair(const QuantKeyTile& t, const uint8_t* const* row, int64_t pair, int64_t at, __m256 (&sum)[kH]) {
  const uint8_t* q = t.q + pair * kPairBytes;
  __m256i two[2][kH];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const typename Key::Row a = Key::template read<kHalf>(row[2 * i], pair);
    const typename Key::Row b = Key::template read<kHalf>(row[2 * i + 1], pair);
#pragma GCC unroll 4
    for (int h = 0; h < kH; ++h) {
      two[i][h] = two_sums(Key::product(a, q + h * t.q_stride), Key::product(b, q + h * t.q_stride));
      settle(two[i][h]);
    }
  }
  const __m256 k_scale = four_scales<kHalf>(row, at + 4 * pair);
#pragma GCC unroll 4
  for (int h = 0; h < kH; ++h) {
    const __m256i dots = Key::finish(four_sums(two[0][h], two[1][h]), q + h * t.q_stride);
    sum[h] = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(dots), k_scale), Key::scale(q + h * t.q_stride), sum[h]);
  }
}

template <class Key, int kH>
void key_product_of(const QuantKeyTile& tile) {
  const QuantKeyTile t = tile;  // a copy that stores cannot alias
  const int64_t groups = t.dim / kKvQuantGroup, at = Key::scales_at(t.dim);
  for (int64_t r0 = 0; r0 < t.rows; r0 += 4) {
    prefetch_rows<false>(t.ahead, r0, r0 + 4);
    __m256 sum[kH] = {};
    for (int64_t pair = 0; pair < groups / 2; ++pair) key_pair<Key, kH, false>(t, t.row + r0, pair, at, sum);
    if (groups % 2 != 0) key_pair<Key, kH, true>(t, t.row + r0, groups / 2, at, sum);
#pragma GCC unroll 4
    for (int h = 0; h < kH; ++h) {
      _mm_storeu_ps(t.s + h * t.s_stride + r0,
                    _mm_add_ps(_mm256_castps256_ps128(sum[h]), _mm256_extractf128_ps(sum[h], 1)));
    }
  }
}

template <class Key>
void key_product(const QuantKeyTile& t) {
  with_heads(t.heads, [&](auto heads) { key_product_of<Key, heads>(t); });
}

// Sixteen channels of two rows of a group as two vectors of 8 channels by 2 rows of int16, plus an offset: channels
// 8 * kPart to 8 * kPart + 3 in the low half of the first, 16 more in its high half, those four channels on in the
// second.
struct Pair16 {
  __m256i first, second;
};

struct Q4Value {
  static constexpr int64_t scales_at(int64_t dim) { return dim / 2; }
  static constexpr int kOffset = 8;
  template <int kPart>
  static Pair16 read(const uint8_t* a, const uint8_t* b, int64_t g) {
    const auto twice = [g](const uint8_t* row) {
      return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 16 * g)));
    };
    const __m256i x = twice(a), y = twice(b);
    const __m256i bytes = kPart == 0 ? _mm256_unpacklo_epi8(x, y) : _mm256_unpackhi_epi8(x, y);
    // Low nibbles of the low half, high ones of the high half.
    const __m256i shifted = _mm256_srlv_epi64(bytes, _mm256_setr_epi64x(0, 0, 4, 4));
    const __m256i codes = _mm256_and_si256(shifted, _mm256_set1_epi8(15)), zero = _mm256_setzero_si256();
    return {_mm256_unpacklo_epi8(codes, zero), _mm256_unpackhi_epi8(codes, zero)};
  }
};

struct Q8Value {
  static constexpr int64_t scales_at(int64_t dim) { return dim; }
  static constexpr int kOffset = 0;
  template <int kPart>
  static Pair16 read(const uint8_t* a, const uint8_t* b, int64_t g) {
    const __m256i x = load(a + 32 * g), y = load(b + 32 * g);
    const __m256i bytes = kPart == 0 ? _mm256_unpacklo_epi8(x, y) : _mm256_unpackhi_epi8(x, y);
    const __m256i signs = _mm256_cmpgt_epi8(_mm256_setzero_si256(), bytes);
    return {_mm256_unpacklo_epi8(bytes, signs), _mm256_unpackhi_epi8(bytes, signs)};
  }
};

// Half a group at a time: with four heads its sums and weights fit the registers.
template <class Value, int kH, int kPart>
inline void value_part(const QuantValueTile& t, int64_t g, const TileWeights* w) {
  __m256i sum[kH][2] = {};
  for (int64_t r = 0; r < t.rows; r += 2) {
    const Pair16 v = Value::template read<kPart>(t.row[r], t.row[r + 1], g);
#pragma GCC unroll 4
    for (int h = 0; h < kH; ++h) {
      const __m256i weight = w[h].pair(r);
      sum[h][0] = _mm256_add_epi32(sum[h][0], _mm256_madd_epi16(v.first, weight));
      sum[h][1] = _mm256_add_epi32(sum[h][1], _mm256_madd_epi16(v.second, weight));
      settle(sum[h][0]);
      settle(sum[h][1]);
    }
  }
  for (int h = 0; h < kH; ++h) {
    float* out = t.sums + h * t.stride + g * kKvQuantGroup + 8 * kPart;
    const __m256i offset = _mm256_set1_epi32(Value::kOffset * w[h].total);
    const __m256 scale = _mm256_set1_ps(w[h].scale);
    const __m256i a = _mm256_sub_epi32(sum[h][0], offset), b = _mm256_sub_epi32(sum[h][1], offset);
    add_scaled(_mm256_permute2x128_si256(a, b, 0x20), scale, out);
    add_scaled(_mm256_permute2x128_si256(a, b, 0x31), scale, out + 16);
  }
}

template <class Value, int kH>
inline void value_group(const QuantValueTile& t, int64_t g, const TileWeights* w) {
  value_part<Value, kH, 0>(t, g, w);
  value_part<Value, kH, 1>(t, g, w);
}

template <class Value>
void value_product(const QuantValueTile& t) {
  const int64_t padded = (t.rows + 7) / 8 * 8, groups = t.dim / kKvQuantGroup, at = Value::scales_at(t.dim);
  alignas(32) float scale[2][kAttendTileMax];
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t r = 0; g % 2 == 0 && r < padded; r += 8) {
      const bool half = g + 1 == groups;
      const auto four = half ? &four_scales<true> : &four_scales<false>;
      const __m256 a = four(t.row + r, at + 2 * g), b = four(t.row + r + 4, at + 2 * g);
      _mm256_store_ps(scale[0] + r, _mm256_permute2f128_ps(a, b, 0x20));
      _mm256_store_ps(scale[1] + r, _mm256_permute2f128_ps(a, b, 0x31));
    }
    TileWeights w[4];
    for (int h = 0; h < t.heads; ++h) w[h].assign(t.p + h * t.p_stride, scale[g % 2], padded);
    if (g == 0) prefetch_rows<false>(t.ahead, 0, t.ahead.near_rows);
    with_heads(t.heads, [&](auto heads) { value_group<Value, heads>(t, g, w); });
  }
}

}  // namespace

void prepare_quant_query(KvType type, const float* q, int64_t dim, uint8_t* prepared) {
  std::memset(prepared, 0, size_t((dim + 63) / 64 * kPairBytes));
  const bool q4 = type == KvType::kQ4_0;
  const auto half_of = [&](int64_t g) { return prepared + g / 2 * kPairBytes + g % 2 * 16; };
  round_quant_query(
      type, q, dim,
      [&](int64_t g, int64_t c, int32_t value) {
        if (q4) {
          reinterpret_cast<int8_t*>(half_of(g))[c / 16 * 32 + c % 16] = int8_t(value);
        } else {
          const auto value16 = int16_t(value);
          std::memcpy(half_of(g) + c / 16 * 64 + c % 2 * 32 + c % 16 / 2 * 2, &value16, 2);
        }
      },
      [&](int64_t g, float scale, int32_t total) {
        const int32_t offset = 8 * total;
        for (int64_t i = 0; i < 4; ++i) {
          std::memcpy(half_of(g) + (q4 ? 64 : 128) + 4 * i, &scale, 4);
          if (q4) std::memcpy(half_of(g) + 96 + 4 * i, &offset, 4);
        }
      });
}

void quant_key_product(const QuantKeyTile& tile) {
  tile.type == KvType::kQ4_0 ? key_product<Q4Key>(tile) : key_product<Q8Key>(tile);
}

void quant_value_product(const QuantValueTile& tile) {
  tile.type == KvType::kQ4_0 ? value_product<Q4Value>(tile) : value_product<Q8Value>(tile);
}

}  // namespace longkv::avx2
