// A session that attends everything, against attention in double precision.
#include <gtest/gtest.h>

#include <atomic>

#include "kv_session/harness.h"

namespace longkv::test {
namespace {

// Outputs are convex combinations of unit normal values: errors are a few epsilon of fp32 times the score's size.
constexpr double kTolerance = 2e-5;

void expect_reference(const KvShape& s, const Tokens& t, int64_t token, const std::vector<RowRange>& ranges,
                      const float* out) {
  for (int j = 0; j < s.kv_heads * s.group_size; ++j) {
    const Partial p = reference_attend(s, t, token, j, ranges, 1.0 / std::sqrt(double(s.dim_k)));
    for (int c = 0; c < s.dim_v; ++c) {
      ASSERT_NEAR(out[int64_t(j) * s.dim_v + c], p.out[size_t(c)], kTolerance) << "token " << token << " head " << j;
    }
  }
}

TEST(DenseSession, PromptThenTokensThenPromptAgain) {
  ThreadPool pool(2);
  for (const int group : {1, 3, 4}) {
    KvShape s = make_shape(2, 2, group, 32, 24);
    const Tokens t(s, 90, 7 + uint64_t(group));
    auto session = make_session(s, full_f32(), 128, pool);
    const int64_t width = int64_t(s.kv_heads) * s.group_size * s.dim_v;
    const auto out = feed_prompt(*session, t, 0, 41, 17);
    for (const int64_t i : {0, 1, 16, 17, 40}) expect_reference(s, t, i, {{0, i + 1}}, out.data() + i * width);
    for (int64_t i = 41; i < 60; ++i) {
      for (const auto& o : decode_token(*session, t, i)) expect_reference(s, t, i, {{0, i + 1}}, o.data());
    }
    const auto more = feed_prompt(*session, t, 60, 80, 1);  // a chat turn, in chunks of one token
    for (const int64_t i : {60, 79}) expect_reference(s, t, i, {{0, i + 1}}, more.data() + (i - 60) * width);
    for (const auto& o : decode_token(*session, t, 80)) expect_reference(s, t, 80, {{0, 81}}, o.data());
    EXPECT_EQ(session->tokens().v, 81);
    EXPECT_EQ(session->last_ranges(1, 1), (std::vector<RowRange>{{0, 81}}));
  }
}

TEST(DenseSession, WindowLayersSeeTheirWindow) {
  ThreadPool pool(1);
  KvShape s = make_shape(2, 1, 2, 32);
  s.window = {16, 0};
  const Tokens t(s, 64, 3);
  auto session = make_session(s, full_f32(), 64, pool);
  const auto out = feed_prompt(*session, t, 0, 40, 13);
  const int64_t width = int64_t(s.group_size) * s.dim_v;
  for (const int64_t i : {15, 16, 39}) {
    expect_reference(s, t, i, {{std::max<int64_t>(0, i - 15), i + 1}}, out.data() + i * width);
  }
  const auto outs = decode_token(*session, t, 40);
  expect_reference(s, t, 40, {{25, 41}}, outs[0].data());
  expect_reference(s, t, 40, {{0, 41}}, outs[1].data());
}

TEST(DenseSession, TruncateThenContinueEqualsNeverHavingHadTheRows) {
  ThreadPool pool(1);
  const KvShape s = make_shape(2, 2, 2, 32);
  const Tokens t(s, 64, 5);
  auto a = make_session(s, full_f32(), 64, pool);
  auto b = make_session(s, full_f32(), 64, pool);
  feed_prompt(*a, t, 0, 50, 50);
  ASSERT_TRUE(a->truncate({33}).ok());
  EXPECT_EQ(a->tokens().v, 33);
  feed_prompt(*b, t, 0, 33, 50);
  EXPECT_EQ(decode_token(*a, t, 33), decode_token(*b, t, 33));
  EXPECT_FALSE(a->truncate({35}).ok());
  EXPECT_FALSE(a->truncate({-1}).ok());
}

TEST(DenseSession, CancelIsReportedAndTruncateRepairs) {
  ThreadPool pool(1);
  const KvShape s = make_shape(2, 1, 1, 32);
  const Tokens t(s, 32, 6);
  auto session = make_session(s, full_f32(), 32, pool);
  feed_prompt(*session, t, 0, 8, 8);
  std::atomic<bool> cancel{true};
  std::vector<float> out(size_t(8 * s.dim_v));
  const Status status = session->prefill(0, t.q_at(s, 8), t.k_at(s, 8), t.v_at(s, 8), 8, 16, out.data(), &cancel);
  EXPECT_EQ(status.code(), Code::kCancelled);
  EXPECT_EQ(session->tokens().v, 8);
  ASSERT_TRUE(session->truncate(session->tokens()).ok());
  EXPECT_EQ(session->cache().rows(0).v, 8);
}

TEST(DenseSession, CountsRowsAndBytes) {
  ThreadPool pool(1);
  const KvShape s = make_shape(3, 2, 2, 32);
  const Tokens t(s, 32, 8);
  auto session = make_session(s, full_f32(), 32, pool);
  session->set_check_every(2);
  feed_prompt(*session, t, 0, 10, 10);
  for (int64_t i = 10; i < 13; ++i) decode_token(*session, t, i);
  const KvStats& stats = session->stats();
  EXPECT_EQ(stats.steps, 3);
  EXPECT_EQ(stats.rows_attended, (11 + 12 + 13) * 3 * 2);
  EXPECT_EQ(stats.kv_bytes, stats.rows_attended * 2 * 32 * 4);
  EXPECT_EQ(stats.index_bytes, 0);
  EXPECT_EQ(stats.selections, 0);
  EXPECT_EQ(stats.checked_steps, 2);
  EXPECT_EQ(stats.captured_mass, std::vector<double>(3, 2.0));
  EXPECT_EQ(stats.output_error, std::vector<double>(3, 0.0));
}

TEST(DenseSession, RefusesMoreThanItsCapacity) {
  ThreadPool pool(1);
  const KvShape s = make_shape(1, 1, 1, 32);
  const Tokens t(s, 8, 9);
  auto session = make_session(s, full_f32(), 4, pool);
  std::vector<float> out(size_t(8 * s.dim_v));
  EXPECT_EQ(session->prefill(0, t.q.data(), t.k.data(), t.v.data(), 8, 8, out.data(), nullptr).code(),
            Code::kInvalidArgument);
}

}  // namespace
}  // namespace longkv::test
