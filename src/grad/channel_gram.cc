#include "grad/channel_gram.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/checked.h"
#include "base/gemm.h"
#include "kv/layout.h"

namespace longkv {

namespace {

constexpr int64_t kTile = 256;

// C of one row and query head, [dim_k][dim_v].
std::vector<float> channel_outputs(const ChunkAttention& a, int head, const float* alpha,
                                   const std::vector<float>& mean_k, const float* q, float lse, const float* out) {
  const KvHeadView& view = a.prompt[size_t(head)];
  const float* k = reinterpret_cast<const float*>(view.k);
  const float* v = reinterpret_cast<const float*>(view.v);
  const int64_t k_stride = view.k_stride / int64_t(sizeof(float)), v_stride = view.v_stride / int64_t(sizeof(float));
  std::vector<float> c(size_t(a.dim_k) * size_t(a.dim_v), 0.0f), weighted(size_t(a.dim_k * kTile));
  std::vector<double> mean(size_t(a.dim_k), 0.0);
  for (int64_t row = a.middle.begin; row < a.middle.end; row += kTile) {
    const int64_t n = std::min(kTile, a.middle.end - row);
    transpose(k + row * k_stride, n, a.dim_k, k_stride, weighted.data(), kTile);
    float p[kTile];
    float start = 0;
    for (int64_t i = 0; i < a.dim_k; ++i) start += a.scale * q[i] * mean_k[size_t(i)];
    std::fill_n(p, n, start);
    for (int64_t i = 0; i < a.dim_k; ++i) {
      for (int64_t j = 0; j < n; ++j) weighted[size_t(i * kTile + j)] -= mean_k[size_t(i)];
      if (alpha[i] == 0.0f) continue;
      for (int64_t j = 0; j < n; ++j) p[j] += a.scale * alpha[i] * q[i] * weighted[size_t(i * kTile + j)];
    }
    for (int64_t j = 0; j < n; ++j) p[j] = std::exp(std::min(p[j] - lse, 0.0f));
    for (int64_t i = 0; i < a.dim_k; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < n; ++j) {
        float& w = weighted[size_t(i * kTile + j)];
        w *= p[j];
        sum += w;
      }
      mean[size_t(i)] += sum;
    }
    gemm_add(a.dim_k, a.dim_v, n, weighted.data(), kTile, v + row * v_stride, v_stride, c.data(), a.dim_v);
  }
  for (int64_t i = 0; i < a.dim_k; ++i) {
    for (int64_t j = 0; j < a.dim_v; ++j) c[size_t(i * a.dim_v + j)] -= float(mean[size_t(i)]) * out[j];
  }
  return c;
}

}  // namespace

void channel_grams(const ChunkAttention& a, const ChannelGramInputs& in, double* grams, ThreadPool& pool) {
  // Wo of a KV head's query heads, transposed: [group * dim_v][dim].
  const Weight& wo = *in.wo;
  const int64_t dim = wo.rows, width = int64_t(a.group) * a.dim_v, side = a.dim_k + 1;
  std::vector<float> flipped(size_t(wo.rows * wo.cols));
  pool.run(ceil_div(dim, kTile), [&](int64_t task, int) {
    const int64_t first = task * kTile, n = std::min(kTile, dim - first);
    std::vector<float> weights(size_t(n * wo.cols));
    for (int64_t r = 0; r < n; ++r) dequantize(wo.type, wo.row(first + r), weights.data() + r * wo.cols, wo.cols);
    transpose(weights.data(), n, wo.cols, wo.cols, flipped.data() + first, dim);
  });
  std::vector<std::vector<float>> means(size_t(a.kv_heads), std::vector<float>(size_t(a.dim_k), 0.0f));
  if (a.compensate) pool.run(a.kv_heads, [&](int64_t h, int) { means[size_t(h)] = mean_of_old_keys(a, int(h)); });
  const auto n_rows = int64_t(in.rows.size());
  std::vector<std::vector<float>> products(size_t(a.kv_heads * n_rows));
  pool.run(a.kv_heads * n_rows, [&](int64_t task, int) {
    const int64_t head = task / n_rows, t = in.rows[size_t(task % n_rows)];
    std::vector<float> z(size_t(side * dim), 0.0f), zt(z.size()), away(static_cast<size_t>(a.dim_v));
    for (int64_t g = 0; g < a.group; ++g) {
      const int64_t at = (t * a.kv_heads + head) * a.group + g;
      const float* q = a.q + at * a.dim_k;
      const float* wo_g = flipped.data() + (head * width + g * a.dim_v) * dim;
      std::vector<float> c = channel_outputs(a, int(head), in.mask + head * a.dim_k, means[size_t(head)], q, in.lse[at],
                                             in.out + at * a.dim_v);
      for (int64_t i = 0; i < a.dim_k; ++i) {
        for (int64_t j = 0; j < a.dim_v; ++j) c[size_t(i * a.dim_v + j)] *= a.scale * q[i];
      }
      gemm_add(a.dim_k, dim, a.dim_v, c.data(), a.dim_v, wo_g, dim, z.data(), dim);
      for (int64_t j = 0; j < a.dim_v; ++j) {
        away[size_t(j)] = in.out[at * a.dim_v + j] - in.teacher_out[at * a.dim_v + j];
      }
      gemm_add(1, dim, a.dim_v, away.data(), a.dim_v, wo_g, dim, z.data() + a.dim_k * dim, dim);
    }
    transpose(z.data(), side, dim, dim, zt.data(), side);
    products[size_t(task)].assign(size_t(side * side), 0.0f);
    gemm_add(side, side, dim, z.data(), dim, zt.data(), side, products[size_t(task)].data(), side);
  });
  std::fill_n(grams, a.kv_heads * side * side, 0.0);
  for (int64_t task = 0; task < a.kv_heads * n_rows; ++task) {
    double* to = grams + task / n_rows * side * side;
    for (int64_t i = 0; i < side * side; ++i) to[i] += products[size_t(task)][size_t(i)];
  }
}

}  // namespace longkv
