// AVX-512 VNNI bodies of attend_quant.h. Rows are turned over as they are loaded: of keys a lane belongs to a row, of
// values to a channel, so that sums need no additions across lanes and all heads share the work.
#include <cstring>

#include "kv/attend_ahead.h"
#include "kv/attend_heads.h"
#include "kv/attend_kernel.h"
#include "kv/attend_quant.h"
#include "kv/attend_quant_query.h"
#include "kv/attend_x86_512.h"

namespace longkv::avx512vnni {

namespace {

// A prepared query, per group of 32 channels:
//   q4_0: 32 int8 in order | at 64 float: scale of the group | int32: 8 * sum of q
//   q8_0: per four channels int16 of the first and third, second and fourth | at 64 float: scale of the head
constexpr int64_t kGroupBytes = 80;
constexpr int64_t kScaleAt = 64;
constexpr int64_t kLaneRows = 16;

inline __m128i load_16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline __m512i load_four(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(load_16(a)), load_16(b), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(load_16(c)), load_16(d), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// 16 bytes of each of 16 rows from byte `at` on: word i of the rows in vector i, row r in lane r.
struct Words {
  __m512i of[4];
};
inline Words turned(const uint8_t* const* row, int64_t at) {
  const auto rows = [&](int i) { return load_four(row[i] + at, row[i + 4] + at, row[i + 8] + at, row[i + 12] + at); };
  const __m512i a = rows(0), b = rows(1), c = rows(2), d = rows(3);
  const __m512i ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
  const __m512i ab2 = _mm512_unpackhi_epi32(a, b), cd2 = _mm512_unpackhi_epi32(c, d);
  return {{_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd), _mm512_unpacklo_epi64(ab2, cd2),
           _mm512_unpackhi_epi64(ab2, cd2)}};
}

// Scales of groups g and g + 1 of 16 rows; `at`: byte of the scale of g in a row. kHalf: of g alone, read from two
// bytes before, since nothing need lie behind a row.
struct TwoScales {
  __m512 of[2];
};
template <bool kHalf>
inline TwoScales scales_of(const uint8_t* const* row, int64_t at) {
  const __m512i offset = _mm512_set1_epi64(kHalf ? at - 2 : at);
  const __m512i first = _mm512_add_epi64(_mm512_loadu_si512(row), offset);
  const __m512i second = _mm512_add_epi64(_mm512_loadu_si512(row + 8), offset);
  const __m512i pairs = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_i64gather_epi32(first, nullptr, 1)),
                                           _mm512_i64gather_epi32(second, nullptr, 1), 1);
  const __m512 high = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
  if (kHalf) return {{high, high}};
  return {{_mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs)), high}};
}

inline float float_at(const uint8_t* p) {
  float x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}

struct Q4Key {
  static constexpr int64_t scales_at(int64_t dim) { return dim / 2; }
  // Adds the products of a group of 16 rows by the heads' queries.
  template <int kH>
  static void add_group(const uint8_t* const* row, int64_t g, const uint8_t* q, int64_t stride, __m512 k_scale,
                        __m512 (&sum)[kH]) {
    const Words x = turned(row, 16 * g);
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512i dots[kH][2];
    for (int h = 0; h < kH; ++h) dots[h][0] = dots[h][1] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i low = _mm512_and_si512(x.of[i], nibble);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(x.of[i], 4), nibble);
#pragma GCC unroll 4
      for (int h = 0; h < kH; ++h) {
        dots[h][0] = _mm512_dpbusd_epi32(dots[h][0], low, word(q + h * stride + 4 * i));
        dots[h][1] = _mm512_dpbusd_epi32(dots[h][1], high, word(q + h * stride + 16 + 4 * i));
        settle(dots[h][0]);
        settle(dots[h][1]);
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < kH; ++h) {
      const __m512i dot =
          _mm512_sub_epi32(_mm512_add_epi32(dots[h][0], dots[h][1]), word(q + h * stride + kScaleAt + 4));
      const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), k_scale);
      sum[h] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(float_at(q + h * stride + kScaleAt)), sum[h]);
    }
  }
};

struct Q8Key {
  static constexpr int64_t scales_at(int64_t dim) { return dim; }
  template <int kH>
  static void add_group(const uint8_t* const* row, int64_t g, const uint8_t* q, int64_t stride, __m512 k_scale,
                        __m512 (&sum)[kH]) {
    __m512i dots[kH][2];
    for (int h = 0; h < kH; ++h) dots[h][0] = dots[h][1] = _mm512_setzero_si512();
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const Words x = turned(row, 32 * g + 16 * half);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(x.of[i], 8), 8);
        const __m512i odd = _mm512_srai_epi16(x.of[i], 8);
#pragma GCC unroll 4
        for (int h = 0; h < kH; ++h) {
          const uint8_t* at = q + h * stride + 32 * half + 8 * i;
          // A lane sums 32 products of at most 127 * 32767: below 2^28.
          dots[h][0] = _mm512_dpwssd_epi32(dots[h][0], even, word(at));
          dots[h][1] = _mm512_dpwssd_epi32(dots[h][1], odd, word(at + 4));
          settle(dots[h][0]);
          settle(dots[h][1]);
        }
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < kH; ++h) {
      const __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(dots[h][0], dots[h][1]));
      sum[h] =
          _mm512_fmadd_ps(_mm512_mul_ps(dot, k_scale), _mm512_set1_ps(float_at(q + h * stride + kScaleAt)), sum[h]);
    }
  }
};

template <class Key, int kH>
void key_product_of(const QuantKeyTile& tile) {
  const QuantKeyTile t = tile;  // a copy that stores cannot alias
  const int64_t groups = t.dim / kKvQuantGroup, at = Key::scales_at(t.dim), padded = (t.rows + 7) / 8 * 8;
  const uint8_t* last[kLaneRows];
  for (int64_t r0 = 0; r0 < t.rows; r0 += kLaneRows) {
    prefetch_rows<false>(t.ahead, r0, r0 + kLaneRows);
    const uint8_t* const* row = t.row + r0;
    if (padded - r0 < kLaneRows) {
      for (int64_t i = 0; i < kLaneRows; ++i) last[i] = row[i % 8];
      row = last;
    }
    __m512 sum[kH];
    for (int h = 0; h < kH; ++h) sum[h] = _mm512_setzero_ps();
    const uint8_t* q = t.q;
    int64_t g = 0;
    for (; g + 2 <= groups; g += 2, q += 2 * kGroupBytes) {
      const TwoScales scale = scales_of<false>(row, at + 2 * g);
      Key::template add_group<kH>(row, g, q, t.q_stride, scale.of[0], sum);
      Key::template add_group<kH>(row, g + 1, q + kGroupBytes, t.q_stride, scale.of[1], sum);
    }
    if (g < groups) {
      Key::template add_group<kH>(row, g, q, t.q_stride, scales_of<true>(row, at + 2 * g).of[0], sum);
    }
    const auto lanes = __mmask16(padded - r0 < kLaneRows ? 0xffu : 0xffffu);
    for (int h = 0; h < kH; ++h) _mm512_mask_storeu_ps(t.s + h * t.s_stride + r0, lanes, sum[h]);
  }
}

template <class Key>
void key_product(const QuantKeyTile& t) {
  with_heads(t.heads, [&](auto heads) { key_product_of<Key, heads>(t); });
}

// The weights of a tile's rows for two groups and all heads: p * row scale ~ scale * q, |q| <= 32767. A scale is NaN
// when a weight is not finite: it then reaches every channel that the weights are used for.
template <int kH>
struct PairWeights {
  static constexpr int kSlots = int((2 * kH + 3) / 4 * 4);
  alignas(64) int16_t q[2 * kH][kAttendTileMax];  // [group * kH + head]
  alignas(16) float scale[kSlots];
  alignas(16) int32_t eightfold[kSlots];  // 8 * sum of q; any number where the scale is NaN

  // `at`: byte of the first group's scale in a row; n: groups, 1 or 2.
  void assign(const QuantValueTile& t, int64_t at, int64_t n) {
    const int64_t vectors = (t.rows + kLaneRows - 1) / kLaneRows, padded = (t.rows + 7) / 8 * 8;
    __m512 product[2 * kH][kAttendTileMax / kLaneRows];
    __m512i top[kSlots];
    __m512 sum[kSlots];
    for (int i = 0; i < kSlots; ++i) {
      top[i] = _mm512_setzero_si512();
      sum[i] = _mm512_setzero_ps();
    }
    const uint8_t* last[kLaneRows];
    for (int64_t v = 0; v < vectors; ++v) {
      const uint8_t* const* row = t.row + v * kLaneRows;
      const int64_t left = t.rows - v * kLaneRows;
      const auto lanes = __mmask16(left < kLaneRows ? (1u << left) - 1 : 0xffffu);
      if (padded - v * kLaneRows < kLaneRows) {
        for (int64_t i = 0; i < kLaneRows; ++i) last[i] = row[i % 8];
        row = last;
      }
      const TwoScales scales = n == 2 ? scales_of<false>(row, at) : scales_of<true>(row, at);
#pragma GCC unroll 4
      for (int h = 0; h < kH; ++h) {
        const __m512 p = _mm512_maskz_loadu_ps(lanes, t.p + h * t.p_stride + v * kLaneRows);
#pragma GCC unroll 2
        for (int g = 0; g < 2; ++g) {
          const __m512 f = _mm512_maskz_mul_ps(lanes, p, scales.of[g]);
          product[g * kH + h][v] = f;
          top[g * kH + h] = _mm512_max_epu32(top[g * kH + h], _mm512_castps_si512(_mm512_abs_ps(f)));
        }
      }
    }
    alignas(16) float inverse[kSlots];
    for (int i = 0; i < kSlots; i += 4) {
      const __m128i amax = largest_of_four(top[i], top[i + 1], top[i + 2], top[i + 3]);
      const Steps steps = steps_of(_mm_castsi128_ps(amax), 32767.0f);
      _mm_store_ps(inverse + i, steps.inverse);
      _mm_store_ps(scale + i, steps.scale);
    }
    // Rows 4 * b to 4 * b + 3 and 16 more of a pair of vectors come out in block b: rows 4 b of the first, then of the
    // second.
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    for (int64_t i = 0; i < n * kH; ++i) {
      const __m512 factor = _mm512_set1_ps(inverse[i]);
      __m512i all = _mm512_setzero_si512();
      for (int64_t v = 0; v < vectors; v += 2) {
        const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(product[i][v], factor));
        const __m512i b =
            v + 1 < vectors ? _mm512_cvtps_epi32(_mm512_mul_ps(product[i][v + 1], factor)) : _mm512_setzero_si512();
        all = _mm512_add_epi32(all, _mm512_add_epi32(a, b));
        _mm512_store_si512(q[i] + v * kLaneRows, _mm512_permutexvar_epi64(order, _mm512_packs_epi32(a, b)));
      }
      sum[i] = _mm512_cvtepi32_ps(all);  // below 2^24, so that their sums are exact
    }
    for (int i = 0; i < kSlots; i += 4) {
      const __m128i total = _mm_cvttps_epi32(sums_of_four(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]));
      _mm_store_si128(reinterpret_cast<__m128i*>(eightfold + i), _mm_slli_epi32(total, 3));
    }
  }
};

// 16 bytes of four rows: byte i of the rows 0, 2, 1 and 3 in lane i.
inline __m512i four_rows(const uint8_t* const* row, int64_t at) {
  const __m512i x = load_four(row[0] + at, row[1] + at, row[2] + at, row[3] + at);
  const __m512i words =
      _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), x);
  return _mm512_shuffle_epi8(
      words, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15)));
}

inline void add_scaled(__m512i sums, float scale, float* at) {
  _mm512_storeu_ps(at, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(scale), _mm512_loadu_ps(at)));
}

// codes[i][pair]: of 16 channels the levels of rows 0 and 1 (pair 0), 2 and 3 in 16 bits; of group g the first half (i
// 0) or the second.
struct Q4Value {
  static constexpr bool kOffset = true;  // levels count from 8
  static constexpr int64_t scales_at(int64_t dim) { return dim / 2; }
  static void read(const uint8_t* const* row, int64_t g, __m512i (&codes)[2][2]) {
    const __m512i nibble = _mm512_set1_epi16(15), x = four_rows(row, 16 * g);
    codes[0][0] = _mm512_and_si512(x, nibble);
    codes[0][1] = _mm512_and_si512(_mm512_srli_epi16(x, 8), nibble);
    codes[1][0] = _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble);
    codes[1][1] = _mm512_srli_epi16(x, 12);
  }
};

struct Q8Value {
  static constexpr bool kOffset = false;
  static constexpr int64_t scales_at(int64_t dim) { return dim; }
  static void read(const uint8_t* const* row, int64_t g, __m512i (&codes)[2][2]) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m512i x = four_rows(row, 32 * g + 16 * i);
      codes[i][0] = _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8);
      codes[i][1] = _mm512_srai_epi16(x, 8);
    }
  }
};

// Adds the rows of a tile times their weights to the sums of group g.
template <class Value, int kH>
inline void add_group(const QuantValueTile& t, int64_t g, const int16_t (*q)[kAttendTileMax], const float* scale,
                      const int32_t* eightfold, bool ahead) {
  __m512i sum[kH][2][2];  // [head][half of the group][pair of rows]
  for (int h = 0; h < kH; ++h) {
    for (int i = 0; i < 2; ++i) sum[h][i][0] = sum[h][i][1] = _mm512_setzero_si512();
  }
  for (int64_t r = 0; r < t.rows; r += 4) {
    if (ahead) prefetch_rows<false>(t.ahead, r, r + 4);
    __m512i codes[2][2];
    Value::read(t.row + r, g, codes);
#pragma GCC unroll 4
    for (int h = 0; h < kH; ++h) {
#pragma GCC unroll 2
      for (int pair = 0; pair < 2; ++pair) {
        const __m512i weight = word(q[h] + r + 2 * pair);
        sum[h][0][pair] = _mm512_dpwssd_epi32(sum[h][0][pair], codes[0][pair], weight);
        sum[h][1][pair] = _mm512_dpwssd_epi32(sum[h][1][pair], codes[1][pair], weight);
        settle(sum[h][0][pair]);
        settle(sum[h][1][pair]);
      }
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < kH; ++h) {
    for (int i = 0; i < 2; ++i) {
      __m512i all = _mm512_add_epi32(sum[h][i][0], sum[h][i][1]);
      if constexpr (Value::kOffset) all = _mm512_sub_epi32(all, _mm512_set1_epi32(eightfold[h]));
      add_scaled(all, scale[h], t.sums + h * t.stride + g * kKvQuantGroup + 16 * i);
    }
  }
}

template <class Value, int kH>
void value_product_of(const QuantValueTile& tile) {
  const QuantValueTile t = tile;
  const int64_t groups = t.dim / kKvQuantGroup, at = Value::scales_at(t.dim);
  PairWeights<kH> w;
  for (int64_t g0 = 0; g0 < groups; g0 += 2) {
    const int64_t n = groups - g0 < 2 ? groups - g0 : 2;
    w.assign(t, at + 2 * g0, n);
    for (int64_t g = 0; g < n; ++g) {
      const bool ahead = g0 + g == 0;
      add_group<Value, kH>(t, g0 + g, w.q + g * kH, w.scale + g * kH, w.eightfold + g * kH, ahead);
    }
  }
}

template <class Value>
void value_product(const QuantValueTile& t) {
  with_heads(t.heads, [&](auto heads) { value_product_of<Value, heads>(t); });
}

}  // namespace

void prepare_quant_query(KvType type, const float* q, int64_t dim, uint8_t* prepared) {
  round_quant_query(
      type, q, dim,
      [&](int64_t g, int64_t c, int32_t value) {
        uint8_t* at = prepared + g * kGroupBytes;
        if (type == KvType::kQ4_0) {
          at[c] = uint8_t(int8_t(value));
        } else {
          const auto value16 = int16_t(value);
          std::memcpy(at + c / 4 * 8 + c % 2 * 4 + c % 4 / 2 * 2, &value16, 2);
        }
      },
      [&](int64_t g, float scale, int32_t total) {
        const int32_t offset = 8 * total;
        std::memcpy(prepared + g * kGroupBytes + kScaleAt, &scale, 4);
        std::memcpy(prepared + g * kGroupBytes + kScaleAt + 4, &offset, 4);
      });
}

void quant_key_product(const QuantKeyTile& tile) {
  tile.type == KvType::kQ4_0 ? key_product<Q4Key>(tile) : key_product<Q8Key>(tile);
}

void quant_value_product(const QuantValueTile& tile) {
  tile.type == KvType::kQ4_0 ? value_product<Q4Value>(tile) : value_product<Q8Value>(tile);
}

}  // namespace longkv::avx512vnni
