// Int8 prompt kernel for AMX: 16 rows by 16 tokens. One tdpbsud multiplies a group of 32 (or 16) columns of 16 tokens
// with the panel as ByteInterleave writes it; the 16 x 16 integer sums go through memory to AVX-512 for their scales.
#include "ops/amx_tiles.h"
#include "ops/matmul_x86-inl.h"

namespace longkv {

namespace {

constexpr int kTokens = 16;
constexpr int kSumTiles = 4;  // groups in flight, tiles 0 to 3; tile 4 holds tokens, tile 5 the panel

// Sums: tokens x 16 rows of 32 bits. Tokens: tokens x columns bytes. Panel: columns / 4 times 16 rows of 4 columns.
void configure(int tokens, int columns) {
  TileConfig config;
  for (int i = 0; i < kSumTiles; ++i) {
    config.rows[i] = uint8_t(tokens);
    config.row_bytes[i] = 64;
  }
  config.rows[4] = uint8_t(tokens);
  config.row_bytes[4] = uint16_t(columns);
  config.rows[5] = uint8_t(columns / 4);
  config.row_bytes[5] = 64;
  load_tiles(config);
}

// sums[i] = products of columns [columns * (first + i), + columns) for i < 4.
void four_products(const Int8Tile& a, int64_t t0, int64_t first, int columns, int32_t (*sums)[kTokens][kTileRows]) {
  const int8_t* q = a.q + t0 * a.q_stride + first * columns;
  const uint8_t* levels = a.panel.levels + first * columns * kTileRows;
  const int64_t step = int64_t(columns) * kTileRows;
  settle_memory();
  _tile_zero(0);
  _tile_loadd(4, q, a.q_stride);
  _tile_loadd(5, levels, 64);
  _tile_dpbsud(0, 4, 5);
  _tile_zero(1);
  _tile_loadd(4, q + columns, a.q_stride);
  _tile_loadd(5, levels + step, 64);
  _tile_dpbsud(1, 4, 5);
  _tile_zero(2);
  _tile_loadd(4, q + 2 * columns, a.q_stride);
  _tile_loadd(5, levels + 2 * step, 64);
  _tile_dpbsud(2, 4, 5);
  _tile_zero(3);
  _tile_loadd(4, q + 3 * columns, a.q_stride);
  _tile_loadd(5, levels + 3 * step, 64);
  _tile_dpbsud(3, 4, 5);
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
}

void one_product(const Int8Tile& a, int64_t t0, int64_t index, int columns, int32_t (*sums)[kTileRows]) {
  settle_memory();
  _tile_zero(0);
  _tile_loadd(4, a.q + t0 * a.q_stride + index * columns, a.q_stride);
  _tile_loadd(5, a.panel.levels + index * columns * kTileRows, 64);
  _tile_dpbsud(0, 4, 5);
  _tile_stored(0, sums, 64);
}

// Adds groups [g, g + count) of 32 columns, whose integer sums are given, to y.
template <bool pairs>
void add_scaled(const Int8Tile& a, int64_t t0, int tokens, int64_t g, int count,
                const int32_t (*sums)[kTokens][kTileRows], bool accumulate) {
  const __m512i zero = _mm512_set1_epi32(byte_zero(*a.type));
  const int offsets = a.type->offset_group == 0 ? 0 : 32 / a.type->offset_group;
  for (int t = 0; t < tokens; ++t) {
    float* y = a.row(t0 + t);
    const int16_t* sum16 = a.x_sum16 + (t0 + t) * a.x_sum16_stride;
    __m512 acc = accumulate ? _mm512_loadu_ps(y) : _mm512_setzero_ps();
    for (int i = 0; i < count; ++i) {
      const int64_t group = g + i;
      const auto centred = [&](const int32_t* s, int32_t x_sum) {
        return _mm512_sub_epi32(_mm512_load_si512(s), _mm512_mullo_epi32(zero, _mm512_set1_epi32(x_sum)));
      };
      __m512i dot;
      if constexpr (pairs) {
        const int16_t* scale = a.panel.scale16 + 2 * group * 2 * kTileRows;
        // Every 16-bit scale is stored twice: the upper one, sign-extended, is the 32-bit scale of the lane.
        const __m512i scale0 = _mm512_srai_epi32(_mm512_loadu_si512(scale), 16);
        const __m512i scale1 = _mm512_srai_epi32(_mm512_loadu_si512(scale + 2 * kTileRows), 16);
        dot = _mm512_add_epi32(_mm512_mullo_epi32(centred(sums[2 * i][t], sum16[2 * group]), scale0),
                               _mm512_mullo_epi32(centred(sums[2 * i + 1][t], sum16[2 * group + 1]), scale1));
      } else {
        dot = centred(sums[i][t], sum16[2 * group] + sum16[2 * group + 1]);
      }
      const __m512 xs = _mm512_set1_ps(a.x_scale[(t0 + t) * a.x_scale_stride + group]);
      const __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(a.panel.scale + group * kTileRows), xs);
      acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, acc);
      for (int o = 0; o < offsets; ++o) {
        const __m512 x_sum = _mm512_set1_ps(a.x_sum[(t0 + t) * a.x_sum_stride + group * offsets + o]);
        acc = _mm512_fmadd_ps(x_sum, _mm512_loadu_ps(a.panel.offset + (group * offsets + o) * kTileRows), acc);
      }
    }
    _mm512_storeu_ps(y, acc);
  }
}

template <bool pairs>
void multiply_form(const Int8Tile& a) {
  constexpr int kColumns = pairs ? 16 : 32, kPerGroup = pairs ? 2 : 1;
  constexpr int kGroups = kSumTiles / kPerGroup;  // groups of 32 columns per round
  alignas(64) int32_t sums[kSumTiles][kTokens][kTileRows];
  int configured = 0;
  for (int64_t t0 = 0; t0 < a.tokens; t0 += kTokens) {
    const int tokens = a.tokens - t0 < kTokens ? int(a.tokens - t0) : kTokens;
    if (tokens != configured) configure(tokens, kColumns);
    configured = tokens;
    int64_t g = 0;
    for (; g + kGroups <= a.groups; g += kGroups) {
      four_products(a, t0, g * kPerGroup, kColumns, sums);
      add_scaled<pairs>(a, t0, tokens, g, kGroups, sums, a.accumulate || g > 0);
    }
    for (; g < a.groups; ++g) {
      for (int i = 0; i < kPerGroup; ++i) one_product(a, t0, g * kPerGroup + i, kColumns, sums[i]);
      add_scaled<pairs>(a, t0, tokens, g, 1, sums, a.accumulate || g > 0);
    }
  }
  _tile_release();
}

void multiply_amx(const Int8Tile& a) {
  a.type->form == PanelForm::kGroup16 ? multiply_form<true>(a) : multiply_form<false>(a);
}

}  // namespace

const Int8Level& int8_level_amx() {
  static constexpr Int8Level kLevel{.name = "amx", .decode = decode_x86<ByteInterleave>, .multiply = multiply_amx};
  return kLevel;
}

}  // namespace longkv
