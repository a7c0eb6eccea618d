#include "base/cpu.h"
#include "ops/matmul.h"
#include "ops/matvec_rows.h"
#include "ops/matvec_split.h"

namespace longkv {

namespace {

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

}  // namespace longkv
