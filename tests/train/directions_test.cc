// Directions from moments, and eigenvectors.
#include "train/directions.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "train/eigen.h"

namespace longkv {
namespace {

std::vector<double> random_square(int64_t n, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<double> draw;
  std::vector<double> x(size_t(n * n));
  for (double& v : x) v = draw(rng);
  return x;
}

// x x^T, of which few directions are large.
std::vector<double> random_moment(int64_t n, uint32_t seed) {
  const std::vector<double> x = random_square(n, seed);
  std::vector<double> out(size_t(n * n), 0.0);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t l = 0; l < n; ++l) {
        out[size_t(i * n + j)] += x[size_t(i * n + l)] * x[size_t(j * n + l)] * std::exp(-0.3 * double(l));
      }
    }
  }
  return out;
}

TEST(Eigen, VectorsAndValuesGiveTheMatrixBack) {
  for (int64_t n : {1, 2, 7, 64}) {
    const std::vector<double> matrix = random_moment(n, uint32_t(n));
    const Eigen e = eigen_symmetric(matrix, n);
    double norm = 0;
    for (double x : matrix) norm += x * x;
    for (int64_t i = 0; i < n; ++i) {
      if (i > 0) {
        EXPECT_GE(e.values[size_t(i - 1)], e.values[size_t(i)]);
      }
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0, inner = 0;
        for (int64_t l = 0; l < n; ++l) {
          sum += e.values[size_t(l)] * e.vectors[size_t(l * n + i)] * e.vectors[size_t(l * n + j)];
          inner += e.vectors[size_t(i * n + l)] * e.vectors[size_t(j * n + l)];
        }
        EXPECT_NEAR(sum, matrix[size_t(i * n + j)], 1e-10 * std::sqrt(norm));
        EXPECT_NEAR(inner, i == j ? 1.0 : 0.0, 1e-10);
      }
    }
  }
}

// E (q^T (1 - mix) k)^2 for moments of q and k.
double lost(const std::vector<double>& qq, const std::vector<double>& kk, const std::vector<float>& mix, int64_t n) {
  const auto rest = [&](int64_t i, int64_t j) { return (i == j ? 1.0 : 0.0) - double(mix[size_t(i * n + j)]); };
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double inner = 0;  // (rest kk rest^T)[i][j]
      for (int64_t a = 0; a < n; ++a) {
        double row = 0;
        for (int64_t b = 0; b < n; ++b) row += kk[size_t(a * n + b)] * rest(j, b);
        inner += rest(i, a) * row;
      }
      sum += qq[size_t(i * n + j)] * inner;
    }
  }
  return sum;
}

TEST(Directions, LoseLeastOfTheScores) {
  constexpr int64_t kDim = 16, kKept = 5;
  HeadMoments moments{random_moment(kDim, 1), random_moment(kDim, 2), 1, 1};
  const Directions d = best_directions(moments, kDim, 0.0);
  std::vector<float> mix(size_t(kDim * kDim));
  mix_of_directions(d.queries.data(), d.keys.data(), kDim, kDim, mix.data());
  for (int64_t i = 0; i < kDim * kDim; ++i) EXPECT_NEAR(mix[size_t(i)], i / kDim == i % kDim ? 1.0 : 0.0, 1e-3);
  mix_of_directions(d.queries.data(), d.keys.data(), kKept, kDim, mix.data());
  const double best = lost(moments.queries, moments.keys, mix, kDim);
  // What is lost is the sum of the eigenvalues left out, and no other pairs lose less.
  std::mt19937 rng(4);
  std::normal_distribution<float> draw;
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<float> queries(d.queries.begin(), d.queries.begin() + kKept * kDim), keys = d.keys;
    const float step = trial < 25 ? 0.01f : 0.3f;
    for (float& x : queries) x += step * draw(rng);
    for (float& x : keys) x += step * draw(rng);
    mix_of_directions(queries.data(), keys.data(), kKept, kDim, mix.data());
    EXPECT_GT(lost(moments.queries, moments.keys, mix, kDim), best);
  }
  // Fewer channels, even the best ones of these moments, lose more.
  for (int64_t first = 0; first + kKept <= kDim; ++first) {
    std::fill(mix.begin(), mix.end(), 0.0f);
    for (int64_t c = first; c < first + kKept; ++c) mix[size_t(c * kDim + c)] = 1.0f;
    EXPECT_GT(lost(moments.queries, moments.keys, mix, kDim), best);
  }
}

TEST(Directions, GradientEqualsDifferences) {
  constexpr int64_t kDim = 8, kKept = 3;
  std::mt19937 rng(6);
  std::normal_distribution<float> draw;
  std::vector<float> values(2 * kKept * kDim), weights(kDim * kDim), mix(kDim * kDim);
  for (float& x : values) x = draw(rng);
  for (float& x : weights) x = draw(rng);
  std::vector<float> gradient(values.size(), 0.0f);
  directions_backward(values.data(), values.data() + kKept * kDim, kKept, kDim, weights.data(), gradient.data(),
                      gradient.data() + kKept * kDim);
  for (size_t i = 0; i < values.size(); ++i) {
    double sides[2];
    for (int side = 0; side < 2; ++side) {
      std::vector<float> moved = values;
      moved[i] += side == 0 ? 0.5f : -0.5f;  // the product is linear in each value
      mix_of_directions(moved.data(), moved.data() + kKept * kDim, kKept, kDim, mix.data());
      sides[side] = 0;
      for (size_t j = 0; j < mix.size(); ++j) sides[side] += double(weights[j]) * mix[j];
    }
    EXPECT_NEAR(sides[0] - sides[1], gradient[i], 1e-4);
  }
}

}  // namespace
}  // namespace longkv
