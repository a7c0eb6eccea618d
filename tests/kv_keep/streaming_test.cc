#include <gtest/gtest.h>

#include "kv_keep/keep_harness.h"

namespace longkv::test {
namespace {

Recipe streaming(int64_t sink, int64_t window, bool cache_positions = false) {
  Recipe recipe = full_f32();
  recipe.keep = default_keep(KeepKind::kStreaming);
  recipe.keep.sink = sink;
  recipe.keep.window = window;
  recipe.keep.cache_positions = cache_positions;
  return recipe;
}

// Sinks and the newest rows of n tokens.
std::vector<int64_t> streamed(int64_t n, int64_t sink, int64_t window) {
  std::vector<int64_t> rows;
  for (int64_t p = 0; p < n; ++p) {
    if (p < sink || p >= n - window) rows.push_back(p);
  }
  return rows;
}

TEST(Streaming, RowsAreDroppedInPromptsAndWhileDecoding) {
  ThreadPool pool(2);
  const KvShape s = make_shape(2, 2, 3, 32);
  const Tokens t(s, 200, 10);
  for (const auto& [sink, window] : {std::pair<int64_t, int64_t>{3, 10}, {0, 7}, {4, 1}}) {
    auto session = make_session(s, streaming(sink, window), 256, pool);
    feed_prompt(*session, t, 0, 5, 5);
    int64_t n = 5;
    for (; n < 40; ++n) {
      const auto rows = streamed(n + 1, sink, window);
      for (const auto& out : decode_token(*session, t, n)) expect_attends(s, t, n, {rows, rows}, out.data());
      ASSERT_EQ(session->cache().rows(0).v, int64_t(rows.size())) << "a budget is exact after every token";
    }
    feed_prompt(*session, t, n, 100, 19);
    for (n = 100; n < 120; ++n) {
      const auto rows = streamed(n + 1, sink, window);
      for (const auto& out : decode_token(*session, t, n)) expect_attends(s, t, n, {rows, rows}, out.data());
      auto held = session->kept_positions(1, 1);
      std::sort(held.begin(), held.end());
      EXPECT_EQ(held, rows);
    }
  }
}

TEST(Streaming, WindowOverAllIsFull) {
  ThreadPool pool(1);
  const KvShape s = make_shape(2, 2, 2, 32);
  const Tokens t(s, 100, 11);
  for (const bool cache_positions : {false, true}) {
    auto full = make_session(s, full_f32(), 128, pool);
    auto kept = make_kept_session(s, streaming(4, 100, cache_positions), 128, pool, nullptr, test_rotate(s.dim_k));
    EXPECT_EQ(feed_prompt(*full, t, 0, 60, 17), feed_prompt(*kept, t, 0, 60, 17));
    for (int64_t i = 60; i < 99; ++i) EXPECT_EQ(decode_token(*full, t, i), decode_token(*kept, t, i));
  }
}

// As the paper defines it: the row of rank r has position r, the query follows the last row.
TEST(Streaming, CachePositionsEqualFullReindexing) {
  ThreadPool pool(1);
  const KvShape s = make_shape(2, 2, 2, 16);
  const Tokens raw(s, 160, 12);
  const Tokens t = with_rope(s, raw);
  const int64_t sink = 3, window = 20;
  auto session = make_kept_session(s, streaming(sink, window, true), 256, pool, nullptr, test_rotate(s.dim_k));
  const auto check = [&](int64_t n, const std::vector<int64_t>& rows, const float* out) {
    // Ranks become positions: build the tokens anew and rotate them.
    Tokens ranked(s, int64_t(rows.size()), 0);
    const int64_t q_width = s.kv_heads * s.group_size * s.dim_k, width = s.kv_heads * s.dim_k;
    for (size_t r = 0; r < rows.size(); ++r) {
      std::copy_n(raw.q_at(s, rows[r]), q_width, ranked.q.data() + int64_t(r) * q_width);
      std::copy_n(raw.k_at(s, rows[r]), width, ranked.k.data() + int64_t(r) * width);
      std::copy_n(raw.v_at(s, rows[r]), width, ranked.v.data() + int64_t(r) * width);
    }
    ranked = with_rope(s, ranked);
    std::vector<int64_t> all(rows.size());
    std::iota(all.begin(), all.end(), 0);
    ASSERT_EQ(rows.back(), n);
    expect_attends(s, ranked, int64_t(rows.size()) - 1, {all, all}, out);
  };
  feed_prompt(*session, t, 0, 50, 50);
  for (int64_t n = 50; n < 90; ++n) {
    for (const auto& out : decode_token(*session, t, n)) check(n, streamed(n + 1, sink, window), out.data());
  }
  // A second prompt reads the turned sinks, the window and itself.
  const auto more = feed_prompt(*session, t, 90, 110, 7);
  auto rows = streamed(90, sink, window);
  const int64_t width = int64_t(s.kv_heads) * s.group_size * s.dim_v;
  for (int64_t n = 90; n < 110; ++n) {
    rows.push_back(n);
    check(n, rows, more.data() + (n - 90) * width);
  }
  for (const auto& out : decode_token(*session, t, 110)) check(110, streamed(111, sink, window), out.data());
}

TEST(Streaming, CachePositionsNeedTheModelsRope) {
  ThreadPool pool(1);
  const KvShape s = make_shape(1, 1, 1, 32);
  EXPECT_EQ(KvSession::create(s, streaming(4, 8, true), {64}, plain_params(s), pool).status().code(),
            Code::kInvalidArgument);
}

}  // namespace
}  // namespace longkv::test
