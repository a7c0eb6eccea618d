#include "train/directions.h"

#include <algorithm>
#include <cmath>

#include "base/gemm.h"
#include "kv/layout.h"
#include "train/eigen.h"

namespace longkv {

namespace {

constexpr int64_t kTile = 256;
constexpr int64_t kRowsAtOnce = 256;  // of a product

// sum += x^T x for x [n][dim].
void add_squares(const float* x, int64_t n, int64_t dim, std::vector<double>& sum) {
  std::vector<float> flipped(size_t(n * dim)), product(size_t(dim * dim), 0.0f);
  transpose(x, n, dim, dim, flipped.data(), n);
  gemm_add(dim, dim, n, flipped.data(), n, x, dim, product.data(), dim);
  sum.resize(product.size());
  for (size_t i = 0; i < product.size(); ++i) sum[i] += product[i];
}

std::vector<double> product(const std::vector<double>& a, const std::vector<double>& b, int64_t n) {
  std::vector<double> out(size_t(n * n), 0.0);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t l = 0; l < n; ++l) {
      const double x = a[size_t(i * n + l)];
      for (int64_t j = 0; j < n; ++j) out[size_t(i * n + j)] += x * b[size_t(l * n + j)];
    }
  }
  return out;
}

// V^T diag(f(values)) V.
template <class Fn>
std::vector<double> function_of(const Eigen& e, int64_t n, const Fn& f) {
  std::vector<double> scaled = e.vectors, flipped(scaled.size());
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      flipped[size_t(j * n + i)] = e.vectors[size_t(i * n + j)];
      scaled[size_t(i * n + j)] *= f(e.values[size_t(i)]);
    }
  }
  return product(flipped, scaled, n);
}

}  // namespace

void add_moments(const ChunkAttention& a, const std::vector<int64_t>& rows, bool with_keys, HeadMoments* moments,
                 ThreadPool& pool) {
  pool.run(a.kv_heads, [&](int64_t head, int) {
    HeadMoments& to = moments[head];
    const int64_t dim = a.dim_k;
    std::vector<float> q(rows.size() * size_t(a.group * dim));
    for (size_t i = 0; i < rows.size(); ++i) {
      std::copy_n(a.q + (rows[i] * a.kv_heads + head) * a.group * dim, a.group * dim,
                  q.data() + int64_t(i) * a.group * dim);
    }
    add_squares(q.data(), int64_t(rows.size()) * a.group, dim, to.queries);
    to.query_rows += double(rows.size()) * a.group;
    if (!with_keys) return;
    const KvHeadView& view = a.prompt[size_t(head)];
    const auto row = [&](int64_t r) { return reinterpret_cast<const float*>(view.k + r * view.k_stride); };
    std::vector<double> mean(size_t(dim), 0.0);
    for (int64_t r = a.middle.begin; r < a.middle.end; ++r) {
      for (int64_t c = 0; c < dim; ++c) mean[size_t(c)] += row(r)[c] / double(count_of(a.middle));
    }
    std::vector<float> tile(size_t(kTile * dim));
    for (int64_t begin = a.middle.begin; begin < a.middle.end; begin += kTile) {
      const int64_t n = std::min(kTile, a.middle.end - begin);
      for (int64_t r = 0; r < n; ++r) {
        for (int64_t c = 0; c < dim; ++c) tile[size_t(r * dim + c)] = float(row(begin + r)[c] - mean[size_t(c)]);
      }
      add_squares(tile.data(), n, dim, to.keys);
    }
    to.key_rows += double(count_of(a.middle));
  });
}

Directions best_directions(const HeadMoments& moments, int64_t dim, double ridge) {
  std::vector<double> queries = moments.queries, keys = moments.keys;
  for (double& x : queries) x /= moments.query_rows;
  for (double& x : keys) x /= moments.key_rows;
  const Eigen q = eigen_symmetric(std::move(queries), dim);
  double mean = 0;
  for (double x : q.values) mean += std::max(x, 0.0) / double(dim);
  const double more = ridge * mean + 1e-8 * std::max(q.values[0], 1e-30);
  const auto moment = [&](double x) { return std::max(x, 0.0) + more; };
  const std::vector<double> root = function_of(q, dim, [&](double x) { return std::sqrt(moment(x)); });
  const std::vector<double> inverse = function_of(q, dim, [&](double x) { return 1 / std::sqrt(moment(x)); });
  const Eigen u = eigen_symmetric(product(product(root, keys, dim), root, dim), dim);
  const std::vector<double> to_keys = product(u.vectors, root, dim), to_queries = product(u.vectors, inverse, dim);
  Directions out;
  for (int64_t i = 0; i < dim; ++i) {
    const double balance = std::pow(std::max(u.values[size_t(i)], 1e-12 * std::max(u.values[0], 1e-30)), 0.25);
    for (int64_t c = 0; c < dim; ++c) {
      out.keys.push_back(float(to_keys[size_t(i * dim + c)] / balance));
      out.queries.push_back(float(to_queries[size_t(i * dim + c)] * balance));
    }
  }
  return out;
}

void mix_of_directions(const float* queries, const float* keys, int64_t n, int64_t dim, float* mix) {
  std::fill_n(mix, dim * dim, 0.0f);
  std::vector<float> flipped(size_t(n * dim));
  transpose(queries, n, dim, dim, flipped.data(), n);
  gemm_add(dim, dim, n, flipped.data(), n, keys, dim, mix, dim);
}

void directions_backward(const float* queries, const float* keys, int64_t n, int64_t dim, const float* dmix,
                         float* dqueries, float* dkeys) {
  gemm_add(n, dim, dim, queries, dim, dmix, dim, dkeys, dim);
  std::vector<float> flipped(size_t(dim * dim));
  transpose(dmix, dim, dim, dim, flipped.data(), dim);
  gemm_add(n, dim, dim, keys, dim, flipped.data(), dim, dqueries, dim);
}

Status add_output_losses(const ChunkAttention& a, const float* out, const float* teacher_out, const Weight& wo,
                         const std::vector<int64_t>& rows, double weight, double* losses, ChunkOps& ops) {
  // A row of the product for each row and head, with that head's part alone.
  const int64_t width = int64_t(a.group) * a.dim_v, heads = a.kv_heads,
                most = std::max<int64_t>(1, kRowsAtOnce / heads);
  for (size_t begin = 0; begin < rows.size(); begin += size_t(most)) {
    const int64_t n = std::min(most, int64_t(rows.size() - begin));
    std::vector<float> away(size_t(n * heads * wo.cols), 0.0f), moved(size_t(n * heads * wo.rows));
    for (int64_t i = 0; i < n * heads; ++i) {
      const int64_t first = rows[begin + size_t(i / heads)] * wo.cols + i % heads * width;
      float* to = away.data() + i * wo.cols + i % heads * width;
      for (int64_t c = 0; c < width; ++c) to[c] = out[first + c] - teacher_out[first + c];
    }
    const ChunkOps::Product one[] = {{&wo, moved.data()}};
    LONGKV_TRY(ops.multiply(one, away.data(), n * heads));
    for (int64_t i = 0; i < n * heads; ++i) {
      double sum = 0;
      for (int64_t r = 0; r < wo.rows; ++r)
        sum += double(moved[size_t(i * wo.rows + r)]) * moved[size_t(i * wo.rows + r)];
      losses[i % heads] += weight * sum;
    }
  }
  return {};
}

}  // namespace longkv
