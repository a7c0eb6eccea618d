// What the int8 prompt kernels of all instruction-set levels share: the decoded form of weights, and the operands of
// one tile.
//
// A weight is brought to   w = scale * (u - zero) + offset   with u of at most 8 bits, `zero` one constant per type,
// and scale and offset per row and group of 32 columns. 16 rows are decoded together and interleaved so that one
// vector holds four consecutive columns of every row; a broadcast of the same four columns of a token then gives one
// partial dot product per 32-bit lane, and nothing is ever summed across lanes:
//   sum_c w x = sum_groups x_scale * scale * sum(u - zero) q  +  sum_groups offset * x_scale * sum(q).
#pragma once

#include <cstdint>

#include "base/cpu.h"
#include "ops/weight.h"

namespace longkv {

inline constexpr int kTileRows = 16;

enum class PanelForm {
  kGroup32,  // u of up to 5 bits, a float scale per group of 32
  kGroup16,  // u of up to 6 bits, an integer scale per 16 values and a float one over it
  kByte,     // signed 8-bit values, a float scale per group of 32
};

struct PanelType {
  PanelForm form;
  int zero;          // the u that stands for weight 0 (before the offset)
  int offset_group;  // values that share an offset: 0 (no offset), 16 or 32
  int64_t block;     // values of a file block: 32 or 256; column chunks are multiples of it
};

// nullptr for types without an int8 form.
const PanelType* panel_type(TensorType type);

// 16 decoded rows of `columns` columns. The layout of `levels` belongs to the level that wrote it.
struct Panel {
  uint8_t* levels;   // [columns][16] bytes, or twice that where a level widens
  float* scale;      // [columns / 32][16]
  float* offset;     // [columns / offset_group][16]
  int16_t* scale16;  // [columns / 16][16][2], every scale twice; types decoded as kGroup16

  // From group g of 32 columns on, where levels have one byte.
  Panel from_group(int64_t g, const PanelType& type) const {
    const int64_t offsets = type.offset_group == 0 ? 0 : 32 / type.offset_group;
    return {levels + g * 32 * kTileRows, scale + g * kTileRows, offset + g * offsets * kTileRows,
            scale16 + g * 4 * kTileRows};
  }
};

// One panel, or two of neighbouring rows, against some tokens.
struct Int8Tile {
  const PanelType* type;
  Panel panel;
  Panel second;    // its levels are nullptr where the level takes one panel at a time, or no second one is left
  int64_t groups;  // groups of 32 columns in this chunk
  int64_t tokens;
  // Activations from the chunk's first column on. Strides count elements from one token to the next.
  const int8_t* q;
  const int16_t* q16;  // wide activations, in their place where the level multiplies 16 bits
  int64_t q_stride;
  const float* x_scale;  // [tokens][columns / 32]
  int64_t x_scale_stride;
  const float* x_sum;  // [tokens][columns / offset_group]: x_scale * sum(q)
  int64_t x_sum_stride;
  // [tokens][columns / G][2], G = 16 or 32 by form: two values of the level's own making (Int8Level::zero_terms).
  const int16_t* x_zero;
  int64_t x_zero_stride;
  const int16_t* x_sum16;  // [tokens][columns / 16]: sum(q)
  int64_t x_sum16_stride;
  float* y;  // [rows][16], or 32 side by side for two panels
  int64_t y_stride;
  const int32_t* y_rows;  // row of y that belongs to each token, plus `first_row`; nullptr: token t has row t
  int64_t first_row;
  bool accumulate;  // add to y instead of setting it

  float* row(int64_t t) const { return y + (y_rows == nullptr ? t : y_rows[t] - first_row) * y_stride; }
};

// Second terms of a block of tokens, each one group of columns of one token: ops/quantize_rows.h.
struct FineTerms {
  const int32_t* first;  // [groups]: terms [first[g], last[g]) belong to group g of the chunk
  const int32_t* last;
  const int32_t* token;  // [terms]
  int64_t token0;        // the block's first one
  // As in Int8Tile, but for terms: rows of one group each.
  const int8_t* q;
  const float* x_scale;
  const float* x_sum;
  int64_t x_sum_stride;
  const int16_t* x_zero;
  int64_t x_zero_stride;
  const int16_t* x_sum16;
};

struct Int8Level {
  const char* name;
  // kByte panels hold 16-bit levels and meet 16-bit activations, which need no second term.
  bool wide = false;
  int panels = 1;     // that multiply() takes together, 1 or 2
  int byte_zero = 0;  // the level that stands for 0 in its kByte panels
  // Bytes of levels in one decoded panel: half of a small first-level cache, the rest is for activations.
  int64_t panel_bytes = 16 * 1024;
  // Fills one token's x_zero for groups of 16 or 32: what multiply() starts the sums of a group with, so that levels
  // count from `zero`. nullptr where multiply() needs nothing.
  void (*zero_terms)(const int8_t* q, const int16_t* sum16, int64_t columns, int group, int zero,
                     int16_t* x_zero) = nullptr;
  // Decodes rows [row, row + valid) of columns [col, col + columns); rows valid..15 become zero.
  void (*decode)(const Weight& w, int64_t row, int valid, int64_t col, int64_t columns, const Panel& panel);
  // What decode() brings a type to, where that is not panel_type(); nullptr: it always is.
  const PanelType* (*own_type)(TensorType type) = nullptr;
  void (*multiply)(const Int8Tile& tile);
  // Adds the products of second terms to the rows of the tile that their tokens have; nullptr: multiply() is called for
  // each group.
  void (*add_terms)(const Int8Tile& tile, const FineTerms& fine) = nullptr;
};

const Int8Level& int8_level_base();
#if defined(__x86_64__)
const Int8Level& int8_level_avx2();
const Int8Level& int8_level_avx512vnni();
const Int8Level& int8_level_amx();
#elif defined(__aarch64__)
const Int8Level& int8_level_neondot();
#endif

// The kernels that active_isa() selects.
const Int8Level& active_int8_level();

}  // namespace longkv
