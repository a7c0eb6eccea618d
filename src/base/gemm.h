// Small fp32 matrix products on one thread, for the learned methods' forward and backward passes.
#pragma once

#include <cstdint>

namespace longkv {

// c[i][j] += sum over l of a[i][l] * b[l][j], row-major: a [m][k], b [k][n], c [m][n]; row strides in values. Sums run
// over l in ascending order, so the bits depend on the instruction set alone.
void gemm_add(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
              float* c, int64_t c_stride);

// out[j][i] = x[i][j] for x [rows][cols].
void transpose(const float* x, int64_t rows, int64_t cols, int64_t x_stride, float* out, int64_t out_stride);

}  // namespace longkv
