// AVX2 bodies of attend_quant.h. They serve every x86 level from avx2 on: the products are bound by loads and
// shuffles, not by the width of the multiply.
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "kv/attend_quant.h"
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

// Per 128-bit half the sums of the lanes of four vectors.
inline __m256i half_sums(__m256i a, __m256i b, __m256i c, __m256i d) {
  return _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
}

inline void prefetch(const uint8_t* row, int64_t bytes) {
  int64_t b = 0;
  do {
    _mm_prefetch(reinterpret_cast<const char*>(row + b), _MM_HINT_T0);
    b += 64;
  } while (b < bytes);
}

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
  // Four (rows) by the pair's channels. Two vpmaddubsw give at most 2 * 2 * 15 * 127 in 16 bits.
  static __m256i product(const Row (&k)[4], const uint8_t* q) {
    const __m256i low = load(q), high = load(q + 32), ones = _mm256_set1_epi16(1);
    __m256i sum[4];
    for (int r = 0; r < 4; ++r) {
      sum[r] = _mm256_madd_epi16(
          _mm256_add_epi16(_mm256_maddubs_epi16(k[r].low, low), _mm256_maddubs_epi16(k[r].high, high)), ones);
    }
    return _mm256_sub_epi32(half_sums(sum[0], sum[1], sum[2], sum[3]), load(q + 96));
  }
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
  // A lane sums 8 products of at most 127 * 32767, half_sums() four lanes: below 2^28.
  static __m256i product(const Row (&k)[4], const uint8_t* q) {
    __m256i sum[4];
    for (int r = 0; r < 4; ++r) {
      sum[r] = _mm256_add_epi32(
          _mm256_add_epi32(_mm256_madd_epi16(k[r].even0, load(q)), _mm256_madd_epi16(k[r].odd0, load(q + 32))),
          _mm256_add_epi32(_mm256_madd_epi16(k[r].even1, load(q + 64)), _mm256_madd_epi16(k[r].odd1, load(q + 96))));
    }
    return half_sums(sum[0], sum[1], sum[2], sum[3]);
  }
  static __m256 scale(const uint8_t* q) { return _mm256_loadu_ps(reinterpret_cast<const float*>(q + 128)); }
};

// Adds one pair of groups of four rows to the heads' sums.
template <class Key, int kH, bool kHalf>
inline void key_pair(const QuantKeyTile& t, const uint8_t* const* row, int64_t pair, int64_t at, __m256 (&sum)[kH]) {
  typename Key::Row k[4];
  for (int r = 0; r < 4; ++r) k[r] = Key::template read<kHalf>(row[r], pair);
  const __m256 k_scale = four_scales<kHalf>(row, at + 4 * pair);
#pragma GCC unroll 4
  for (int h = 0; h < kH; ++h) {
    const uint8_t* q = t.q + h * t.q_stride + pair * kPairBytes;
    const __m256 dots = _mm256_mul_ps(_mm256_cvtepi32_ps(Key::product(k, q)), k_scale);
    sum[h] = _mm256_fmadd_ps(dots, Key::scale(q), sum[h]);
  }
}

template <class Key, int kH>
void key_product_of(const QuantKeyTile& tile) {
  const QuantKeyTile t = tile;  // a copy that stores cannot alias
  const int64_t groups = t.dim / kKvQuantGroup, at = Key::scales_at(t.dim);
  for (int64_t r0 = 0; r0 < t.rows; r0 += 4) {
    if (t.ahead != nullptr) {
      for (int64_t r = r0; r < r0 + 4 && r < t.ahead_rows; ++r) prefetch(t.ahead[r], t.ahead_bytes);
    }
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
  switch (t.heads) {
    case 1: return key_product_of<Key, 1>(t);
    case 2: return key_product_of<Key, 2>(t);
    case 3: return key_product_of<Key, 3>(t);
    default: return key_product_of<Key, 4>(t);
  }
}

// Sixteen channels of two rows of a group (kPart 0: channels 0-15, 1: 16-31) as two vectors of 8 channels by 2 rows of
// int16, plus an offset. Unpacking leaves channels 0-3 and 8-11 in the halves of the first, 4-7 and 12-15 in the
// second.
struct Pair16 {
  __m256i first, second;
};

struct Q4Value {
  static constexpr int64_t scales_at(int64_t dim) { return dim / 2; }
  static constexpr int kOffset = 8;
  template <int kPart>
  static Pair16 read(const uint8_t* a, const uint8_t* b, int64_t g) {
    const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a + 16 * g)));
    const __m256i y = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b + 16 * g)));
    const __m256i low = _mm256_unpacklo_epi16(x, y), high = _mm256_unpackhi_epi16(x, y);
    const __m256i nibble = _mm256_set1_epi16(15);
    if constexpr (kPart == 0) return {_mm256_and_si256(low, nibble), _mm256_and_si256(high, nibble)};
    return {_mm256_srli_epi16(low, 4), _mm256_srli_epi16(high, 4)};
  }
};

struct Q8Value {
  static constexpr int64_t scales_at(int64_t dim) { return dim; }
  static constexpr int kOffset = 0;
  template <int kPart>
  static Pair16 read(const uint8_t* a, const uint8_t* b, int64_t g) {
    const int64_t at = 32 * g + 16 * kPart;
    const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a + at)));
    const __m256i y = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b + at)));
    return {_mm256_unpacklo_epi16(x, y), _mm256_unpackhi_epi16(x, y)};
  }
};

// Ends the computation of a and b here: GCC otherwise gathers the products of all heads before it adds them and spills
// sums.
inline void settle(__m256i& a, __m256i& b) { asm volatile("" : "+x"(a), "+x"(b)); }

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
      settle(sum[h][0], sum[h][1]);
    }
  }
  for (int h = 0; h < kH; ++h) {
    float* out = t.sums + h * t.stride + g * kKvQuantGroup + 16 * kPart;
    const __m256i offset = _mm256_set1_epi32(Value::kOffset * w[h].total);
    const __m256 scale = _mm256_set1_ps(w[h].scale);
    const __m256i a = _mm256_sub_epi32(sum[h][0], offset), b = _mm256_sub_epi32(sum[h][1], offset);
    add_scaled(_mm256_permute2x128_si256(a, b, 0x20), scale, out);
    add_scaled(_mm256_permute2x128_si256(a, b, 0x31), scale, out + 8);
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
    if (g == 0 && t.ahead != nullptr) {
      for (int64_t r = 0; r < t.ahead_rows; ++r) prefetch(t.ahead[r], t.ahead_bytes);
    }
    switch (t.heads) {
      case 1: value_group<Value, 1>(t, g, w); break;
      case 2: value_group<Value, 2>(t, g, w); break;
      case 3: value_group<Value, 3>(t, g, w); break;
      default: value_group<Value, 4>(t, g, w); break;
    }
  }
}

}  // namespace

void prepare_quant_query(KvType type, const float* q, int64_t dim, uint8_t* prepared) {
  const auto largest = [&](int64_t begin, int64_t end) {
    float amax = 0.0f;
    for (int64_t c = begin; c < end; ++c) amax = q[c] == q[c] ? std::fmax(amax, std::fabs(q[c])) : INFINITY;
    return amax;
  };
  std::memset(prepared, 0, size_t((dim + 63) / 64 * kPairBytes));
  const bool q4 = type == KvType::kQ4_0;
  const float levels = q4 ? 127.0f : 32767.0f;
  float amax = largest(0, dim);
  for (int64_t g = 0; g < dim / kKvQuantGroup; ++g) {
    uint8_t* pair = prepared + g / 2 * kPairBytes;
    const int64_t lane = g % 2 * 16;  // bytes
    if (q4) amax = largest(g * kKvQuantGroup, (g + 1) * kKvQuantGroup);
    // Scores of a query that is not finite are NaN; below 2^-100 the inverse would not be finite.
    const bool finite = amax <= std::numeric_limits<float>::max();
    const float scale = finite ? (amax < 0x1p-100f ? 0.0f : amax / levels) : NAN;
    const float inverse = finite && scale > 0.0f ? levels / amax : 0.0f;
    int32_t total = 0;
    for (int64_t c = 0; c < kKvQuantGroup; ++c) {
      const float x = q[g * kKvQuantGroup + c] * inverse;
      const auto value = int32_t(inverse == 0.0f ? 0.0f : std::nearbyint(x));
      total += value;
      if (q4) {
        reinterpret_cast<int8_t*>(pair)[c / 16 * 32 + lane + c % 16] = int8_t(value);
      } else {
        const auto value16 = int16_t(value);
        std::memcpy(pair + c / 16 * 64 + c % 2 * 32 + lane + c % 16 / 2 * 2, &value16, 2);
      }
    }
    for (int64_t i = 0; i < 4; ++i) {
      std::memcpy(pair + (q4 ? 64 : 128) + lane + 4 * i, &scale, 4);
      const int32_t offset = 8 * total;
      if (q4) std::memcpy(pair + 96 + lane + 4 * i, &offset, 4);
    }
  }
}

void quant_key_product(const QuantKeyTile& tile) {
  tile.type == KvType::kQ4_0 ? key_product<Q4Key>(tile) : key_product<Q8Key>(tile);
}

void quant_value_product(const QuantValueTile& tile) {
  tile.type == KvType::kQ4_0 ? value_product<Q4Value>(tile) : value_product<Q8Value>(tile);
}

}  // namespace longkv::avx2
