// Gradients through the products and pointwise operators of a transformer block. Weights are frozen: only gradients of
// activations exist. All rows are fp32, [tokens][width] without gaps.
#pragma once

#include <cstdint>

#include "base/threads.h"
#include "ops/elementwise.h"
#include "ops/weight.h"

namespace longkv {

// dx[t][c] += sum over r of dy[t][r] * w[r][c]: what y = x W^T hands back. Weights are decoded tile by tile.
void matmul_backward(const Weight& w, const float* dy, int64_t tokens, float* dx, ThreadPool& pool);

// y = weight * x * r with r = (mean(x^2) + eps)^(-1/2), for `rows` rows of `dim` values:
// dx += r * (weight * dy) - x * r^3 / dim * <x, weight * dy>.
void rms_norm_backward(const float* x, const float* weight, float eps, int64_t rows, int64_t dim, const float* dy,
                       float* dx, ThreadPool& pool);

// m = activation(gate) * up: replaces dm by the gradient of up and writes that of gate. n values.
void gate_mul_backward(Activation activation, const float* gate, const float* up, int64_t n, float* dm_dup,
                       float* dgate, ThreadPool& pool);

}  // namespace longkv
