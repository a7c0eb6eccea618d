// Register-blocked fp32 products over Highway: two vectors of rows by kTokens tokens.
//
// A task owns kTaskPanels panels of rows and a range of tokens. Its weights are decoded chunk by chunk of columns and
// transposed to [column][rows], so that lanes are rows and nothing is summed across lanes.
#include "ops/matmul_f32.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul_f32.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "base/float16.h"
#include "quant/tensor_type.h"

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
constexpr int kTokens = 12;  // 32 vector registers: 24 sums, two weights, one activation
#else
constexpr int kTokens = 6;
#endif
constexpr int kTaskPanels = 2;
constexpr int64_t kChunk = 320;  // most columns decoded at a time: a panel of 16 rows is 20 KiB
constexpr int64_t kTokenBlock = 48;
constexpr int64_t kMinTokenRange = 64;
constexpr int kMaxPanelRows = 32;

using D = hn::CappedTag<float, 16>;
using V = hn::Vec<D>;

inline int64_t panel_rows() { return 2 * int64_t(hn::Lanes(D())); }

// `n` values of one row, from column `col` on, as fp32.
void decode_row(const Weight& w, int64_t row, int64_t col, int64_t n, float* out) {
  const D d;
  const int64_t lanes = int64_t(hn::Lanes(d));
  switch (w.type) {
    case TensorType::kF32: {
      const float* src = reinterpret_cast<const float*>(w.row(row)) + col;
      std::copy_n(src, n, out);
      return;
    }
    case TensorType::kF16: {
      const hn::Rebind<hwy::float16_t, D> d16;
      const auto* src = reinterpret_cast<const hwy::float16_t*>(w.row(row)) + col;
      int64_t i = 0;
      for (; i + lanes <= n; i += lanes) hn::StoreU(hn::PromoteTo(d, hn::LoadU(d16, src + i)), d, out + i);
      if (i < n) dequantize(w.type, reinterpret_cast<const uint8_t*>(src + i), out + i, n - i);
      return;
    }
    case TensorType::kBF16: {
      const bf16_t* src = reinterpret_cast<const bf16_t*>(w.row(row)) + col;
      for (int64_t i = 0; i < n; ++i) out[i] = to_float(src[i]);
      return;
    }
    default: {
      const TensorTypeInfo& info = *tensor_type_info(w.type);
      dequantize(w.type, w.row(row) + col / info.block_values * info.block_bytes, out, n);
      return;
    }
  }
}

// rows_in: [panel rows][kChunk] -> panel: [columns][panel rows]. `columns` is rounded up to 4 by the caller's padding.
void transpose(const float* rows_in, int64_t columns, int64_t rows, float* panel) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) panel[c * rows + r] = rows_in[r * kChunk + c];
  }
#else
  const hn::FixedTag<float, 4> d4;
  const hn::FixedTag<double, 2> d2;
  for (int64_t r = 0; r < rows; r += 4) {
    const float* src = rows_in + r * kChunk;
    for (int64_t c = 0; c < columns; c += 4) {
      const auto r0 = hn::Load(d4, src + c), r1 = hn::Load(d4, src + kChunk + c);
      const auto r2 = hn::Load(d4, src + 2 * kChunk + c), r3 = hn::Load(d4, src + 3 * kChunk + c);
      const auto a = hn::BitCast(d2, hn::InterleaveLower(d4, r0, r1));
      const auto b = hn::BitCast(d2, hn::InterleaveLower(d4, r2, r3));
      const auto e = hn::BitCast(d2, hn::InterleaveUpper(d4, r0, r1));
      const auto f = hn::BitCast(d2, hn::InterleaveUpper(d4, r2, r3));
      float* out = panel + c * rows + r;
      hn::Store(hn::BitCast(d4, hn::InterleaveLower(d2, a, b)), d4, out);
      hn::Store(hn::BitCast(d4, hn::InterleaveUpper(d2, a, b)), d4, out + rows);
      hn::Store(hn::BitCast(d4, hn::InterleaveLower(d2, e, f)), d4, out + 2 * rows);
      hn::Store(hn::BitCast(d4, hn::InterleaveUpper(d2, e, f)), d4, out + 3 * rows);
    }
  }
#endif
}

template <int T>
void multiply_tokens(const float* panel, int64_t columns, const float* x, int64_t x_stride, float* y, int64_t y_stride,
                     bool accumulate) {
  const D d;
  const int64_t lanes = int64_t(hn::Lanes(d));
  V sums[T][2];
  for (int t = 0; t < T; ++t) {
    for (int v = 0; v < 2; ++v) {
      sums[t][v] = accumulate ? hn::LoadU(d, y + t * y_stride + v * lanes) : hn::Zero(d);
    }
  }
  for (int64_t c = 0; c < columns; ++c) {
    const V w0 = hn::Load(d, panel + c * 2 * lanes), w1 = hn::Load(d, panel + (c * 2 + 1) * lanes);
    HWY_UNROLL(12)
    for (int t = 0; t < T; ++t) {
      const V value = hn::Set(d, x[t * x_stride + c]);
      sums[t][0] = hn::MulAdd(w0, value, sums[t][0]);
      sums[t][1] = hn::MulAdd(w1, value, sums[t][1]);
    }
  }
  for (int t = 0; t < T; ++t) {
    for (int v = 0; v < 2; ++v) hn::StoreU(sums[t][v], d, y + t * y_stride + v * lanes);
  }
}

void multiply(const float* panel, int64_t columns, const float* x, int64_t x_stride, int64_t tokens, float* y,
              int64_t y_stride, bool accumulate) {
  int64_t t = 0;
  const auto go = [&](auto n) {
    constexpr int kCount = decltype(n)::value;
    for (; t + kCount <= tokens; t += kCount) {
      multiply_tokens<kCount>(panel, columns, x + t * x_stride, x_stride, y + t * y_stride, y_stride, accumulate);
    }
  };
  go(std::integral_constant<int, kTokens>());
  go(std::integral_constant<int, 4>());
  go(std::integral_constant<int, 2>());
  go(std::integral_constant<int, 1>());
}

struct Task {
  int64_t row0, token0, token1;
};

void run_task(const Weight& w, const float* x, float* y, int64_t y_stride, const Task& task) {
  const int64_t rows = panel_rows();
  alignas(64) static thread_local float decoded[kMaxPanelRows * kChunk];
  alignas(64) static thread_local float panels[kTaskPanels][kMaxPanelRows * kChunk];
  // Equal chunks of whole file blocks and of at least 32 columns.
  const int64_t step = std::max<int64_t>(32, tensor_type_info(w.type)->block_values);
  const int64_t chunks = (w.cols + kChunk - 1) / kChunk;
  const int64_t chunk = std::min(kChunk / step * step, ((w.cols + chunks - 1) / chunks + step - 1) / step * step);
  for (int64_t col = 0; col < w.cols; col += chunk) {
    const int64_t columns = std::min(chunk, w.cols - col);
    int64_t valid[kTaskPanels];
    for (int p = 0; p < kTaskPanels; ++p) {
      const int64_t row = task.row0 + p * rows;
      valid[p] = std::clamp<int64_t>(w.rows - row, 0, rows);
      if (valid[p] == 0) continue;
      std::fill_n(decoded + valid[p] * kChunk, (rows - valid[p]) * kChunk, 0.0f);
      for (int64_t r = 0; r < valid[p]; ++r) decode_row(w, row + r, col, columns, decoded + r * kChunk);
      transpose(decoded, (columns + 3) / 4 * 4, rows, panels[p]);
    }
    for (int64_t t = task.token0; t < task.token1; t += kTokenBlock) {
      const int64_t tokens = std::min(kTokenBlock, task.token1 - t);
      for (int p = 0; p < kTaskPanels; ++p) {
        if (valid[p] == 0) continue;
        float* out = y + t * y_stride + task.row0 + p * rows;
        const float* in = x + t * w.cols + col;
        if (valid[p] == rows) {
          multiply(panels[p], columns, in, w.cols, tokens, out, y_stride, col > 0);
          continue;
        }
        // The last rows: a full panel goes to a buffer, the rows that exist come back.
        alignas(64) float buffer[kTokenBlock * kMaxPanelRows];
        for (int64_t i = 0; i < tokens && col > 0; ++i) {
          std::copy_n(out + i * y_stride, valid[p], buffer + i * rows);
          std::fill_n(buffer + i * rows + valid[p], rows - valid[p], 0.0f);
        }
        multiply(panels[p], columns, in, w.cols, tokens, buffer, rows, col > 0);
        for (int64_t i = 0; i < tokens; ++i) std::copy_n(buffer + i * rows, valid[p], out + i * y_stride);
      }
    }
  }
}

void matmul_f32_target(const Weight& w, const float* x, int64_t tokens, float* y, int64_t y_stride, ThreadPool& pool) {
  const int64_t task_rows = kTaskPanels * panel_rows();
  const int64_t row_tasks = (w.rows + task_rows - 1) / task_rows;
  // Few rows on many threads: split the tokens too. Results do not depend on the split.
  const int64_t wanted = (3 * pool.threads() + row_tasks - 1) / row_tasks;
  const int64_t parts = std::max<int64_t>(1, std::min(wanted, tokens / kMinTokenRange));
  const int64_t range = ((tokens + parts - 1) / parts + kTokenBlock - 1) / kTokenBlock * kTokenBlock;
  const int64_t token_tasks = (tokens + range - 1) / range;
  pool.run(row_tasks * token_tasks, [&](int64_t task, int) {
    const int64_t token0 = task % token_tasks * range;
    run_task(w, x, y, y_stride, {task / token_tasks * task_rows, token0, std::min(tokens, token0 + range)});
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(matmul_f32_target);

void matmul_f32(const Weight& w, const float* x, int64_t tokens, float* y, int64_t y_stride, ThreadPool& pool) {
  HWY_DYNAMIC_DISPATCH(matmul_f32_target)(w, x, tokens, y, y_stride, pool);
}

}  // namespace longkv
#endif
