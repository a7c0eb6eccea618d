// RMS normalisation.
#pragma once

#include <cstdint>

#include "base/threads.h"

namespace longkv {

// y[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight, for `rows` rows of `dim` values; row strides in values.
// weight: [dim]. x and y may be the same memory.
void rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows, int64_t dim, float* y,
              int64_t y_stride, ThreadPool& pool);

}  // namespace longkv
