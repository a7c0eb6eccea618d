// Intervals and tests against published values and against sums by hand.
#include "eval/statistics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace longkv {
namespace {

TEST(Statistics, StudentQuantilesAreThoseOfTables) {
  EXPECT_NEAR(student_t(1), 12.706, 0.001);
  EXPECT_NEAR(student_t(2), 4.303, 0.001);
  EXPECT_NEAR(student_t(5), 2.571, 0.001);
  EXPECT_NEAR(student_t(10), 2.228, 0.001);
  EXPECT_NEAR(student_t(30), 2.042, 0.001);
  EXPECT_NEAR(student_t(120), 1.980, 0.001);
  EXPECT_NEAR(student_t(5000), 1.960, 0.001);
}

TEST(Statistics, SignTestSumsBinomialTails) {
  EXPECT_DOUBLE_EQ(sign_test(0, 0), 1);
  EXPECT_NEAR(sign_test(0, 5), 2.0 / 32, 1e-12);
  EXPECT_NEAR(sign_test(5, 5), 2.0 / 32, 1e-12);
  EXPECT_NEAR(sign_test(1, 8), 2 * 9.0 / 256, 1e-12);
  EXPECT_NEAR(sign_test(5, 10), 1, 1e-12);
  // 2 * sum_{i<=2} C(20, i) / 2^20
  EXPECT_NEAR(sign_test(18, 20), 2 * (1 + 20 + 190) / 1048576.0, 1e-12);
}

TEST(Statistics, WilsonForZerosAndOnes) {
  const std::vector<double> half = {0, 1, 0, 1, 0, 1, 0, 1, 0, 1};
  const Interval i = mean_interval(half);
  EXPECT_DOUBLE_EQ(i.mean, 0.5);
  EXPECT_NEAR(i.low, 0.2366, 0.0005);  // Wilson (1927) for 5 of 10
  EXPECT_NEAR(i.high, 0.7634, 0.0005);
  const Interval all = mean_interval(std::vector<double>(10, 1.0));
  EXPECT_NEAR(all.low, 0.7225, 0.0005);
  EXPECT_DOUBLE_EQ(all.high, 1);
  EXPECT_EQ(mean_interval({}).n, 0);
}

TEST(Statistics, StudentForOtherScores) {
  const std::vector<double> x = {0.2, 0.4, 0.9};
  const Interval i = mean_interval(x, false);
  const double deviation = std::sqrt((0.09 + 0.01 + 0.16) / 2);
  EXPECT_NEAR(i.mean, 0.5, 1e-12);
  EXPECT_NEAR(i.high - i.mean, 4.3027 * deviation / std::sqrt(3.0), 1e-3);
  EXPECT_EQ(mean_interval(x).high, 1);
}

TEST(Statistics, PairsCountWhatOnlyOneGotRight) {
  const std::vector<double> sparse = {1, 0, 0, 0, 1, 1, 0, 1}, full = {1, 1, 1, 1, 0, 1, 0, 1};
  const Paired p = paired_difference(sparse, full);
  EXPECT_EQ(p.better, 1);
  EXPECT_EQ(p.worse, 3);
  EXPECT_NEAR(p.difference, -0.25, 1e-12);
  EXPECT_NEAR(p.p, 2 * 5.0 / 16, 1e-12);
  EXPECT_LT(p.low, -0.25);
  EXPECT_GT(p.high, -0.25);
  const Paired same = paired_difference(full, full);
  EXPECT_EQ(same.difference, 0);
  EXPECT_EQ(same.p, 1);
}

}  // namespace
}  // namespace longkv
