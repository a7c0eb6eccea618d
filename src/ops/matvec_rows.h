// One signature behind which each instruction-set level keeps its int8 matrix-vector kernels.
#pragma once

#include <cstdint>

#include "ops/quantize_rows.h"
#include "ops/weight.h"

namespace longkv {

// Computes y[t * y_stride + r] for all tokens of x and rows r in [begin, end) of w. A row's result depends on nothing
// but that row and the input, so any split of the rows gives the same bits.
using MatvecRows = void (*)(const Weight& w, const QuantizedRows& x, int64_t begin, int64_t end, float* y,
                            int64_t y_stride);

// Kernel of one level for a weight type; nullptr when the type has no int8 form.
MatvecRows matvec_rows_base(TensorType type);
#if defined(__x86_64__)
MatvecRows matvec_rows_avx2(TensorType type);
MatvecRows matvec_rows_avx512vnni(TensorType type);
#elif defined(__aarch64__)
MatvecRows matvec_rows_neondot(TensorType type);
#endif

// Most tokens that share one pass over the weights; more are done in several passes over a row group in cache.
inline constexpr int kMatvecTokens = 4;

}  // namespace longkv
