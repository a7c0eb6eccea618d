#include "prefill/pooled.h"

#include <algorithm>
#include <cmath>

#include "base/checked.h"
#include "kv/codec/codec.h"

namespace longkv {

void pool_keys(const KvHeadView& kv, int64_t rows, int64_t block, ThreadPool& pool, std::vector<float>& means) {
  const int64_t dim = kv.dim_k;
  means.assign(size_t(ceil_div(rows, block) * dim), 0.0f);
  pool.run(ceil_div(rows, block), [&](int64_t b, int) {
    constexpr int64_t kPiece = 16;  // rows decoded at a time
    float decoded[kPiece * 1024];
    float* mean = means.data() + b * dim;
    const int64_t begin = std::max(kv.first_row, b * block), end = std::min(rows, (b + 1) * block);
    for (int64_t row = begin; row < end; row += kPiece) {
      const int64_t n = std::min(kPiece, end - row);
      decode_k_rows(kv, row, row + n, decoded);
      for (int64_t r = 0; r < n; ++r) {
        for (int64_t i = 0; i < dim; ++i) mean[i] += decoded[r * dim + i];
      }
    }
    if (begin >= end) return;
    const float inverse = 1.0f / float(end - begin);
    for (int64_t i = 0; i < dim; ++i) mean[i] *= inverse;
  });
}

void pool_queries(const float* q, int64_t q_stride, int64_t n, int64_t dim, float* mean) {
  std::fill_n(mean, dim, 0.0f);
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t i = 0; i < dim; ++i) mean[i] += q[r * q_stride + i];
  }
  for (int64_t i = 0; i < dim; ++i) mean[i] /= float(n);
}

void mean_shares(const float* mean, const float* keys, int64_t blocks, int64_t dim, float scale, float* shares) {
  for (int64_t b = 0; b < blocks; ++b) {
    float lanes[8] = {};  // independent sums, which the compiler keeps in vectors
    int64_t i = 0;
    for (; i + 8 <= dim; i += 8) {
      for (int64_t j = 0; j < 8; ++j) lanes[j] += mean[i + j] * keys[b * dim + i + j];
    }
    for (; i < dim; ++i) lanes[0] += mean[i] * keys[b * dim + i];
    float dot = 0;
    for (const float lane : lanes) dot += lane;
    shares[b] = scale * dot;
  }
  const float top = *std::max_element(shares, shares + blocks);
  double sum = 0;
  for (int64_t b = 0; b < blocks; ++b) sum += shares[b] = std::exp(shares[b] - top);
  for (int64_t b = 0; b < blocks; ++b) shares[b] = float(shares[b] / sum);
}

}  // namespace longkv
