#include "train/eigen.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace longkv {

Eigen eigen_symmetric(std::vector<double> a, int64_t n) {
  constexpr int kSweeps = 30;  // it converges quadratically: ten are rarely needed
  std::vector<double> v(size_t(n * n), 0.0);
  for (int64_t i = 0; i < n; ++i) {
    v[size_t(i * n + i)] = 1.0;
    for (int64_t j = 0; j < i; ++j) a[size_t(i * n + j)] = a[size_t(j * n + i)];
  }
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    double off = 0, all = 0;
    for (int64_t i = 0; i < n * n; ++i) {
      all += a[size_t(i)] * a[size_t(i)];
      if (i / n != i % n) off += a[size_t(i)] * a[size_t(i)];
    }
    if (off <= 1e-24 * all) break;
    for (int64_t p = 0; p < n; ++p) {
      for (int64_t q = p + 1; q < n; ++q) {
        const double apq = a[size_t(p * n + q)];
        if (apq == 0.0) continue;
        const double theta = (a[size_t(q * n + q)] - a[size_t(p * n + p)]) / (2 * apq);
        const double t = (theta >= 0 ? 1.0 : -1.0) / (std::abs(theta) + std::sqrt(theta * theta + 1));
        const double c = 1 / std::sqrt(t * t + 1), s = t * c;
        double *row_p = a.data() + p * n, *row_q = a.data() + q * n;
        for (int64_t i = 0; i < n; ++i) {
          const double x = row_p[i], y = row_q[i];
          row_p[i] = c * x - s * y;
          row_q[i] = s * x + c * y;
        }
        for (int64_t i = 0; i < n; ++i) {
          double *x = a.data() + i * n + p, *y = a.data() + i * n + q;
          const double old = *x;
          *x = c * old - s * *y;
          *y = s * old + c * *y;
        }
        row_p = v.data() + p * n, row_q = v.data() + q * n;
        for (int64_t i = 0; i < n; ++i) {
          const double x = row_p[i], y = row_q[i];
          row_p[i] = c * x - s * y;
          row_q[i] = s * x + c * y;
        }
      }
    }
  }
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  const auto value = [&](int64_t i) { return a[size_t(i * n + i)]; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) { return value(x) > value(y); });
  Eigen out;
  for (int64_t i : order) {
    out.values.push_back(value(i));
    out.vectors.insert(out.vectors.end(), v.begin() + i * n, v.begin() + (i + 1) * n);
  }
  return out;
}

}  // namespace longkv
