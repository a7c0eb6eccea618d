#include "train/channel_quadratic.h"

#include <algorithm>
#include <cmath>

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

void add_channel_quadratic(const ChunkAttention& a, const float* mask, const float* out, const float* lse,
                           const float* teacher_out, const Weight& wo, const std::vector<int64_t>& rows, double weight,
                           ChannelQuadratic* quadratics, ThreadPool& pool) {
  // Wo of a KV head's query heads, transposed: [group * dim_v][dim].
  const int64_t dim = wo.rows, width = int64_t(a.group) * a.dim_v;
  std::vector<float> weights(size_t(wo.rows * wo.cols));
  for (int64_t r = 0; r < dim; ++r) dequantize(wo.type, wo.row(r), weights.data() + r * wo.cols, wo.cols);
  std::vector<float> flipped(weights.size());
  transpose(weights.data(), dim, wo.cols, wo.cols, flipped.data(), dim);
  pool.run(a.kv_heads, [&](int64_t head, int) {
    ChannelQuadratic& to = quadratics[head];
    std::vector<float> z(size_t(a.dim_k) * size_t(dim)), zt(z.size()), product(size_t(a.dim_k) * size_t(a.dim_k));
    const std::vector<float> mean_k =
        a.compensate ? mean_of_old_keys(a, int(head)) : std::vector<float>(size_t(a.dim_k), 0.0f);
    std::vector<float> away(static_cast<size_t>(a.dim_v)), e(static_cast<size_t>(dim));
    for (int64_t t : rows) {
      std::fill(z.begin(), z.end(), 0.0f);
      std::fill(e.begin(), e.end(), 0.0f);
      for (int64_t g = 0; g < a.group; ++g) {
        const int64_t at = (t * a.kv_heads + head) * a.group + g;
        const float* q = a.q + at * a.dim_k;
        const float* wo_g = flipped.data() + (head * width + g * a.dim_v) * dim;
        std::vector<float> c =
            channel_outputs(a, int(head), mask + head * a.dim_k, mean_k, q, lse[at], out + at * a.dim_v);
        for (int64_t i = 0; i < a.dim_k; ++i) {
          for (int64_t j = 0; j < a.dim_v; ++j) c[size_t(i * a.dim_v + j)] *= a.scale * q[i];
        }
        gemm_add(a.dim_k, dim, a.dim_v, c.data(), a.dim_v, wo_g, dim, z.data(), dim);
        for (int64_t j = 0; j < a.dim_v; ++j) away[size_t(j)] = out[at * a.dim_v + j] - teacher_out[at * a.dim_v + j];
        gemm_add(1, dim, a.dim_v, away.data(), a.dim_v, wo_g, dim, e.data(), dim);
      }
      transpose(z.data(), a.dim_k, dim, dim, zt.data(), a.dim_k);
      std::fill(product.begin(), product.end(), 0.0f);
      gemm_add(a.dim_k, a.dim_k, dim, z.data(), dim, zt.data(), a.dim_k, product.data(), a.dim_k);
      for (size_t i = 0; i < product.size(); ++i) to.h[i] += weight * product[i];
      for (int64_t i = 0; i < a.dim_k; ++i) {
        double inner = 0;
        for (int64_t d = 0; d < dim; ++d) inner += double(z[size_t(i * dim + d)]) * e[size_t(d)];
        to.linear[size_t(i)] += weight * inner;
      }
      for (float x : e) to.base += weight * double(x) * x;
    }
  });
}

double eliminate_channels(const ChannelQuadratic& q, int64_t n, std::vector<bool>& kept, std::vector<int>& order) {
  const auto dim_k = int64_t(kept.size());
  std::vector<double> rise(kept.size());  // of dropping a channel next
  for (int64_t c = 0; c < dim_k; ++c) rise[size_t(c)] = q.h[size_t(c * dim_k + c)] - 2 * q.linear[size_t(c)];
  double sum = q.base;
  for (; n > 0; --n) {
    int64_t best = -1;
    for (int64_t c = 0; c < dim_k; ++c) {
      if (kept[size_t(c)] && (best < 0 || rise[size_t(c)] < rise[size_t(best)])) best = c;
    }
    kept[size_t(best)] = false;
    order.push_back(int(best));
    sum += rise[size_t(best)];
    for (int64_t c = 0; c < dim_k; ++c)
      rise[size_t(c)] += q.h[size_t(c * dim_k + best)] + q.h[size_t(best * dim_k + c)];
  }
  return sum;
}

}  // namespace longkv
