// Norm and pointwise operators against double precision, on every instruction-set level.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "base/cpu.h"
#include "ops/elementwise.h"
#include "ops/norm.h"

namespace longkv {
namespace {

class Operators : public ::testing::TestWithParam<IsaLevel> {
 protected:
  void SetUp() override { ASSERT_TRUE(set_active_isa(GetParam()).ok()); }
  void TearDown() override { ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok()); }

  std::vector<float> random(size_t n, float scale = 3.0f) {
    std::normal_distribution<float> d(0.0f, scale);
    std::vector<float> v(n);
    for (float& x : v) x = d(rng_);
    return v;
  }
  std::mt19937 rng_{1};
  ThreadPool pool_{3};
};

TEST_P(Operators, RmsNorm) {
  for (int64_t dim : {1, 7, 8, 9, 31, 64, 576, 20000}) {
    const int64_t rows = 5;
    const auto x = random(size_t(rows * dim)), w = random(size_t(dim));
    std::vector<float> y(x.size());
    rms_norm(x.data(), dim, w.data(), 1e-5f, rows, dim, y.data(), dim, pool_);
    for (int64_t r = 0; r < rows; ++r) {
      double sum = 0;
      for (int64_t i = 0; i < dim; ++i) sum += double(x[size_t(r * dim + i)]) * x[size_t(r * dim + i)];
      const double inv = 1.0 / std::sqrt(sum / double(dim) + 1e-5);
      for (int64_t i = 0; i < dim; ++i) {
        const double want = x[size_t(r * dim + i)] * inv * w[size_t(i)];
        // A sum of positive squares loses at most dim roundings, halved by the square root.
        ASSERT_NEAR(y[size_t(r * dim + i)], want, std::fabs(want) * (4 + std::sqrt(double(dim))) * 0x1p-24) << dim;
      }
    }
  }
}

TEST_P(Operators, GatesAgainstDouble) {
  for (int64_t n : {1, 7, 8, 9, 100, 16384, 40001}) {
    for (Activation a : {Activation::kSilu, Activation::kGeluTanh}) {
      auto gate = random(size_t(n)), up = random(size_t(n));
      gate[0] = a == Activation::kSilu ? -200.0f : 50.0f;  // far outside the range of exp
      const auto before = gate;
      gate_mul(a, gate.data(), up.data(), n, pool_);
      for (size_t i = 0; i < size_t(n); ++i) {
        const double g = before[i];
        const double act = a == Activation::kSilu
                               ? g / (1 + std::exp(-g))
                               : 0.5 * g * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
        // 1 + tanh cancels for negative arguments: the error is relative to |g|, not to the result.
        ASSERT_NEAR(gate[i], act * up[i], (std::fabs(g * up[i]) + 1e-30) * 2e-6) << g;
      }
    }
  }
}

TEST_P(Operators, NaNStaysNaN) {
  std::vector<float> gate = {NAN, 1.0f}, up = {1.0f, 1.0f};
  gate_mul(Activation::kGeluTanh, gate.data(), up.data(), 2, pool_);
  EXPECT_TRUE(std::isnan(gate[0]));
  gate = {NAN, 1.0f};
  gate_mul(Activation::kSilu, gate.data(), up.data(), 2, pool_);
  EXPECT_TRUE(std::isnan(gate[0]));
}

TEST_P(Operators, SoftcapAddBiasScale) {
  for (int64_t n : {1, 9, 33, 17000}) {
    auto y = random(size_t(n), 40.0f);
    const auto before = y;
    softcap_in_place(y.data(), 30.0f, n, pool_);
    for (size_t i = 0; i < size_t(n); ++i) ASSERT_NEAR(y[i], 30 * std::tanh(before[i] / 30.0), 30 * 1e-6);
  }
  std::vector<float> y = {1, 2, 3, 4, 5, 6}, x = {10, 20, 30};
  add_bias(y.data(), x.data(), 2, 3, pool_);
  EXPECT_EQ(y, (std::vector<float>{11, 22, 33, 14, 25, 36}));
  add_in_place(y.data(), x.data(), 3, pool_);
  EXPECT_EQ(y[2], 63);
  scale_in_place(y.data(), 0.5f, 6, pool_);
  EXPECT_EQ(y[2], 31.5f);
}

INSTANTIATE_TEST_SUITE_P(Isa, Operators, ::testing::ValuesIn(available_isa_levels()),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

}  // namespace
}  // namespace longkv
