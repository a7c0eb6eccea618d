// Operators on the card, each the counterpart of one in src/ops, src/model or src/kv. Every call queues work on a
// stream and returns the status of the launch; errors of the work itself show when the stream is waited for.
//
// `half_t` values are IEEE halves, as bare bits here so that callers need no CUDA header.
#pragma once

#include <cstdint>

#include "cuda/matrix.h"
#include "longkv/status.h"
#include "model/rope.h"
#include "ops/elementwise.h"

namespace longkv::card {

using half_t = uint16_t;

// One row of activations for products at decode: 8-bit integers with a scale per 32 values for quantised matrices, and
// the floats themselves for float matrices.
struct CardRow {
  float* f = nullptr;      // [cols]
  int8_t* q = nullptr;     // two planes [cols / 32][16]: first and second half of every group
  float* scale = nullptr;  // [cols / 32][4]: scale, scale * sum of the first 16 q, of the last 16, 0
  static int64_t bytes(int64_t cols) { return cols * 4 + cols + cols / 32 * 16; }
  static CardRow at(uint8_t* memory, int64_t cols);  // memory: 16-byte aligned; cols: a multiple of 32
};

// --- weights -------------------------------------------------------------------------------------------------------
// Rows as they lie in a GGUF file, already on the card, to rows [first, first + n) of m.
Status pack_rows(const CardMatrix& m, const uint8_t* raw, int64_t raw_row_bytes, int64_t first, int64_t n,
                 CardStreamHandle stream);
// The same from the packed form of all n rows of a matrix (ops/packed_rows.h).
Status pack_eights(const CardMatrix& m, const uint8_t* packed, int64_t raw_row_bytes, int64_t first, int64_t n,
                   CardStreamHandle stream);
// out[r][c]: rows [first, first + n) as halves, for products of prompts.
Status decode_matrix(const CardMatrix& m, int64_t first, int64_t n, half_t* out, CardStreamHandle stream);
// y[r] = m[r] . x (+ bias[r]) (+ y[r] if accumulate). y may not overlap x.
Status matvec(const CardMatrix& m, const CardRow& x, const float* bias, bool accumulate, float* y,
              CardStreamHandle stream);

// --- one token -----------------------------------------------------------------------------------------------------
// out = x / rms(x) * weight, as floats and integers. weight nullptr: out = x. dim: a multiple of 32.
Status norm_row(const float* x, const float* weight, float eps, int64_t dim, const CardRow& out,
                CardStreamHandle stream);
// y += x / rms(x) * weight: a block's output that is normalised before it joins the residual stream.
Status add_norm_row(const float* x, const float* weight, float eps, int64_t dim, float* y, CardStreamHandle stream);
// out = activation(gate_up[0 .. n)) * gate_up[n .. 2n), as floats and integers. n: a multiple of 32.
Status gate_row(Activation activation, const float* gate_up, int64_t n, const CardRow& out, CardStreamHandle stream);
// y = cap * tanh(y / cap).
Status softcap(float* y, float cap, int64_t n, CardStreamHandle stream);

// --- chunks of a prompt --------------------------------------------------------------------------------------------
// out[t] = x[t] / rms(x[t]) * weight as halves.
Status norm_rows(const float* x, const float* weight, float eps, int64_t rows, int64_t dim, half_t* out,
                 CardStreamHandle stream);
// y[t] += row_scale[t] * x[t] (+ bias); with `weight`, the sum is normalised by it first. nullptr: left out.
Status add_rows(const float* x, const float* row_scale, const float* bias, const float* weight, float eps, int64_t rows,
                int64_t dim, float* y, CardStreamHandle stream);
// out[t] = activation(gate) * up / row_scale[t] as halves; row_scale, a power of two, keeps them in range.
Status gate_rows(Activation activation, const float* gate_up, int64_t rows, int64_t n, half_t* out, float* row_scale,
                 CardStreamHandle stream);

}  // namespace longkv::card
