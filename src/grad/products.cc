#include "grad/products.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/checked.h"
#include "base/gemm.h"

namespace longkv {

namespace {

// A task decodes 64 rows by 256 columns at a time, 64 KiB: whole blocks of every weight type.
constexpr int64_t kRows = 64;
constexpr int64_t kColumns = 256;
constexpr int64_t kValues = 4096;  // of a task that works value by value

}  // namespace

void matmul_backward(const Weight& w, const float* dy, int64_t tokens, float* dx, ThreadPool& pool) {
  pool.run(ceil_div(w.cols, kColumns), [&](int64_t task, int) {
    thread_local std::vector<float> tile(size_t(kRows * kColumns));
    const int64_t col = task * kColumns, cols = std::min(kColumns, w.cols - col);
    const TensorTypeInfo& type = *tensor_type_info(w.type);
    const int64_t at = col / type.block_values * type.block_bytes;
    for (int64_t row = 0; row < w.rows; row += kRows) {
      const int64_t rows = std::min(kRows, w.rows - row);
      for (int64_t r = 0; r < rows; ++r) {
        dequantize(w.type, w.row(row + r) + at, tile.data() + r * kColumns, cols);
      }
      gemm_add(tokens, cols, rows, dy + row, w.rows, tile.data(), kColumns, dx + col, w.cols);
    }
  });
}

void rms_norm_backward(const float* x, const float* weight, float eps, int64_t rows, int64_t dim, const float* dy,
                       float* dx, ThreadPool& pool) {
  const int64_t per_task = std::max<int64_t>(1, kValues / dim);
  pool.run(ceil_div(rows, per_task), [&](int64_t task, int) {
    for (int64_t i = task * per_task; i < std::min(rows, (task + 1) * per_task); ++i) {
      const float *at = x + i * dim, *d = dy + i * dim;
      double squares = 0, inner = 0;
      for (int64_t c = 0; c < dim; ++c) {
        squares += double(at[c]) * at[c];
        inner += double(at[c]) * weight[c] * d[c];
      }
      const double r = 1.0 / std::sqrt(squares / double(dim) + eps);
      const float scale = float(r), along = float(r * r * r / double(dim) * inner);
      for (int64_t c = 0; c < dim; ++c) dx[i * dim + c] += scale * weight[c] * d[c] - along * at[c];
    }
  });
}

void gate_mul_backward(Activation activation, const float* gate, const float* up, int64_t n, float* dm_dup,
                       float* dgate, ThreadPool& pool) {
  pool.run(ceil_div(n, kValues), [&](int64_t task, int) {
    for (int64_t i = task * kValues; i < std::min(n, (task + 1) * kValues); ++i) {
      const float g = gate[i];
      float value, slope;
      if (activation == Activation::kSilu) {
        const float sigmoid = 1.0f / (1.0f + std::exp(-g));
        value = g * sigmoid;
        slope = sigmoid * (1.0f + g * (1.0f - sigmoid));
      } else {
        // gelu(g) = g/2 (1 + tanh(a (g + b g^3))).
        constexpr float kA = 0.7978845608028654f, kB = 0.044715f;
        const float tanh = std::tanh(kA * (g + kB * g * g * g));
        value = 0.5f * g * (1.0f + tanh);
        slope = 0.5f * (1.0f + tanh) + 0.5f * g * (1.0f - tanh * tanh) * kA * (1.0f + 3.0f * kB * g * g);
      }
      dgate[i] = dm_dup[i] * up[i] * slope;
      dm_dup[i] *= value;
    }
  });
}

}  // namespace longkv
