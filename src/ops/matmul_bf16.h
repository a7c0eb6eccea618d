// Prompt products in bf16: on AMX tiles, or through oneDNN on AVX-512.
#pragma once

#include <cstdint>

#include "base/threads.h"
#include "ops/weight.h"

namespace longkv {

// The active instruction-set level has AMX; or it has AVX-512 and the build oneDNN.
bool has_matmul_bf16();

// Who multiplies at the active level.
const char* matmul_bf16_name();

// A token's result depends on neither the number of tokens nor that of threads. oneDNN promises the second alone.
bool bf16_by_token();

// y[t][r] = sum_c bf16(w[r][c]) bf16(x[t][c]), summed in fp32; x: [tokens][w.cols]. Rows are decoded tile by
// tile. Returns false when oneDNN refuses the product, y is then undefined. Call only if has_matmul_bf16().
bool matmul_bf16(const Weight& w, const float* x, int64_t tokens, float* y, int64_t y_stride, ThreadPool& pool);

#if defined(__x86_64__)
// Its form on AMX, for level kAmx.
void matmul_bf16_amx(const Weight& w, const float* x, int64_t tokens, float* y, int64_t y_stride, ThreadPool& pool);
#endif

}  // namespace longkv
