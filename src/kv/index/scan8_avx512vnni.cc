// scan8_tiles with int8 products. Queries are rounded to 16 bits, in two bytes of which each meets the summaries'
// bytes; sums are exact in 32 bits.
#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <vector>

#include "base/immintrin.h"
#include "kv/index/scan.h"

namespace longkv::avx512vnni {
namespace {

constexpr int kAtOnce = 4;           // query heads
constexpr float kLevels = 32512.0f;  // 127 * 256: both bytes are signed

// Bytes of four channels of a query head, 256 * high + low: those of q that meet centres, and of |q| that meet widths.
struct Words {
  int32_t high, low, width_high, width_low;
};

struct Head {
  float step = 0, width_step = 0;  // of the rounded queries
  float error = 0;                 // what rounding may take from a centre's product, per unit of the centre's scale
  int32_t high = 0;                // -128 * the sum of the high bytes: centres are met as bytes without a sign
  int32_t low = 0;                 // of the low ones
};

struct Query {
  std::vector<float> q, widths;  // what it was made from; no widths: |q|
  int64_t dim = 0;
  std::vector<Head> heads;
  std::vector<Words> words;  // [heads][dim / 4]
};

inline __m512i high_bytes(__m512i x) { return _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8); }

inline __m128 bytes_of(__m512i x) { return _mm_castsi128_ps(_mm512_cvtepi32_epi8(x)); }

inline __mmask16 lanes(int64_t n) { return __mmask16(n >= 16 ? 0xffff : (1 << n) - 1); }

struct Scale {
  float step, inverse;  // NaN and 0 where a number is not finite, 0 and 0 where all are tiny
};

Scale scale_of(const float* x, int64_t dim) {
  __m512i top = _mm512_setzero_si512();  // magnitudes as bits: what is not finite is above all numbers
  for (int64_t c = 0; c < dim; c += 16) {
    const __m512i bits = _mm512_castps_si512(_mm512_maskz_loadu_ps(lanes(dim - c), x + c));
    top = _mm512_max_epu32(top, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
  }
  const float largest = std::bit_cast<float>(_mm512_reduce_max_epu32(top));
  if (!(largest <= std::numeric_limits<float>::max())) return {std::numeric_limits<float>::quiet_NaN(), 0.0f};
  if (largest < 0x1p-100f) return {0.0f, 0.0f};
  return {largest / kLevels, kLevels / largest};
}

// widths: [dim], or nullptr for |q|.
void prepare_head(const float* q, const float* widths, int64_t dim, Head& head, Words* words) {
  const Scale own = scale_of(q, dim), other = widths != nullptr ? scale_of(widths, dim) : own;
  if (widths == nullptr) widths = q;
  head.step = own.step;
  head.width_step = other.step;
  // Half a step in every channel, of centres of at most 127, and what the roundings of fp32 add to it: of the inverse,
  // the step and the products with both, two conversions and a sum, of numbers up to 2^16, 0.014 of a step in all.
  head.error = own.step * 0.52f * 127.0f * float(dim);
  const __m512 inverse = _mm512_set1_ps(own.inverse), grown = _mm512_set1_ps(other.inverse * (1.0f + 0x1p-21f));
  const __mmask16 usable = own.inverse > 0 ? 0xffff : 0, wide = other.inverse > 0 ? 0xffff : 0;
  __m512i highs = _mm512_setzero_si512(), lows = highs;
  for (int64_t c = 0; c < dim; c += 16) {
    const __m512 x = _mm512_maskz_loadu_ps(usable & lanes(dim - c), q + c);
    const __m512 w = _mm512_abs_ps(_mm512_maskz_loadu_ps(wide & lanes(dim - c), widths + c));
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
    const __m512i up = _mm512_cvt_roundps_epi32(_mm512_mul_ps(w, grown), _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
    const __m512i high = high_bytes(whole), low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 8));
    const __m512i width_high = high_bytes(up), width_low = _mm512_sub_epi32(up, _mm512_slli_epi32(width_high, 8));
    highs = _mm512_add_epi32(highs, high);
    lows = _mm512_add_epi32(lows, low);
    __m128 row[4] = {bytes_of(high), bytes_of(low), bytes_of(width_high), bytes_of(width_low)};
    _MM_TRANSPOSE4_PS(row[0], row[1], row[2], row[3]);
    for (int64_t i = 0; i < 4 && c + 4 * i < dim; ++i) {
      _mm_storeu_ps(reinterpret_cast<float*>(words + c / 4 + i), row[i]);
    }
  }
  head.high = -128 * _mm512_reduce_add_epi32(highs);
  head.low = -128 * _mm512_reduce_add_epi32(lows);
}

bool same(const std::vector<float>& kept, const float* q, size_t n) {
  return kept.size() == n && (n == 0 || std::memcmp(kept.data(), q, n * sizeof(float)) == 0);
}

// Refining asks for many short ranges with the same queries, so a thread keeps the last ones.
const Query& prepare(const float* q, const float* widths, int64_t dim, int n_q) {
  thread_local Query last;
  const size_t n = size_t(n_q * dim), n_widths = widths != nullptr ? n : 0;
  if (last.dim == dim && same(last.q, q, n) && same(last.widths, widths, n_widths)) return last;
  last.q.assign(q, q + n);
  last.widths.assign(widths, widths + n_widths);
  last.dim = dim;
  last.heads.resize(size_t(n_q));
  last.words.resize(n / 4);
  for (int j = 0; j < n_q; ++j) {
    const float* own = widths != nullptr ? widths + j * dim : nullptr;
    prepare_head(q + j * dim, own, dim, last.heads[size_t(j)], last.words.data() + j * (dim / 4));
  }
  return last;
}

// Four channels of 16 blocks as 16 words of four channels.
inline __m512i turned(const uint8_t* p) {
  const __m512i words = _mm512_permutexvar_epi32(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0),
                                                 _mm512_loadu_si512(p));
  return _mm512_shuffle_epi8(
      words, _mm512_broadcast_i32x4(_mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0)));
}

inline __m512i word(const int32_t& x) { return _mm512_set1_epi32(x); }

inline __m512 joined(__m512i high, __m512i low) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(low));
}

template <int kHeads>
void scan(const uint8_t* tile, int64_t tiles, int64_t dim, const Head* heads, const Words* words, bool bound,
          const uint8_t* ahead, float* scores, int64_t stride) {
  const int64_t slot = dim * kTileBlocks, per_head = dim / 4;
  for (int64_t t = 0; t < tiles; ++t, tile += scan8_tile_bytes(dim), scores += kTileBlocks) {
    __m512i high[kHeads], low[kHeads], width_high[kHeads], width_low[kHeads];
    for (int j = 0; j < kHeads; ++j) {
      high[j] = word(heads[j].high);
      low[j] = word(heads[j].low);
      width_high[j] = width_low[j] = _mm512_setzero_si512();
    }
    const uint8_t* next = t + 1 < tiles ? tile + scan8_tile_bytes(dim) : ahead;
    for (int64_t c = 0; c < per_head; ++c) {
      if (next != nullptr) {
        _mm_prefetch(next + c * 2 * 64, _MM_HINT_T0);
        _mm_prefetch(next + c * 2 * 64 + 64, _MM_HINT_T0);
      }
      const __m512i centre = _mm512_xor_si512(turned(tile + c * 4 * kTileBlocks), _mm512_set1_epi8(-128));
      const __m512i width = turned(tile + slot + c * 4 * kTileBlocks);
      for (int j = 0; j < kHeads; ++j) {
        const Words& own = words[j * per_head + c];
        high[j] = _mm512_dpbusd_epi32(high[j], centre, word(own.high));
        low[j] = _mm512_dpbusd_epi32(low[j], centre, word(own.low));
        width_high[j] = _mm512_dpbusd_epi32(width_high[j], width, word(own.width_high));
        width_low[j] = _mm512_dpbusd_epi32(width_low[j], width, word(own.width_low));
      }
    }
    const auto* scales = reinterpret_cast<const float*>(tile + 2 * slot);
    const __m512 of_centre = _mm512_loadu_ps(scales), of_width = _mm512_loadu_ps(scales + kTileBlocks);
    for (int j = 0; j < kHeads; ++j) {
      const __m512 step = _mm512_set1_ps(heads[j].step), width_step = _mm512_set1_ps(heads[j].width_step);
      __m512 score = _mm512_mul_ps(_mm512_mul_ps(joined(high[j], low[j]), step), of_centre);
      score = _mm512_fmadd_ps(_mm512_mul_ps(joined(width_high[j], width_low[j]), width_step), of_width, score);
      if (bound) score = _mm512_fmadd_ps(_mm512_set1_ps(heads[j].error), of_centre, score);
      _mm512_storeu_ps(scores + j * stride, score);
    }
  }
}

}  // namespace

void scan8_tiles(const uint8_t* first, int64_t tiles, int64_t dim, const float* q, int n_q, bool bound, float* scores,
                 int64_t stride) {
  const Query& query = prepare(q, nullptr, dim, n_q);
  for (int j = 0; j < n_q; j += kAtOnce) {
    const Head* heads = query.heads.data() + j;
    const Words* words = query.words.data() + j * (dim / 4);
    float* out = scores + j * stride;
    switch (n_q - j) {
      case 1: scan<1>(first, tiles, dim, heads, words, bound, nullptr, out, stride); break;
      case 2: scan<2>(first, tiles, dim, heads, words, bound, nullptr, out, stride); break;
      case 3: scan<3>(first, tiles, dim, heads, words, bound, nullptr, out, stride); break;
      default: scan<kAtOnce>(first, tiles, dim, heads, words, bound, nullptr, out, stride);
    }
  }
}

void scan8_folded(const uint8_t* first, int64_t tiles, int64_t dim, const float* a, const float* b, bool bound,
                  const uint8_t* ahead, float* scores) {
  const Query& query = prepare(a, b, dim, 1);
  scan<1>(first, tiles, dim, query.heads.data(), query.words.data(), bound, ahead, scores, 0);
}

}  // namespace longkv::avx512vnni
