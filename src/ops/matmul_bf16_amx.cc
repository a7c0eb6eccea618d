// Prompt products in bf16 on AMX: 32 tokens by 32 rows at a time, four tiles of fp32 sums.
//
// Weights are decoded to fp32, rounded to bf16 and laid out as tdpbf16ps reads its second operand; tokens are rounded
// once per product. Group scales are in the rounded weights, so sums stay in the tiles over a whole chunk of columns:
// with integers, every group of 32 columns would leave them for its scale, which takes longer than its product. A
// task's chunk of weights (128 KiB) stays in the second-level cache, a block of tokens (32 KiB) in the first.
//
// Floor: a product of tiles takes 16 cycles for 16,384 operations of two, as long as four loads of tiles from the
// second level.
#include <algorithm>
#include <vector>

#include "base/checked.h"
#include "base/float16.h"
#include "ops/amx_tiles.h"
#include "ops/matmul_bf16.h"
#include "ops/matmul_x86-inl.h"
#include "quant/tensor_type.h"

namespace longkv {

namespace {

constexpr int64_t kTile = 16;   // tokens or rows of a tile
constexpr int64_t kDepth = 32;  // columns of a tile
constexpr int64_t kTileValues = kTile * kDepth;
constexpr int64_t kChunk = 512;     // columns decoded at a time; a multiple of every file block
constexpr int64_t kMostRows = 128;  // of a task
constexpr int64_t kTokenBlock = 2 * kTile;
constexpr int64_t kMinTokenRange = 128;  // below that, decoding the same rows again costs more than idle threads

// Tiles 0 to 3: sums, tokens x rows. 4 and 5: tokens x columns. 6 and 7: pairs of columns x rows of two.
void configure() {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = kTile;
    config.row_bytes[i] = 64;
  }
  load_tiles(config);
}

// Adds (or sets) 32 tokens by 32 rows over `depth` tiles of columns. Tokens: two runs of tiles [16 tokens][32 columns],
// weights: two runs of [16 pairs of columns][16 rows][2]. y: [32][y_stride].
void multiply(const bf16_t* x0, const bf16_t* x1, const bf16_t* w0, const bf16_t* w1, int64_t depth, float* y,
              int64_t y_stride, bool accumulate) {
  settle_memory();
  const int64_t bytes = y_stride * int64_t(sizeof(float));
  float* below = y + kTile * y_stride;
  if (accumulate) {
    _tile_loadd(0, y, bytes);
    _tile_loadd(1, y + kTile, bytes);
    _tile_loadd(2, below, bytes);
    _tile_loadd(3, below + kTile, bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < depth; ++k) {
    const int64_t at = k * kTileValues;
    _tile_loadd(4, x0 + at, 64);
    _tile_loadd(6, w0 + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w1 + at, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x1 + at, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, y, bytes);
  _tile_stored(1, y + kTile, bytes);
  _tile_stored(2, below, bytes);
  _tile_stored(3, below + kTile, bytes);
}

inline __m512i rounded(__m512 v) { return _mm512_cvtepu16_epi32(__m256i(_mm512_cvtneps_pbh(v))); }

// 16 tokens from `t` on as tiles [cols / 32][16][32]; tokens that do not exist are zero, and so are columns.
void round_tokens(const float* x, int64_t t, int64_t tokens, int64_t cols, bf16_t* out) {
  for (int64_t i = 0; i < kTile; ++i) {
    const float* row = x + std::min(t + i, tokens - 1) * cols;
    for (int64_t c = 0; c < cols; c += kDepth) {
      bf16_t* to = out + c * kTile + i * kDepth;
      const int64_t n = t + i < tokens ? std::min(kDepth, cols - c) : 0;
      const auto low = __mmask16(n >= 16 ? 0xffffu : (1u << n) - 1);
      const auto high = __mmask16(n >= 32 ? 0xffffu : n > 16 ? (1u << (n - 16)) - 1 : 0);
      const __m512 a = _mm512_maskz_loadu_ps(low, row + c), b = _mm512_maskz_loadu_ps(high, row + c + 16);
      _mm512_storeu_si512(to, __m512i(_mm512_cvtne2ps_pbh(b, a)));
    }
  }
}

// Scratch of one thread; contents are overwritten by every chunk.
struct Scratch {
  alignas(64) uint8_t levels[kChunk * kTile];
  alignas(64) float scale[kChunk / 32 * kTile], offset[kChunk / 16 * kTile];
  alignas(64) int16_t scale16[kChunk / 16 * 2 * kTile];
  alignas(64) float decoded[kTile][kChunk];
  alignas(64) bf16_t weights[kMostRows * kChunk];
  alignas(64) float sums[kTokenBlock * kMostRows];
};

// What ByteInterleave wrote, as tiles: w = scale (u - zero) + offset.
void tiles_of_levels(const Panel& panel, const PanelType& type, int64_t columns, bf16_t* out) {
  const __m512 zero = _mm512_set1_ps(float(byte_zero(type)));
  const __m512i byte = _mm512_set1_epi32(0xff);
  for (int64_t half = 0; half < columns / 16; ++half) {  // 16 columns
    const int64_t group = half / 2;
    __m512 scale = _mm512_load_ps(panel.scale + group * kTile);
    if (type.form == PanelForm::kGroup16) {
      // Every 16-bit scale is stored twice: the upper one, sign-extended, is the 32-bit scale of the lane.
      const __m512i whole = _mm512_srai_epi32(_mm512_loadu_si512(panel.scale16 + half * 2 * kTile), 16);
      scale = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(whole));
    }
    __m512 start = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(scale, zero));
    if (type.offset_group != 0) {
      start = _mm512_add_ps(start, _mm512_load_ps(panel.offset + half * 16 / type.offset_group * kTile));
    }
    for (int j = 0; j < 4; ++j) {
      const __m512i four = _mm512_load_si512(panel.levels + (half * 4 + j) * 64);
      const auto value = [&](int i) {
        const __m512i u = _mm512_and_si512(_mm512_srl_epi32(four, _mm_cvtsi32_si128(8 * i)), byte);
        return rounded(_mm512_fmadd_ps(_mm512_cvtepi32_ps(u), scale, start));
      };
      bf16_t* to = out + (half * 8 + 2 * j) * 2 * kTile;
      _mm512_store_si512(to, _mm512_or_si512(value(0), _mm512_slli_epi32(value(1), 16)));
      _mm512_store_si512(to + 2 * kTile, _mm512_or_si512(value(2), _mm512_slli_epi32(value(3), 16)));
    }
  }
}

// 16 rows of fp32 values, `columns` of them valid, as tiles of `padded` columns.
void tiles_of_floats(const float (&rows)[kTile][kChunk], int64_t padded, bf16_t* out) {
  alignas(64) uint32_t pairs[kTile][kTile];  // [row][pair of columns]
  const __m512i rows_apart = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                                _mm512_set1_epi32(int(kTile)));
  for (int64_t c = 0; c < padded; c += kDepth) {
    for (int64_t r = 0; r < kTile; ++r) {
      const __m512 a = _mm512_loadu_ps(rows[r] + c), b = _mm512_loadu_ps(rows[r] + c + 16);
      _mm512_store_si512(pairs[r], __m512i(_mm512_cvtne2ps_pbh(b, a)));
    }
    for (int64_t p = 0; p < kTile; ++p) {
      _mm512_store_si512(out + (c / 2 + p) * 2 * kTile, _mm512_i32gather_epi32(rows_apart, &pairs[0][p], 4));
    }
  }
}

// Rows [row, row + 16) of columns [col, col + columns) as tiles; rows and columns beyond the matrix are zero.
void decode_tiles(const Weight& w, int64_t row, int64_t col, int64_t columns, Scratch& s, bf16_t* out) {
  const int64_t valid = std::clamp<int64_t>(w.rows - row, 0, kTile);
  const int64_t padded = round_up(columns, kDepth);
  if (valid == 0) {
    std::fill_n(out, padded * kTile, bf16_t{});
    return;
  }
  if (const PanelType* type = panel_type(w.type); type != nullptr) {
    const Panel panel{s.levels, s.scale, s.offset, s.scale16};
    decode_x86<ByteInterleave>(w, row, int(valid), col, columns, panel);
    return tiles_of_levels(panel, *type, columns, out);
  }
  const TensorTypeInfo& info = *tensor_type_info(w.type);
  for (int64_t r = 0; r < kTile; ++r) {
    float* to = s.decoded[r];
    const int64_t n = r < valid ? columns : 0;
    if (w.type == TensorType::kF16 && n % 16 == 0) {
      for (int64_t c = 0; c < n; c += 16) {
        const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w.row(row + r) + 2 * (col + c)));
        _mm512_store_ps(to + c, _mm512_cvtph_ps(halves));
      }
    } else if (n > 0)
      dequantize(w.type, w.row(row + r) + col / info.block_values * info.block_bytes, to, n);
    std::fill(to + n, to + padded, 0.0f);
  }
  tiles_of_floats(s.decoded, padded, out);
}

struct Task {
  int64_t row, rows;  // rows of the task, a multiple of 32, also beyond the matrix
  int64_t token, token_end;
};

// x: tokens as round_tokens() writes them, 16 after 16.
void run_task(const Weight& w, const bf16_t* x, float* y, int64_t y_stride, const Task& task, Scratch& s) {
  const int64_t x_cols = round_up(w.cols, kDepth);
  const int64_t valid = std::min(task.rows, w.rows - task.row);
  for (int64_t col = 0; col < w.cols; col += kChunk) {
    const int64_t columns = std::min(kChunk, w.cols - col);
    const int64_t depth = ceil_div(columns, kDepth), run = depth * kTileValues;
    for (int64_t r = 0; r < task.rows; r += kTile) {
      decode_tiles(w, task.row + r, col, columns, s, s.weights + r / kTile * run);
    }
    for (int64_t t = task.token; t < task.token_end; t += kTokenBlock) {
      const int64_t tokens = std::min(kTokenBlock, task.token_end - t);
      const bool whole = tokens == kTokenBlock && valid == task.rows;
      float* out = whole ? y + t * y_stride + task.row : s.sums;
      const int64_t stride = whole ? y_stride : task.rows;
      if (!whole && col > 0) {
        for (int64_t i = 0; i < tokens; ++i) {
          std::copy_n(y + (t + i) * y_stride + task.row, valid, s.sums + i * task.rows);
        }
      }
      const bf16_t* tile = x + t * x_cols + col * kTile;
      for (int64_t r = 0; r < task.rows; r += 2 * kTile) {
        const bf16_t* weights = s.weights + r / kTile * run;
        multiply(tile, tile + kTile * x_cols, weights, weights + run, depth, out + r, stride, col > 0);
      }
      if (whole) continue;
      for (int64_t i = 0; i < tokens; ++i) {
        std::copy_n(s.sums + i * task.rows, valid, y + (t + i) * y_stride + task.row);
      }
    }
  }
}

}  // namespace

void matmul_bf16_amx(const Weight& w, const float* x, int64_t tokens, float* y, int64_t y_stride, ThreadPool& pool) {
  const int64_t x_cols = round_up(w.cols, kDepth), blocks = ceil_div(tokens, kTokenBlock) * 2;
  thread_local std::vector<bf16_t> rounded_tokens;
  rounded_tokens.resize(std::max(rounded_tokens.size(), size_t(blocks * kTile * x_cols) + kDepth));
  const auto over = reinterpret_cast<uintptr_t>(rounded_tokens.data()) % 64 / sizeof(bf16_t);
  bf16_t* x16 = rounded_tokens.data() + (over == 0 ? 0 : kDepth - int64_t(over));
  pool.run(blocks,
           [&](int64_t block, int) { round_tokens(x, block * kTile, tokens, w.cols, x16 + block * kTile * x_cols); });

  // Many rows a task spare loads of tokens, few leave tasks for all threads. Few rows on many threads: split the tokens
  // too. Results do not depend on either.
  int64_t rows = kMostRows;
  while (rows > kTokenBlock && ceil_div(w.rows, rows) < 2 * pool.threads()) rows /= 2;
  const int64_t row_tasks = ceil_div(w.rows, rows);
  const int64_t parts =
      std::clamp<int64_t>(ceil_div(3 * pool.threads(), row_tasks), 1, std::max<int64_t>(1, tokens / kMinTokenRange));
  const int64_t range = round_up(ceil_div(tokens, parts), kTokenBlock), token_tasks = ceil_div(tokens, range);
  pool.run(row_tasks * token_tasks, [&](int64_t task, int) {
    thread_local std::vector<Scratch> scratch(1);
    const int64_t token = task % token_tasks * range;
    configure();
    run_task(w, x16, y, y_stride, {task / token_tasks * rows, rows, token, std::min(tokens, token + range)},
             scratch[0]);
    _tile_release();
  });
}

}  // namespace longkv
