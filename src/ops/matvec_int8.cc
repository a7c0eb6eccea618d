#include <array>

#include "base/cpu.h"
#include "ops/matmul.h"
#include "ops/matvec_rows.h"
#include "ops/matvec_split.h"

namespace longkv {

namespace {

constexpr size_t kMostOutputs = 4;  // of one job; no family multiplies an input by more weights

MatvecRows kernel(TensorType type) {
  switch (active_isa()) {
#if defined(__x86_64__)
    case IsaLevel::kAvx2:
    case IsaLevel::kAvx512: return matvec_rows_avx2(type);
    case IsaLevel::kAvx512Vnni:
    case IsaLevel::kAvx512Bf16:
    case IsaLevel::kAmx: return matvec_rows_avx512vnni(type);
#elif defined(__aarch64__)
    case IsaLevel::kNeonDot: return matvec_rows_neondot(type);
#endif
    default: return matvec_rows_base(type);
  }
}

}  // namespace

bool has_int8_form(TensorType type) { return matvec_rows_base(type) != nullptr; }

void matvec_int8(const Weight& w, const QuantizedRows& x, float* y, int64_t y_stride, ThreadPool& pool) {
  const MatvecRows rows = kernel(w.type);
  for_row_ranges(w, pool, [&](int64_t begin, int64_t end) { rows(w, x, begin, end, y, y_stride); });
}

void matvec_int8(std::span<const MatmulOutput> outputs, const QuantizedRows& x, ThreadPool& pool) {
  struct Part {
    const MatmulOutput* output;
    MatvecRows rows;
    int64_t rows_per_task, first_task;
  };
  std::array<Part, kMostOutputs> parts;
  for (; !outputs.empty(); outputs = outputs.subspan(std::min(outputs.size(), parts.size()))) {
    const size_t count = std::min(outputs.size(), parts.size());
    int64_t bytes = 0, tasks = 0;
    for (const MatmulOutput& o : outputs.first(count)) bytes += o.w->rows * o.w->row_bytes;
    const int64_t wanted = task_bytes(bytes, pool.threads());
    for (size_t i = 0; i < count; ++i) {
      const Weight& w = *outputs[i].w;
      parts[i] = {&outputs[i], kernel(w.type), task_rows(w, wanted), tasks};
      tasks += ceil_div(w.rows, parts[i].rows_per_task);
    }
    pool.run(tasks, [&](int64_t task, int) {
      size_t i = count - 1;
      while (task < parts[i].first_task) --i;
      const Part& p = parts[i];
      const int64_t begin = (task - p.first_task) * p.rows_per_task;
      p.rows(*p.output->w, x, begin, std::min(p.output->w->rows, begin + p.rows_per_task), p.output->y,
             p.output->y_stride);
    });
  }
}

}  // namespace longkv
