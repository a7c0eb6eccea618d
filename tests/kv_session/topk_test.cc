// The k best scores against a stable sort: every length around vectors and groups, ties, infinities and NaN.
#include "kv/select/topk.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "base/cpu.h"

namespace longkv {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Larger first, NaN as -inf, equal ones by index.
std::vector<int64_t> reference(const std::vector<float>& s, int64_t k) {
  std::vector<int64_t> order(s.size());
  std::iota(order.begin(), order.end(), 0);
  const auto value = [&](int64_t i) { return std::isnan(s[size_t(i)]) ? -kInf : s[size_t(i)]; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return value(a) > value(b); });
  order.resize(size_t(std::min<int64_t>(k, int64_t(s.size()))));
  std::sort(order.begin(), order.end());
  return order;
}

class TopK : public ::testing::TestWithParam<IsaLevel> {
 protected:
  void SetUp() override { ASSERT_TRUE(set_active_isa(GetParam()).ok()); }
  void TearDown() override { ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok()); }

  void expect_best(const std::vector<float>& s, int64_t k, const std::string& what) {
    top_k(s.data(), int64_t(s.size()), k, scratch_, picked_);
    ASSERT_EQ(picked_, reference(s, k)) << what << " n " << s.size() << " k " << k;
  }

  std::vector<uint64_t> scratch_;
  std::vector<int64_t> picked_;
};
INSTANTIATE_TEST_SUITE_P(Isa, TopK, ::testing::ValuesIn(available_isa_levels()),
                         [](const auto& info) { return isa_name(info.param); });

enum class Kind { kNormal, kShifted, kNegative, kFewValues, kRising, kFalling, kEqual, kBadLater, kMostlyBad, kZeros };

std::vector<float> made(Kind kind, int64_t n, std::mt19937& engine) {
  std::normal_distribution<float> normal;
  std::vector<float> s(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    float& x = s[size_t(i)];
    x = normal(engine);
    switch (kind) {
      case Kind::kNormal: break;
      case Kind::kShifted: x = 1000.0f + 1e-3f * x; break;  // all in one bin of leading bits
      case Kind::kNegative: x = -std::exp(3.0f * x); break;
      case Kind::kFewValues: x = std::floor(x); break;
      case Kind::kRising: x = float(i) - 77.0f; break;
      case Kind::kFalling: x = 77.0f - float(i); break;
      case Kind::kEqual: x = -2.5f; break;
      case Kind::kBadLater: x = i % 7 == 3 ? NAN : i % 11 == 5 ? kInf : i % 5 == 0 ? -kInf : x; break;
      case Kind::kMostlyBad: x = i % 97 == 3 ? x : i % 2 == 0 ? NAN : -kInf; break;
      case Kind::kZeros: x = i % 3 == 0 ? -0.0f : i % 50 == 1 ? 1.0f : 0.0f; break;
    }
  }
  return s;
}

TEST_P(TopK, PicksWhatAStableSortPicks) {
  std::mt19937 engine(1);
  for (int kind = 0; kind <= int(Kind::kZeros); ++kind) {
    for (int64_t n : {1, 2, 5, 15, 16, 17, 31, 33, 768, 1023, 1024, 1025, 4095, 4096, 4097, 20000}) {
      const auto s = made(Kind(kind), n, engine);
      for (int64_t k : {int64_t(0), int64_t(1), int64_t(7), n / 100, n / 20, n / 9, n / 2, n - 1, n, n + 3}) {
        expect_best(s, k, "kind " + std::to_string(kind));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(TopK, EveryLengthAroundGroups) {
  std::mt19937 engine(2);
  const auto s = made(Kind::kFewValues, 3000, engine);
  for (int64_t n = 1000; n <= 3000; n += 13) {
    for (int64_t k : {int64_t(1), int64_t(16), int64_t(60)}) {
      expect_best({s.begin(), s.begin() + n}, k, "length");
      if (HasFatalFailure()) return;
    }
  }
}

// The best ones side by side, where groups hold many of them, and at the end, where scores belong to no group.
TEST_P(TopK, BestOnesTogether) {
  std::mt19937 engine(3);
  for (int64_t at : {0, 4000, 39900}) {
    auto s = made(Kind::kNormal, 40001, engine);
    for (int64_t i = 0; i < 101; ++i) s[size_t(at + i)] = 50.0f + float(i % 9);
    for (int64_t k : {1, 50, 100, 101, 102, 700, 2500, 6500, 7000}) {
      expect_best(s, k, "at " + std::to_string(at));
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace longkv
