// Prompt products in fp32: weights of any type are decoded to fp32 panel by panel.
#pragma once

#include <cstdint>

#include "base/threads.h"
#include "ops/weight.h"

namespace longkv {

// y[t][r] = sum_c w[r][c] x[t][c]; x: [tokens][cols], contiguous. The bits of a token's result depend neither on the
// thread count nor on the other tokens.
void matmul_f32(const Weight& w, const float* x, int64_t tokens, float* y, int64_t y_stride, ThreadPool& pool);

}  // namespace longkv
