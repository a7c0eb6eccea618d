// Pointwise operators of the transformer block.
#pragma once

#include <cstdint>

#include "base/threads.h"

namespace longkv {

enum class Activation { kSilu, kGeluTanh };

// y[i] += x[i], n values.
void add_in_place(float* y, const float* x, int64_t n, ThreadPool& pool);
// y[r][c] += bias[c].
void add_bias(float* y, const float* bias, int64_t rows, int64_t cols, ThreadPool& pool);
// gate[i] = activation(gate[i]) * up[i], n values. GELU in its tanh form.
void gate_mul(Activation activation, float* gate, const float* up, int64_t n, ThreadPool& pool);
// y[i] *= s, n values.
void scale_in_place(float* y, float s, int64_t n, ThreadPool& pool);
// y[i] = cap * tanh(y[i] / cap), n values.
void softcap_in_place(float* y, float cap, int64_t n, ThreadPool& pool);

}  // namespace longkv
