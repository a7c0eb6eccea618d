// Prompt products in bf16 through oneDNN.
#pragma once

#include <cstdint>

#include "base/threads.h"
#include "ops/weight.h"

namespace longkv {

// Built with oneDNN, and the active instruction-set level is one that it multiplies bf16 on (AVX-512).
bool has_matmul_bf16();

// y[t][r] = sum_c bf16(w[r][c]) bf16(x[t][c]), summed in fp32. Rows are decoded tile by tile; every tile is a
// single-threaded oneDNN product inside a task of `pool`. Returns false when oneDNN refuses the product, y is then
// undefined. Call only if has_matmul_bf16().
bool matmul_bf16(const Weight& w, const float* x, int64_t tokens, float* y, int64_t y_stride, ThreadPool& pool);

}  // namespace longkv
