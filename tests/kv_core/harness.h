// Attention over a view at one level after the other, beside the slow reference.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "base/threads.h"
#include "kv/attend.h"
#include "support/attention_ref.h"

namespace longkv::test {

struct Attended {
  std::vector<float> out, lse;
  bool operator==(const Attended&) const = default;
};

inline Attended run_attend(const KvHeadView& kv, const float* q, int n_q, std::span<const RowRange> ranges,
                           const AttendParams& params, ThreadPool& pool) {
  Attended a;
  a.out.assign(size_t(n_q) * size_t(kv.dim_v), NAN);
  a.lse.assign(size_t(n_q), NAN);
  AttendUnit unit{q, n_q, kv, ranges, a.out.data(), a.lse.data()};
  AttendScratch scratch;
  attend({&unit, 1}, params, scratch, pool);
  return a;
}

inline void expect_near_ref(const Attended& a, const float* q, int n_q, const KvHeadView& kv,
                            std::span<const RowRange> ranges, const AttendParams& params, const std::string& what) {
  for (int h = 0; h < n_q; ++h) {
    const AttentionRef ref = attention_ref(q + int64_t(h) * kv.dim_k, kv, ranges, params);
    if (ref.scores.empty()) {
      EXPECT_EQ(a.lse[size_t(h)], -std::numeric_limits<float>::infinity()) << what;
    } else {
      EXPECT_NEAR(a.lse[size_t(h)], ref.lse, ref.score_tolerance) << what << " head " << h;
    }
    for (int c = 0; c < kv.dim_v; ++c) {
      ASSERT_NEAR(a.out[size_t(h * kv.dim_v + c)], ref.out[size_t(c)], ref.out_tolerance)
          << what << " head " << h << " channel " << c;
    }
  }
}

// Runs at the level that is its parameter.
class LevelTest : public ::testing::TestWithParam<IsaLevel> {
 protected:
  void SetUp() override { ASSERT_TRUE(set_active_isa(GetParam()).ok()); }
  void TearDown() override { ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok()); }
};

}  // namespace longkv::test
