#include "model/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

namespace longkv {
namespace {

// Angles recomputed from the published formulas in double, at positions near and far.
constexpr int64_t kPositions[] = {0, 1, 1023, 1024, 4096, 32768, 131071, 1048575};

void expect_angles(const RopeTable& table, int dim, const std::vector<double>& inv_freq, double magnitude) {
  std::vector<float> cos(size_t(dim) / 2), sin(size_t(dim) / 2);
  for (int64_t p : kPositions) {
    table.angles(p, cos.data(), sin.data());
    for (int i = 0; i < dim / 2; ++i) {
      // Frequencies are held in fp32 (as the reference implementations do): half an ulp of the frequency times the
      // position is the angle's error; the rest is fp32 rounding of the result.
      const double f = double(float(inv_freq[size_t(i)]));
      const double tolerance = 1e-6 + double(p) * inv_freq[size_t(i)] * 1.2e-7;
      EXPECT_NEAR(cos[size_t(i)], magnitude * std::cos(double(p) * f), tolerance) << "position " << p << " pair " << i;
      EXPECT_NEAR(sin[size_t(i)], magnitude * std::sin(double(p) * f), tolerance) << "position " << p << " pair " << i;
    }
  }
}

std::vector<double> plain(int dim, double base) {
  std::vector<double> f;
  for (int i = 0; i < dim / 2; ++i) f.push_back(std::pow(base, -2.0 * i / dim));
  return f;
}

TEST(Rope, PlainLinearAndNtk) {
  RopeConfig c;
  c.dim = 64;
  c.base = 2e6;
  expect_angles(RopeTable(c, 1 << 20), 64, plain(64, 2e6), 1.0);
  c.scaling = RopeScaling::kLinear;
  c.factor = 8;
  auto f = plain(64, 2e6);
  for (double& v : f) v /= 8;
  expect_angles(RopeTable(c, 1 << 20), 64, f, 1.0);
  c.scaling = RopeScaling::kNtk;
  expect_angles(RopeTable(c, 1 << 20), 64, plain(64, 2e6 * std::pow(8.0, 64.0 / 62.0)), 1.0);
}

TEST(Rope, DivisorsOfLlama3) {
  RopeConfig c;
  c.dim = 8;
  c.freq_divisors = {1, 2, 4, 8};
  auto f = plain(8, 10000);
  for (int i = 0; i < 4; ++i) f[size_t(i)] /= double(1 << i);
  expect_angles(RopeTable(c, 1 << 20), 8, f, 1.0);
}

TEST(Rope, YarnRampAndMagnitude) {
  RopeConfig c;
  c.dim = 128;
  c.base = 10000;
  c.scaling = RopeScaling::kYarn;
  c.factor = 16;
  c.original_context = 4096;
  // arXiv 2309.00071: with 32 and 1 rotations over 4096 tokens the ramp runs from pair 20 to pair 46.
  auto correction = [&](double rot) {
    return 128 * std::log(4096 / (rot * 2 * std::numbers::pi)) / (2 * std::log(10000.0));
  };
  const double low = std::floor(correction(32)), high = std::ceil(correction(1));
  EXPECT_EQ(low, 20);
  EXPECT_EQ(high, 46);
  auto f = plain(128, 10000);
  for (int i = 0; i < 64; ++i) {
    const double ramp = std::min(1.0, std::max(0.0, (i - low) / (high - low)));
    f[size_t(i)] = f[size_t(i)] * (1 - ramp) + f[size_t(i)] / 16 * ramp;
  }
  expect_angles(RopeTable(c, 1 << 20), 128, f, 0.1 * std::log(16.0) + 1);
}

TEST(Rope, RotatesPairsAndLeavesTheRest) {
  ThreadPool pool(2);
  for (RopePairs pairs : {RopePairs::kAdjacent, RopePairs::kHalves}) {
    RopeConfig c;
    c.pairs = pairs;
    c.dim = 4;
    const RopeTable table(c, 4096);
    std::vector<float> x = {1, 2, 3, 4, 5, 6};  // head of six channels, four of them rotated
    const std::vector<float> before = x;
    apply_rope(table, x.data(), 1, 1, 6, 100, pool);
    float cos[2], sin[2];
    table.angles(100, cos, sin);
    for (int i = 0; i < 2; ++i) {
      const int a = pairs == RopePairs::kAdjacent ? 2 * i : i;
      const int b = pairs == RopePairs::kAdjacent ? 2 * i + 1 : i + 2;
      EXPECT_FLOAT_EQ(x[size_t(a)], before[size_t(a)] * cos[i] - before[size_t(b)] * sin[i]);
      EXPECT_FLOAT_EQ(x[size_t(b)], before[size_t(a)] * sin[i] + before[size_t(b)] * cos[i]);
    }
    EXPECT_EQ(x[4], 5);
    EXPECT_EQ(x[5], 6);
  }
}

}  // namespace
}  // namespace longkv
