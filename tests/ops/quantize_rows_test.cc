#include "ops/quantize_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/cpu.h"

namespace longkv {
namespace {

std::vector<float> random_rows(int64_t n, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  std::vector<float> x(static_cast<size_t>(n));
  for (auto& v : x) v = normal(rng);
  return x;
}

class QuantizeRows : public ::testing::Test {
 protected:
  void TearDown() override { ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok()); }
};

TEST_F(QuantizeRows, ErrorIsAtMostHalfAStepAndSumsAreExact) {
  ThreadPool pool(3);
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (const auto& [tokens, cols] :
         {std::pair<int64_t, int64_t>{1, 32}, {1, 576}, {3, 1536}, {40, 576}, {2, 20000}}) {
      const int64_t stride = cols + 7;
      const auto x = random_rows(tokens * stride, uint32_t(cols));
      QuantizedRows rows;
      rows.assign(x.data(), tokens, cols, stride, pool);
      ASSERT_EQ(rows.tokens, tokens);
      ASSERT_EQ(rows.cols, cols);
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t g = 0; g < cols / 32; ++g) {
          const float* group = x.data() + t * stride + 32 * g;
          const int8_t* q = rows.q.data() + t * cols + 32 * g;
          const float scale = rows.scale[size_t(t * (cols / 32) + g)];
          double amax = 0;
          int largest = 0, sums[2] = {0, 0};
          for (int i = 0; i < 32; ++i) {
            amax = std::max(amax, std::abs(double(group[i])));
            largest = std::max(largest, std::abs(int(q[i])));
            sums[i / 16] += q[i];
            // Half a step, plus the rounding of 127 / amax and of the product (one ulp each of at most 127 steps).
            EXPECT_LE(std::abs(double(group[i]) - double(scale) * q[i]), double(scale) * (0.5 + 3 * 127 * 0x1p-24));
          }
          EXPECT_FLOAT_EQ(scale, float(amax / 127));
          EXPECT_EQ(largest, 127);
          EXPECT_EQ(rows.sum16[size_t(t * (cols / 16) + 2 * g)], sums[0]);
          EXPECT_EQ(rows.sum16[size_t(t * (cols / 16) + 2 * g + 1)], sums[1]);
        }
      }
    }
  }
}

TEST_F(QuantizeRows, TiesGoToEven) {
  ThreadPool pool(1);
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    std::vector<float> x(32, 0.0f);
    x[0] = 127.0f;  // scale 1
    x[1] = 2.5f;
    x[2] = 3.5f;
    x[3] = -2.5f;
    x[4] = -127.0f;
    QuantizedRows rows;
    rows.assign(x.data(), 1, 32, 32, pool);
    EXPECT_EQ(rows.scale[0], 1.0f);
    EXPECT_EQ(rows.q[1], 2);
    EXPECT_EQ(rows.q[2], 4);
    EXPECT_EQ(rows.q[3], -2);
    EXPECT_EQ(rows.q[4], -127);
  }
}

TEST_F(QuantizeRows, EveryLevelAndThreadCountGivesTheSameBits) {
  const auto x = random_rows(40 * 1536, 7);
  ThreadPool one(1), four(4);
  ASSERT_TRUE(set_active_isa(IsaLevel::kBase).ok());
  QuantizedRows expected;
  expected.assign(x.data(), 40, 1536, 1536, one);
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    QuantizedRows rows;
    rows.assign(x.data(), 40, 1536, 1536, four);
    EXPECT_EQ(rows.q, expected.q) << isa_name(level);
    EXPECT_EQ(rows.sum16, expected.sum16) << isa_name(level);
    EXPECT_EQ(std::memcmp(rows.scale.data(), expected.scale.data(), rows.scale.size() * 4), 0) << isa_name(level);
  }
}

TEST_F(QuantizeRows, NotFiniteGroupsAreMarkedAndTinyOnesAreZero) {
  ThreadPool pool(1);
  const float inf = std::numeric_limits<float>::infinity();
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (int at : {0, 5, 16, 31}) {
      auto x = random_rows(6 * 32, 3);
      x[size_t(at)] = std::nanf("");
      x[size_t(32 + at)] = inf;
      x[size_t(64 + at)] = -inf;
      for (int i = 0; i < 32; ++i) x[size_t(96 + i)] = 0.0f;
      for (int i = 0; i < 32; ++i) x[size_t(128 + i)] = 1e-42f;
      for (int i = 0; i < 32; ++i) x[size_t(160 + i)] = i == at ? std::numeric_limits<float>::max() : 1.0f;
      QuantizedRows rows;
      rows.assign(x.data(), 1, 6 * 32, 6 * 32, pool);
      for (size_t g = 0; g < 5; ++g) {
        if (g < 3) {
          EXPECT_TRUE(std::isnan(rows.scale[g]));
        } else {
          EXPECT_EQ(rows.scale[g], 0.0f);
        }
        for (size_t i = 0; i < 32; ++i) EXPECT_EQ(rows.q[32 * g + i], 0);
        EXPECT_EQ(rows.sum16[2 * g], 0);
        EXPECT_EQ(rows.sum16[2 * g + 1], 0);
      }
      EXPECT_EQ(rows.q[size_t(160 + at)], 127);
      EXPECT_TRUE(std::isfinite(rows.scale[5]));
    }
  }
}

TEST_F(QuantizeRows, BuffersAreReusedForSmallerInputs) {
  ThreadPool pool(1);
  const auto x = random_rows(4 * 64, 11);
  QuantizedRows rows;
  rows.assign(x.data(), 4, 64, 64, pool);
  const int8_t* before = rows.q.data();
  rows.assign(x.data() + 64, 1, 32, 32, pool);
  EXPECT_EQ(rows.q.data(), before);
  QuantizedRows fresh;
  fresh.assign(x.data() + 64, 1, 32, 32, pool);
  EXPECT_EQ(std::memcmp(rows.q.data(), fresh.q.data(), 32), 0);
  EXPECT_EQ(rows.scale[0], fresh.scale[0]);
}

}  // namespace
}  // namespace longkv
