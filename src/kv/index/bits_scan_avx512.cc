// Scans of low-bit keys where bytes and words come in vectors of 64 bytes.
//
// The 64 tokens of a tile are two vectors of 16-bit sums, of which every 128-bit block holds tokens of one unit: the
// first eight in one vector, the others in the second. What crosses lanes within a block does so for four query heads
// at once, and what is left of a tile is one vector of largest sums and one of totals, [unit][head].
#include <algorithm>
#include <cstdint>

#include "base/immintrin.h"
#include "kv/index/bits_scan.h"

namespace longkv::avx512 {
namespace {

constexpr int64_t kUnits = kBitsTile / kBitsUnit;
constexpr int kAtOnce = 4;         // query heads
constexpr int64_t kRunTiles = 16;  // whose steps are taken one after the other, since a tile's own wait for each other
// Magnitudes are scaled to 15 bits.
constexpr float kFixedOne = 32767.0f;
// The exponential of 0. Totals of pairs of exponentials have to fit in 16 bits.
constexpr float kOne = float(0x3ff8);

// What becomes of the sums of a tile: scores of tokens, or those of units by mass or by maximum.
enum class Goal { kTokens, kMass, kMax };

// Sums of a group's bytes are multiplied by 2^shift, so that rounding their products costs little: a group adds at most
// 248 * 2^shift, and all groups stay below 2^15.
constexpr int shift_for(int64_t groups) {
  return groups <= 2 ? 6 : groups <= 4 ? 5 : groups <= 8 ? 4 : groups <= 16 ? 3 : 2;
}

inline __m512i load(const void* p) { return _mm512_loadu_si512(p); }

struct Run {
  alignas(
      64) int16_t magnitude[kRunTiles * kBitsMaxGroups][kBitsTile];  // [tile][group], tokens 0 to 7 of all units first
  alignas(64) int16_t offset[kRunTiles][kBitsTile];                  // what the tables' bias adds, negated
  alignas(64) int16_t sums[kAtOnce][kBitsTile];                      // of the last tile, where tokens are scored
  alignas(64) int16_t peak[kRunTiles][kBitsTile / 2];                // [unit][2][head]: the largest sums
  alignas(64) int32_t total[kRunTiles][kUnits * kAtOnce];            // [unit][head]: of exponentials
  float scale[kRunTiles];                                            // of a sum, beside the step
};

// The largest magnitude of a tile as the bits of a half; from 0x7c00 on it is negative or not finite.
inline unsigned largest_magnitude(const uint8_t* magnitudes, int64_t groups) {
  __m512i top = _mm512_setzero_si512();
  for (int64_t i = 0; i < 2 * groups; ++i) top = _mm512_max_epu16(top, load(magnitudes + 64 * i));
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(top), _mm512_extracti64x4_epi64(top, 1));
  const __m128i part = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  return 0xffffu ^ unsigned(_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(part, _mm_set1_epi16(-1))), 0));
}

// 16 halves as whole numbers, in the low words of what adding 1.5 * 2^23 gives.
inline __m512i rounded(const uint8_t* halves, __m512 inverse) {
  const __m512 m = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
  return _mm512_castps_si512(_mm512_fmadd_ps(m, inverse, _mm512_set1_ps(12582912.0f)));
}

void fix_tile(const uint8_t* magnitudes, int64_t groups, unsigned largest_bits, int64_t t, Run& run) {
  const int shift = shift_for(groups);
  const float largest = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(int(largest_bits))));
  run.scale[t] = largest * (32768.0f / kFixedOne) / float(1 << shift);
  const __m512 inverse = _mm512_set1_ps(largest > 0 ? kFixedOne / largest : 0.0f);
  const __m512i bias = _mm512_set1_epi16(int16_t((kBitsNibbles * kBitsBias) << shift));
  __m512i first = _mm512_setzero_si512(), second = first;
  for (int64_t g = 0; g < groups; ++g, magnitudes += 2 * kBitsTile) {
    const auto in_order = [&](int64_t half) {  // 32 tokens, from those of even and of odd number
      const __m512i even = rounded(magnitudes + 32 * half, inverse);
      const __m512i odd = rounded(magnitudes + 64 + 32 * half, inverse);
      return _mm512_mask_blend_epi16(0xaaaaaaaau, even, _mm512_slli_epi32(odd, 16));
    };
    const __m512i low = in_order(0), high = in_order(1);
    const __m512i a = _mm512_shuffle_i64x2(low, high, 0x88), b = _mm512_shuffle_i64x2(low, high, 0xdd);
    int16_t* out = run.magnitude[t * groups + g];
    _mm512_store_si512(out, a);
    _mm512_store_si512(out + kBitsTile / 2, b);
    first = _mm512_sub_epi16(first, _mm512_mulhrs_epi16(bias, a));
    second = _mm512_sub_epi16(second, _mm512_mulhrs_epi16(bias, b));
  }
  _mm512_store_si512(run.offset[t], first);
  _mm512_store_si512(run.offset[t] + kBitsTile / 2, second);
}

struct Query {
  const BitsTables* tables;  // [heads][groups]
  int heads;                 // 1 to kAtOnce
  float root;
};

// How a difference d >= 0 of sums becomes u = 1024 * its binary orders: (min(d, cap) << shift) * factor / 2^16. The
// exponential 2^-u is a straight line between powers of two. By query head.
struct Orders {
  alignas(16) int32_t factor[kAtOnce], cap[kAtOnce], shift[kAtOnce];
  bool shifted;  // some shift is not 0

  // units: binary orders per unit of the sums. Beyond the limits all tokens are as good as equal, or 15 orders apart.
  explicit Orders(__m128 units) {
    const __m128 bits = _mm_mul_ps(_mm_min_ps(units, _mm_set1_ps(15.0f)), _mm_set1_ps(1024.0f));
    const __mmask8 counts = _mm_cmp_ps_mask(units, _mm_set1_ps(1e-6f), _CMP_GT_OQ);  // NaN does not
    // bits = part * 2^exponent, part in [0.5, 1).
    const __m128i words = _mm_castps_si128(bits);
    const __m128i exponent =
        _mm_max_epi32(_mm_sub_epi32(_mm_srli_epi32(words, 23), _mm_set1_epi32(126)), _mm_setzero_si128());
    const __m128i shifts = _mm_maskz_mov_epi32(counts, exponent);
    const __m128 part = _mm_castsi128_ps(_mm_sub_epi32(words, _mm_slli_epi32(shifts, 23)));
    const __m128 factors = _mm_maskz_mul_ps(counts, part, _mm_set1_ps(65535.0f));
    _mm_store_si128(reinterpret_cast<__m128i*>(factor), _mm_cvttps_epi32(factors));
    _mm_store_si128(reinterpret_cast<__m128i*>(cap), _mm_srlv_epi32(_mm_set1_epi32(0xffff), shifts));
    _mm_store_si128(reinterpret_cast<__m128i*>(shift), shifts);
    shifted = _mm_test_epi32_mask(shifts, shifts) != 0;
  }
};

inline __m512i words_of(const int32_t& x) { return _mm512_set1_epi16(int16_t(x)); }

template <bool kShifted>
inline __m512i exponential(__m512i d, const Orders& orders, int j) {
  if (kShifted) {
    d = _mm512_sllv_epi16(_mm512_min_epu16(d, words_of(orders.cap[j])), words_of(orders.shift[j]));
  }
  const __m512i u = _mm512_mulhi_epu16(d, words_of(orders.factor[j]));
  // 0x3ff8 less 8 times the fraction: (~u << 3 & 0x1ff8) | 0x2000.
  const __m512i line =
      _mm512_ternarylogic_epi64(_mm512_slli_epi16(u, 3), _mm512_set1_epi16(0x1ff8), _mm512_set1_epi16(0x2000), 0xae);
  return _mm512_srlv_epi16(line, _mm512_srli_epi16(u, 10));
}

// One tile for kHeads query heads: its sums, or the units' largest sums and totals.
template <int kHeads, Goal kGoal, bool kShifted>
void scan_tile(const uint8_t* tile, int64_t groups, const BitsTables* tables, const Orders& orders, int64_t t,
               Run& run) {
  const __m512i nibble_mask = _mm512_set1_epi8(15), times = _mm512_set1_epi8(int8_t(1 << shift_for(groups)));
  __m512i first[kHeads], second[kHeads];
  for (int j = 0; j < kHeads; ++j) first[j] = _mm512_load_si512(run.offset[t]);
  for (int j = 0; j < kHeads; ++j) second[j] = _mm512_load_si512(run.offset[t] + kBitsTile / 2);
  for (int64_t g = 0; g < groups; ++g) {
    __m512i nibble[kBitsNibbles];
    for (int i = 0; i < kBitsNibbles / 2; ++i) {
      const __m512i byte = load(tile + (g * 4 + i) * kBitsTile);
      nibble[2 * i] = _mm512_and_si512(byte, nibble_mask);
      nibble[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(byte, 4), nibble_mask);
    }
    const __m512i m_first = _mm512_load_si512(run.magnitude[t * groups + g]);
    const __m512i m_second = _mm512_load_si512(run.magnitude[t * groups + g] + kBitsTile / 2);
    for (int j = 0; j < kHeads; ++j) {
      const BitsTables& table = tables[j * groups + g];
      const auto look = [&](int i) {
        const __m128i sixteen = _mm_load_si128(reinterpret_cast<const __m128i*>(table.bytes[i]));
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(sixteen), nibble[i]);
      };
      // Four bytes of at most 2 * kBitsBias fit in one byte.
      const __m512i a = _mm512_add_epi8(_mm512_add_epi8(look(0), look(1)), _mm512_add_epi8(look(2), look(3)));
      const __m512i b = _mm512_add_epi8(_mm512_add_epi8(look(4), look(5)), _mm512_add_epi8(look(6), look(7)));
      const __m512i s_first = _mm512_maddubs_epi16(_mm512_unpacklo_epi8(a, b), times);
      const __m512i s_second = _mm512_maddubs_epi16(_mm512_unpackhi_epi8(a, b), times);
      first[j] = _mm512_add_epi16(first[j], _mm512_mulhrs_epi16(s_first, m_first));
      second[j] = _mm512_add_epi16(second[j], _mm512_mulhrs_epi16(s_second, m_second));
    }
  }
  if (kGoal == Goal::kTokens) {
    for (int j = 0; j < kHeads; ++j) {
      _mm512_store_si512(run.sums[j], first[j]);
      _mm512_store_si512(run.sums[j] + kBitsTile / 2, second[j]);
    }
    return;
  }
  const auto top = [&](int j) { return _mm512_max_epi16(first[j < kHeads ? j : 0], second[j < kHeads ? j : 0]); };
  const auto top_of_two = [](__m512i a, __m512i b) {
    return _mm512_max_epi16(_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b));
  };
  const __m512i two = top_of_two(top(0), top(1)), others = kHeads > 2 ? top_of_two(top(2), top(3)) : two;
  const __m512i half = _mm512_max_epi16(_mm512_unpacklo_epi32(two, others), _mm512_unpackhi_epi32(two, others));
  const __m512i peak = _mm512_max_epi16(half, _mm512_shuffle_epi32(half, _MM_PERM_BADC));
  _mm512_store_si512(run.peak[t], peak);
  if (kGoal == Goal::kMax) return;
  __m512i pairs[kHeads];
  for (int j = 0; j < kHeads; ++j) {
    const __m512i own = _mm512_shuffle_epi8(peak, _mm512_set1_epi16(int16_t(2 * j + 256 * (2 * j + 1))));
    const __m512i e = exponential<kShifted>(_mm512_sub_epi16(own, first[j]), orders, j);
    const __m512i f = exponential<kShifted>(_mm512_sub_epi16(own, second[j]), orders, j);
    pairs[j] = _mm512_madd_epi16(_mm512_add_epi16(e, f), _mm512_set1_epi16(1));
  }
  const auto sum_of_two = [&](int i, int j) {
    const __m512i a = pairs[i < kHeads ? i : 0], b = pairs[j < kHeads ? j : 0];
    return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  };
  const __m512i sums = sum_of_two(0, 1), more = kHeads > 2 ? sum_of_two(2, 3) : sums;
  _mm512_store_si512(run.total[t],
                     _mm512_add_epi32(_mm512_unpacklo_epi64(sums, more), _mm512_unpackhi_epi64(sums, more)));
}

template <Goal kGoal, bool kShifted>
void scan_heads(const uint8_t* tile, int64_t groups, const Query& q, const Orders& orders, int64_t t, Run& run) {
  switch (q.heads) {
    case 1: return scan_tile<1, kGoal, kShifted>(tile, groups, q.tables, orders, t, run);
    case 2: return scan_tile<2, kGoal, kShifted>(tile, groups, q.tables, orders, t, run);
    case 3: return scan_tile<3, kGoal, kShifted>(tile, groups, q.tables, orders, t, run);
    default: return scan_tile<kAtOnce, kGoal, kShifted>(tile, groups, q.tables, orders, t, run);
  }
}

// log2(x) of positive numbers, absolute error below 2e-6.
inline __m512 log2_of(__m512 x) {
  const __m512 t = _mm512_sub_ps(_mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero), _mm512_set1_ps(1.0f));
  __m512 p = _mm512_set1_ps(0.0200166500f);
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-0.0946268097f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(0.2139432122f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-0.3383771977f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(0.4774963637f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-0.7211440922f));
  p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.4426929832f));
  return _mm512_fmadd_ps(p, t, _mm512_getexp_ps(x));
}

// scores[head][unit] = step * scale * peak + root * ln(total).
template <Goal kGoal>
inline __m512 finish(const Run& run, int64_t t, __m512 steps, __m512 per_order) {
  const __m512i peaks =
      _mm512_permutexvar_epi64(_mm512_set_epi64(0, 0, 0, 0, 6, 4, 2, 0), _mm512_load_si512(run.peak[t]));
  const __m512 peak = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(peaks)));
  __m512 score = _mm512_mul_ps(peak, _mm512_mul_ps(steps, _mm512_set1_ps(run.scale[t])));
  if (kGoal == Goal::kMass) {
    const __m512 total =
        _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(run.total[t])), _mm512_set1_ps(1.0f / kOne));
    score = _mm512_fmadd_ps(log2_of(total), per_order, score);
  }
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  return _mm512_permutexvar_ps(order, score);
}

// One head's scores of a tile's tokens.
void token_scores(const int16_t* sums, float scale, float* scores) {
  const auto eight = [](const int16_t* p) { return _mm_load_si128(reinterpret_cast<const __m128i*>(p)); };
  for (int64_t u = 0; u < kUnits; ++u) {
    const __m256i words = _mm256_set_m128i(eight(sums + kBitsTile / 2 + 8 * u), eight(sums + 8 * u));
    const __m512 whole = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(words));
    _mm512_storeu_ps(scores + kBitsUnit * u, _mm512_mul_ps(whole, _mm512_set1_ps(scale)));
  }
}

void portable(Goal goal, const uint8_t* tile, int64_t groups, const Query& q, float* scores, int64_t stride) {
  if (goal == Goal::kTokens) return bits_scan_tiles_portable(tile, 1, groups, q.tables, q.heads, scores, stride);
  const BitsPool pool = goal == Goal::kMass ? BitsPool::kMass : BitsPool::kMax;
  bits_scan_units_portable(tile, 1, groups, q.tables, q.heads, pool, q.root, scores, stride);
}

// `count` tiles whose magnitudes are fixed, but for the slow ones.
template <Goal kGoal>
void scan_run(const uint8_t* tile, int64_t count, int64_t groups, uint32_t slow, const Query& q, Run& run,
              float* scores, int64_t stride) {
  const int64_t tile_bytes = bits_tile_bytes(groups * kBitsGroup);
  constexpr int64_t kPerTile = kGoal == Goal::kTokens ? kBitsTile : kUnits;
  const float orders_of = 1.44269504f / q.root;
  const __m512 per_order = _mm512_set1_ps(q.root * 0.69314718f);
  alignas(16) float step[kAtOnce] = {};
  for (int j = 0; j < q.heads; ++j) step[j] = q.tables[j * groups].step;
  const __m512 steps = _mm512_broadcast_f32x4(_mm_load_ps(step));
  for (int64_t t = 0; t < count; ++t) {
    if ((slow >> t & 1) != 0) continue;
    const Orders orders(_mm_mul_ps(_mm_load_ps(step), _mm_set1_ps(run.scale[t] * orders_of)));
    const bool shifted = kGoal == Goal::kMass && orders.shifted;
    shifted ? scan_heads<kGoal, kGoal == Goal::kMass>(tile + t * tile_bytes, groups, q, orders, t, run)
            : scan_heads<kGoal, false>(tile + t * tile_bytes, groups, q, orders, t, run);
    for (int j = 0; kGoal == Goal::kTokens && j < q.heads; ++j) {
      token_scores(run.sums[j], run.scale[t] * step[j], scores + j * stride + t * kPerTile);
    }
  }
  for (int64_t t = 0; t < count; ++t) {
    float* to = scores + t * kPerTile;
    if ((slow >> t & 1) != 0) {
      portable(kGoal, tile + t * tile_bytes, groups, q, to, stride);
    } else if (kGoal != Goal::kTokens) {
      const __m512 by_head = finish<kGoal>(run, t, steps, per_order);
      _mm_storeu_ps(to, _mm512_castps512_ps128(by_head));
      if (q.heads > 1) _mm_storeu_ps(to + stride, _mm512_extractf32x4_ps(by_head, 1));
      if (q.heads > 2) _mm_storeu_ps(to + 2 * stride, _mm512_extractf32x4_ps(by_head, 2));
      if (q.heads > 3) _mm_storeu_ps(to + 3 * stride, _mm512_extractf32x4_ps(by_head, 3));
    }
  }
}

template <Goal kGoal>
void scan(const uint8_t* tile, int64_t tiles, int64_t groups, const BitsTables* tables, int n_q, float root,
          float* scores, int64_t stride) {
  const int64_t tile_bytes = bits_tile_bytes(groups * kBitsGroup), codes = groups * (kBitsGroup / 8) * kBitsTile;
  constexpr int64_t kPerTile = kGoal == Goal::kTokens ? kBitsTile : kUnits;
  Run run;
  for (int64_t begin = 0; begin < tiles; begin += kRunTiles) {
    const int64_t count = std::min(kRunTiles, tiles - begin);
    const uint8_t* now = tile + begin * tile_bytes;
    unsigned largest[kRunTiles];
    uint32_t slow = 0;  // bit per tile: a magnitude is not finite
    for (int64_t t = 0; t < count; ++t) {
      largest[t] = largest_magnitude(now + t * tile_bytes + codes, groups);
      slow |= uint32_t(largest[t] >= 0x7c00) << t;
    }
    for (int64_t t = 0; t < count; ++t) {
      if ((slow >> t & 1) == 0) fix_tile(now + t * tile_bytes + codes, groups, largest[t], t, run);
    }
    for (int j = 0; j < n_q; j += kAtOnce) {
      const Query query{tables + j * groups, std::min(kAtOnce, n_q - j), root};
      scan_run<kGoal>(now, count, groups, slow, query, run, scores + j * stride + begin * kPerTile, stride);
    }
  }
}

}  // namespace

void bits_scan_tiles(const uint8_t* tile, int64_t tiles, int64_t groups, const BitsTables* tables, int n_q,
                     float* scores, int64_t stride) {
  scan<Goal::kTokens>(tile, tiles, groups, tables, n_q, 1.0f, scores, stride);
}

void bits_scan_units(const uint8_t* tile, int64_t tiles, int64_t groups, const BitsTables* tables, int n_q,
                     BitsPool pool, float root, float* scores, int64_t stride) {
  pool == BitsPool::kMass ? scan<Goal::kMass>(tile, tiles, groups, tables, n_q, root, scores, stride)
                          : scan<Goal::kMax>(tile, tiles, groups, tables, n_q, root, scores, stride);
}

}  // namespace longkv::avx512
