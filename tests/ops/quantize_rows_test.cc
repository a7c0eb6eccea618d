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

// Rows whose groups differ much in size.
std::vector<float> uneven_rows(int64_t n, uint32_t seed) {
  std::vector<float> x = random_rows(n, seed);
  std::mt19937 rng(seed + 1);
  for (size_t g = 0; g < x.size() / 32; ++g) {
    const float size = std::ldexp(1.0f, int(rng() % 8));
    for (size_t i = 32 * g; i < 32 * (g + 1); ++i) x[i] *= size;
  }
  return x;
}

TEST_F(QuantizeRows, LargeGroupsGetASecondTerm) {
  ThreadPool pool(3);
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (const auto& [tokens, cols] : {std::pair<int64_t, int64_t>{1, 32}, {1, 576}, {40, 576}, {3, 9216}}) {
      const int64_t groups = cols / 32;
      const auto x = uneven_rows(tokens * cols, uint32_t(cols));
      QuantizedRows rows;
      rows.assign(x.data(), tokens, cols, cols, pool);
      int64_t terms = 0;
      for (int64_t t = 0; t < tokens; ++t) {
        double squares = 0;
        for (int64_t g = 0; g < groups; ++g) squares += std::pow(double(rows.scale[size_t(t * groups + g)]), 2);
        for (int64_t g = 0; g < groups; ++g) {
          const float scale = rows.scale[size_t(t * groups + g)];
          const int64_t term = rows.fine_term[size_t(t * groups + g)];
          EXPECT_EQ(term >= 0, double(scale) * scale > kFineFrom * squares / double(groups));
          if (term < 0) continue;
          ++terms;
          EXPECT_EQ(rows.fine_token[size_t(term)], t);
          EXPECT_LE(rows.fine_first[size_t(g)], term);
          EXPECT_LT(term, rows.fine_first[size_t(g + 1)]);
          EXPECT_FLOAT_EQ(rows.fine_scale[size_t(term)], scale / 254);
          int sums[2] = {0, 0};
          for (int64_t i = 0; i < 32; ++i) {
            const int64_t at = t * cols + 32 * g + i;
            const int8_t fine = rows.fine_q[size_t(32 * term + i)];
            sums[i / 16] += fine;
            const double value =
                double(scale) * rows.q[size_t(at)] + double(rows.fine_scale[size_t(term)]) * double(fine);
            // Half a fine step, and three roundings of values of up to 127 steps of 254 fine ones.
            EXPECT_LE(std::abs(double(x[size_t(at)]) - value),
                      double(rows.fine_scale[size_t(term)]) * (0.5 + 3 * 127 * 254 * 0x1p-24));
          }
          EXPECT_EQ(rows.fine_sum16[size_t(2 * term)], sums[0]);
          EXPECT_EQ(rows.fine_sum16[size_t(2 * term + 1)], sums[1]);
        }
      }
      EXPECT_EQ(rows.fine_first[size_t(groups)], terms);
      for (int64_t g = 0; g < groups; ++g) {
        for (int32_t i = rows.fine_first[size_t(g)] + 1; i < rows.fine_first[size_t(g + 1)]; ++i) {
          EXPECT_LT(rows.fine_token[size_t(i - 1)], rows.fine_token[size_t(i)]);
        }
      }
    }
  }
}

TEST_F(QuantizeRows, EveryGroupCanHaveASecondTerm) {
  ThreadPool pool(2);
  constexpr int64_t kTokens = 5, kCols = 576, kGroups = kCols / 32;
  const auto x = uneven_rows(kTokens * kCols, 9);
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    QuantizedRows rows;
    rows.assign(x.data(), kTokens, kCols, kCols, pool, kFineEverywhere);
    ASSERT_EQ(rows.fine_first[kGroups], kTokens * kGroups);
    for (int64_t i = 0; i < kTokens * kCols; ++i) {
      const int64_t term = rows.fine_term[size_t(i / 32)];
      ASSERT_GE(term, 0);
      const double fine = rows.fine_scale[size_t(term)];
      const double value =
          double(rows.scale[size_t(i / 32)]) * rows.q[size_t(i)] + fine * rows.fine_q[size_t(32 * term + i % 32)];
      EXPECT_LE(std::abs(double(x[size_t(i)]) - value), fine * (0.5 + 3 * 127 * 254 * 0x1p-24));
    }
    rows.assign(x.data(), kTokens, kCols, kCols, pool);
    EXPECT_LT(rows.fine_first[kGroups], kTokens * kGroups / 2);
  }
}

TEST_F(QuantizeRows, WideRowsKeepHalfAFineStep) {
  ThreadPool pool(1);
  const int64_t cols = 576;
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    auto x = uneven_rows(2 * cols, 5);
    for (int i = 0; i < 32; ++i) x[size_t(i)] = 1e-36f;  // too small for the division by its step
    QuantizedRows rows;
    rows.assign(x.data(), 2, cols, cols, pool);
    for (int64_t t = 0; t < 2; ++t) {
      std::vector<int16_t> wide(cols);
      std::vector<float> scale(cols / 32);
      rows.widen(t, wide.data(), scale.data());
      for (int64_t c = 0; c < cols; ++c) {
        const double step = scale[size_t(c / 32)], value = x[size_t(t * cols + c)];
        EXPECT_LE(std::abs(int(wide[size_t(c)])), 127 * 254 + 127);
        const bool tiny = t == 0 && c < 32;
        EXPECT_LE(std::abs(value - step * wide[size_t(c)]), tiny ? 1.1e-36 : step * (0.5 + 3 * 127 * 254 * 0x1p-24));
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
  const auto x = uneven_rows(40 * 1536, 7);
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
    EXPECT_EQ(rows.fine_first, expected.fine_first) << isa_name(level);
    EXPECT_EQ(rows.fine_token, expected.fine_token) << isa_name(level);
    EXPECT_EQ(rows.fine_term, expected.fine_term) << isa_name(level);
    EXPECT_EQ(rows.fine_q, expected.fine_q) << isa_name(level);
    EXPECT_EQ(rows.fine_scale, expected.fine_scale) << isa_name(level);
    EXPECT_EQ(rows.fine_sum16, expected.fine_sum16) << isa_name(level);
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
