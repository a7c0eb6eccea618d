#include "kv/codec/rotate.h"

#include <cmath>
#include <cstring>

namespace longkv {

int64_t rotation_block(int64_t dim) { return dim & -dim; }

void rotate_rows(const float* src, int64_t src_stride, int64_t n, int64_t dim, float* dst, int64_t dst_stride) {
  const int64_t block = rotation_block(dim);
  const float factor = 1.0f / std::sqrt(float(block));
  for (int64_t r = 0; r < n; ++r) {
    float* row = dst + r * dst_stride;
    std::memmove(row, src + r * src_stride, size_t(dim) * sizeof(float));
    for (int64_t half = 1; half < block; half *= 2) {
      for (int64_t i = 0; i < dim; i += 2 * half) {
        float* a = row + i;
        float* b = a + half;
        for (int64_t j = 0; j < half; ++j) {
          const float x = a[j], y = b[j];
          a[j] = x + y;
          b[j] = x - y;
        }
      }
    }
    for (int64_t c = 0; c < dim; ++c) row[c] *= factor;
  }
}

}  // namespace longkv
