// Int8 prompt kernel for AVX-512 with VNNI: two panels of 16 rows, one row per 32-bit lane, by up to 6 tokens.
//
// vpdpbusd adds four products of unsigned levels and signed activations to a lane in 32 bits, so every form is
// multiplied as bytes. Two panels share each broadcast of activations, which leaves the loads behind the products, and
// 6 x 2 integer sums, as many fp32 sums, two scales and the operands of one step fit the 32 registers. What stands for
// zero enters as the start of the integer sums, one broadcast a token: it costs no instruction of the multipliers.
// A group of 32 columns takes the multipliers 8 vpdpbusd and 3 (with an offset 4) instructions a row vector and token.
// Scales of 16 columns multiply the levels where the products fit a byte; those of q6_K do not, and 2 x 4 sums of
// floats join the others.
#include "ops/matmul_x86-inl.h"

namespace longkv {

namespace {

constexpr int kTokens = 6;
constexpr int kPairTokens = 4;
constexpr int kPanels = 2;
// Panels stream from the second level of the caches, which keeps up with the multipliers: whole rows of usual models,
// so that sums are written once.
constexpr int64_t kPanelBytes = 64 * 1024;

struct Form {
  bool pairs;   // scales of 16 columns over those of 32
  bool zero;    // the levels have a zero
  int offsets;  // per group of 32 columns
};

// Tokens t0 .. of one array of activations, which may be absent: three rows from each of two pointers, which addressing
// modes reach.
template <class T>
struct TokenRows {
  const T* first = nullptr;
  const T* fourth = nullptr;
  int64_t stride;

  TokenRows(const T* base, int64_t row_stride, int64_t t0) : stride(row_stride) {
    if (base == nullptr) return;
    first = base + t0 * row_stride;
    fourth = first + 3 * row_stride;
  }
  const T* at(int t) const { return (t < 3 ? first : fourth) + t % 3 * stride; }
};

inline __m512 load_floats(const float* p) { return _mm512_loadu_ps(p); }

// Scales of 16 rows for part h of group g. Those of 16 columns are floats, in the place of the integers (decode_vnni).
template <Form form>
inline __m512 scale_of(const Panel& panel, int64_t g, int h) {
  return _mm512_loadu_ps(form.pairs ? panel.scale16 + (2 * g + h) * 2 * kTileRows
                                    : static_cast<const void*>(panel.scale + g * kTileRows));
}

template <Form form, int P, int T>
void multiply_tokens(const Int8Tile& a, int64_t t0) {
  constexpr int kParts = form.pairs ? 2 : 1, kQuads = 8 / kParts;
  const TokenRows<int8_t> q(a.q, a.q_stride, t0);
  const TokenRows<int16_t> zero(a.x_zero, a.x_zero_stride, t0);
  const TokenRows<float> x_scale(a.x_scale, a.x_scale_stride, t0);
  const TokenRows<float> x_sum(a.x_sum, a.x_sum_stride, t0);
  const Panel panel[kPanels] = {a.panel, a.second};
  const int64_t groups = a.groups;
  __m512 acc[T][P];
#pragma GCC unroll 6
  for (int t = 0; t < T; ++t) {
    const float* y = a.row(t0 + t);
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) acc[t][p] = a.accumulate ? load_floats(y + p * kTileRows) : _mm512_setzero_ps();
  }
  for (int64_t g = 0; g < groups; ++g) {
    [[maybe_unused]] __m512 both[T][P];  // sums of the two parts of a group, still without the activations' scale
#pragma GCC unroll 2
    for (int h = 0; h < kParts; ++h) {
      const int64_t part = g * kParts + h;
      __m512i s[T][P];
#pragma GCC unroll 6
      for (int t = 0; t < T; ++t) {
        const __m512i start = form.zero ? _mm512_set1_epi32(load32(zero.at(t) + 2 * part)) : _mm512_setzero_si512();
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) s[t][p] = start;
      }
#pragma GCC unroll 8
      for (int i = 0; i < kQuads; ++i) {
        __m512i levels[P];
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) levels[p] = _mm512_loadu_si512(panel[p].levels + (part * kQuads + i) * 64);
#pragma GCC unroll 6
        for (int t = 0; t < T; ++t) {
          const __m512i x = _mm512_set1_epi32(load32(q.at(t) + 4 * (part * kQuads + i)));
#pragma GCC unroll 2
          for (int p = 0; p < P; ++p) s[t][p] = _mm512_dpbusd_epi32(s[t][p], levels[p], x);
        }
      }
      __m512 scale[P];
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) scale[p] = scale_of<form>(panel[p], g, h);
#pragma GCC unroll 6
      for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) {
          const __m512 sum = _mm512_cvtepi32_ps(s[t][p]);
          if constexpr (form.pairs) {
            both[t][p] = h == 0 ? _mm512_mul_ps(sum, scale[p]) : _mm512_fmadd_ps(sum, scale[p], both[t][p]);
          } else {
            const __m512 xs = _mm512_set1_ps(x_scale.at(t)[g]);
            acc[t][p] = _mm512_fmadd_ps(sum, _mm512_mul_ps(scale[p], xs), acc[t][p]);
          }
        }
      }
    }
    if constexpr (form.pairs) {
#pragma GCC unroll 6
      for (int t = 0; t < T; ++t) {
        const __m512 xs = _mm512_set1_ps(x_scale.at(t)[g]);
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) acc[t][p] = _mm512_fmadd_ps(both[t][p], xs, acc[t][p]);
      }
    }
#pragma GCC unroll 2
    for (int o = 0; o < form.offsets; ++o) {
      const int64_t at = g * form.offsets + o;
      __m512 offset[P];
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) offset[p] = load_floats(panel[p].offset + at * kTileRows);
#pragma GCC unroll 6
      for (int t = 0; t < T; ++t) {
        const __m512 sum = _mm512_set1_ps(x_sum.at(t)[at]);
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) acc[t][p] = _mm512_fmadd_ps(sum, offset[p], acc[t][p]);
      }
    }
  }
#pragma GCC unroll 6
  for (int t = 0; t < T; ++t) {
    float* y = a.row(t0 + t);
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) _mm512_storeu_ps(y + p * kTileRows, acc[t][p]);
  }
}

// One group of columns against terms of any tokens: its levels stay in registers.
template <Form form, int P>
void add_terms_of_group(const Int8Tile& a, const FineTerms& f, int64_t g) {
  constexpr int kParts = form.pairs ? 2 : 1, kQuads = 8 / kParts;
  const Panel panel[kPanels] = {a.panel, a.second};
  __m512i levels[8][P];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) levels[i][p] = _mm512_loadu_si512(panel[p].levels + (g * 8 + i) * 64);
  }
  __m512 scale[kParts][P];
#pragma GCC unroll 2
  for (int h = 0; h < kParts; ++h) {
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) scale[h][p] = scale_of<form>(panel[p], g, h);
  }
  const int64_t end = f.last[g];
  for (int64_t e = f.first[g]; e < end; ++e) {
    const int8_t* q = f.q + e * 32;
    float* y = a.y + (f.token[e] - f.token0) * a.y_stride;
    const __m512 xs = _mm512_set1_ps(f.x_scale[e]);
    __m512 acc[P];
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) acc[p] = load_floats(y + p * kTileRows);
#pragma GCC unroll 2
    for (int h = 0; h < kParts; ++h) {
      __m512i s[P];
      const __m512i start =
          form.zero ? _mm512_set1_epi32(load32(f.x_zero + e * f.x_zero_stride + 2 * h)) : _mm512_setzero_si512();
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) s[p] = start;
#pragma GCC unroll 8
      for (int i = 0; i < kQuads; ++i) {
        const __m512i x = _mm512_set1_epi32(load32(q + 4 * (h * kQuads + i)));
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) s[p] = _mm512_dpbusd_epi32(s[p], levels[h * kQuads + i][p], x);
      }
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) {
        acc[p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(s[p]), _mm512_mul_ps(scale[h][p], xs), acc[p]);
      }
    }
#pragma GCC unroll 2
    for (int o = 0; o < form.offsets; ++o) {
      const __m512 sum = _mm512_set1_ps(f.x_sum[e * f.x_sum_stride + o]);
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) {
        const __m512 offset = load_floats(panel[p].offset + (g * form.offsets + o) * kTileRows);
        acc[p] = _mm512_fmadd_ps(sum, offset, acc[p]);
      }
    }
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) _mm512_storeu_ps(y + p * kTileRows, acc[p]);
  }
}

template <Form form, int P>
void multiply_panels(const Int8Tile& tile, const FineTerms* fine) {
  const Int8Tile a = tile;  // copies that no store can alias
  if (fine != nullptr) {
    const FineTerms f = *fine;
    for (int64_t g = 0; g < a.groups; ++g) {
      if (f.first[g] < f.last[g]) add_terms_of_group<form, P>(a, f, g);
    }
    return;
  }
  constexpr int kMany = form.pairs ? kPairTokens : kTokens;
  int64_t t = 0;
  for (; t + kMany <= a.tokens; t += kMany) multiply_tokens<form, P, kMany>(a, t);
  for (; t + 3 <= a.tokens; t += 3) multiply_tokens<form, P, 3>(a, t);
  for (; t < a.tokens; ++t) multiply_tokens<form, P, 1>(a, t);
}

template <Form form>
void multiply_form(const Int8Tile& a, const FineTerms* fine) {
  a.second.levels != nullptr ? multiply_panels<form, 2>(a, fine) : multiply_panels<form, 1>(a, fine);
}

// The tile's products or, with `fine`, those of its second terms.
void multiply_any(const Int8Tile& a, const FineTerms* fine) {
  const bool zero = byte_zero(*a.type) != 0;
  if (a.type->form == PanelForm::kGroup16) return multiply_form<Form{true, true, 0}>(a, fine);  // q6_K
  if (a.type->offset_group == 16) return multiply_form<Form{false, false, 2}>(a, fine);         // q2_K
  if (a.type->offset_group == 0) return multiply_form<Form{false, true, 0}>(a, fine);
  return zero ? multiply_form<Form{false, true, 1}>(a, fine) : multiply_form<Form{false, false, 1}>(a, fine);
}

void multiply_vnni(const Int8Tile& a) { multiply_any(a, nullptr); }
void add_terms_vnni(const Int8Tile& a, const FineTerms& fine) { multiply_any(a, &fine); }

// q2_K and q3_K: a level of 2 or 3 bits times the integer scale of its 16 columns is at most 45, or -124 to 128.
constexpr PanelType kScaledQ2K{PanelForm::kGroup32, 0, 16, 256};
constexpr PanelType kScaledQ3K{PanelForm::kGroup32, 127, 0, 256};

const PanelType* own_type_vnni(TensorType type) {
  return type == TensorType::kQ2_K ? &kScaledQ2K : type == TensorType::kQ3_K ? &kScaledQ3K : panel_type(type);
}

// levels = (levels - zero) * scale16 + new_zero, four columns at a time; every scale is there twice, for even and for
// odd columns of its lane.
void scale_levels(const Panel& panel, int64_t columns, int zero, int new_zero) {
  const __m512i from = _mm512_set1_epi16(int16_t(zero)), to = _mm512_set1_epi16(int16_t(new_zero));
  const __m512i low_byte = _mm512_set1_epi16(0xff);
  for (int64_t quad = 0; quad < columns / 4; ++quad) {
    const __m512i scale = _mm512_loadu_si512(panel.scale16 + quad / 4 * 2 * kTileRows);
    const auto scaled = [&](__m512i v) {
      return _mm512_add_epi16(_mm512_mullo_epi16(_mm512_sub_epi16(v, from), scale), to);
    };
    const __m512i levels = _mm512_loadu_si512(panel.levels + quad * 64);
    const __m512i even = scaled(_mm512_and_si512(levels, low_byte)), odd = scaled(_mm512_srli_epi16(levels, 8));
    _mm512_storeu_si512(panel.levels + quad * 64, _mm512_or_si512(even, _mm512_slli_epi16(odd, 8)));
  }
}

void decode_vnni(const Weight& w, int64_t row, int valid, int64_t col, int64_t columns, const Panel& panel) {
  decode_x86<ByteInterleave>(w, row, valid, col, columns, panel);
  if (w.type == TensorType::kQ2_K) return scale_levels(panel, columns, 0, 0);
  if (w.type == TensorType::kQ3_K) return scale_levels(panel, columns, panel_type(w.type)->zero, kScaledQ3K.zero);
  if (panel_type(w.type)->form != PanelForm::kGroup16) return;
  // The integer scales of 16 columns and the float over them become their product.
  for (int64_t part = 0; part < columns / 16; ++part) {
    int16_t* scale16 = panel.scale16 + part * 2 * kTileRows;
    // Of a scale that is stored twice the upper one, sign-extended, is the 32-bit scale of the lane.
    const __m512 integer = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_loadu_si512(scale16), 16));
    _mm512_storeu_ps(scale16, _mm512_mul_ps(integer, load_floats(panel.scale + part / 2 * kTileRows)));
  }
}

// -zero * sum(q) in 32 bits, in the place of two values of 16.
void zero_terms_vnni(const int8_t*, const int16_t* sum16, int64_t columns, int group, int zero, int16_t* x_zero) {
  for (int64_t i = 0; i < columns / group; ++i) {
    const int sum = group == 16 ? sum16[i] : sum16[2 * i] + sum16[2 * i + 1];
    const int32_t start = -zero * sum;
    std::memcpy(x_zero + 2 * i, &start, 4);
  }
}

}  // namespace

const Int8Level& int8_level_avx512vnni() {
  static constexpr Int8Level kLevel{.name = "avx512vnni",
                                    .panels = kPanels,
                                    .byte_zero = 128,
                                    .panel_bytes = kPanelBytes,
                                    .zero_terms = zero_terms_vnni,
                                    .decode = decode_vnni,
                                    .own_type = own_type_vnni,
                                    .multiply = multiply_vnni,
                                    .add_terms = add_terms_vnni};
  return kLevel;
}

}  // namespace longkv
