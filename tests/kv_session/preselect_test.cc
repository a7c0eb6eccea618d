// Preselection narrows what decoding may choose; it never loses a row.
#include <gtest/gtest.h>

#include "kv/layout.h"
#include "kv/select/vote.h"
#include "kv_session/simulator.h"

namespace longkv::test {
namespace {

constexpr int64_t kBlock = 4, kQueries = 12, kCount = 3, kKernel = 3;

Recipe preselecting(SelectHeads heads) {
  Recipe r = full_f32();
  r.index = {.kind = IndexKind::kMinMax, .block = kBlock, .coarse = 1};
  r.select.all = false;
  r.select.budget = 40;
  r.select.sink = 4;
  r.select.local = 6;
  r.select.heads = heads;
  r.select.preselect = kCount;
  r.select.preselect_queries = kQueries;
  r.select.preselect_kernel = kKernel;
  return r;
}

// Attention mass of the last queries of the prompt [begin, end), causal, per query head; in double.
std::vector<float> reference_mass(const KvShape& s, const Tokens& t, int64_t begin, int64_t end) {
  const int heads = s.kv_heads * s.group_size;
  std::vector<float> mass(size_t(heads * end), 0.0f);
  for (int j = 0; j < heads; ++j) {
    for (int64_t i = std::max(begin, end - kQueries); i < end; ++i) {
      std::vector<double> w(static_cast<size_t>(i + 1));
      double sum = 0;
      for (int64_t r = 0; r <= i; ++r) {
        double dot = 0;
        for (int c = 0; c < s.dim_k; ++c) {
          dot += double(t.q_at(s, i)[j * s.dim_k + c]) * t.k_at(s, r)[j / s.group_size * s.dim_k + c];
        }
        sum += w[size_t(r)] = std::exp(dot / std::sqrt(double(s.dim_k)));
      }
      for (int64_t r = 0; r <= i; ++r) mass[size_t(j * end + r)] += float(w[size_t(r)] / sum);
    }
  }
  return mass;
}

// Blocks that a step may read under a vote: forced rows, voted blocks and everything since.
void expect_inside(const std::vector<RowRange>& ranges, const VoteMask& vote, int64_t n) {
  const auto rows = rows_of(ranges);
  for (int64_t r = 0; r < 4; ++r) EXPECT_TRUE(rows.contains(r)) << "sink row " << r;
  for (int64_t r = n - 6; r < n; ++r) EXPECT_TRUE(rows.contains(r)) << "local row " << r;
  for (const int64_t r : rows) {
    bool allowed = r < 4 || r / kBlock >= vote.voted_end;
    for (const RowRange& b : vote.blocks) allowed |= r / kBlock >= b.begin && r / kBlock < b.end;
    EXPECT_TRUE(allowed) << "row " << r;
  }
}

TEST(Preselect, VotesOverChunkBordersAndVotesAnewNextTurn) {
  const KvShape s = make_shape(2, 2, 2, 16);
  const Tokens t(s, 200, 81);
  for (const SelectHeads heads : {SelectHeads::kPerKvHead, SelectHeads::kShared, SelectHeads::kPerQueryHead}) {
    for (const int64_t chunk : {1, 5, 64}) {
      ThreadPool pool(1);
      auto session = make_session(s, preselecting(heads), 200, pool);
      const int voters = heads == SelectHeads::kShared ? 4 : 2;
      int64_t n = 0;
      for (const auto& [prompt, decoded] : {std::pair<int64_t, int64_t>{83, 30}, {41, 10}}) {
        const int64_t end = n + prompt;
        feed_prompt(*session, t, n, end, chunk);
        const auto mass = reference_mass(s, t, n, end);
        std::vector<VoteMask> votes;
        for (int h = 0; h < s.kv_heads; ++h) {
          const float* own = heads == SelectHeads::kShared ? mass.data() : mass.data() + h * 2 * end;
          votes.push_back(vote_blocks(own, end, voters, end, kBlock, kCount, kQueries, kKernel));
          ASSERT_TRUE(votes.back().active());
        }
        for (n = end; n < end + decoded;) {
          decode_token(*session, t, n++);
          for (int l = 0; l < s.layers; ++l) {
            for (int h = 0; h < s.kv_heads; ++h) expect_inside(session->last_ranges(l, h), votes[size_t(h)], n);
          }
        }
      }
    }
  }
}

TEST(Preselect, PromptLengthsAroundTheBlockBorder) {
  const KvShape s = make_shape(1, 1, 2, 16);
  const Tokens t(s, 100, 82);
  ThreadPool pool(1);
  for (int64_t prompt = 1; prompt <= 60; ++prompt) {  // none, one and several blocks before the observation window
    Recipe r = preselecting(SelectHeads::kPerKvHead);
    r.select.budget = 24;
    auto session = make_session(s, r, 100, pool);
    feed_prompt(*session, t, 0, prompt, 7);
    for (int64_t i = prompt; i < prompt + 20; ++i) decode_token(*session, t, i);
    const auto rows = rows_of(session->last_ranges(0, 0));
    EXPECT_TRUE(rows.contains(0) && rows.contains(prompt + 19));
  }
}

TEST(Preselect, LongAnswersReachTheirOwnBlocksAndTheCacheStaysWhole) {
  const KvShape s = make_shape(1, 1, 1, 16);
  Tokens t(s, 400, 83);
  ThreadPool pool(1);
  auto session = make_session(s, preselecting(SelectHeads::kPerKvHead), 400, pool);
  feed_prompt(*session, t, 0, 60, 60);
  std::vector<uint8_t> before(session->cache().view(0, 0).k, session->cache().view(0, 0).k + 60 * 64);
  // The key of token 150, written by decoding long after the prompt, is what token 399 looks for.
  for (int c = 0; c < 16; ++c) t.k[size_t(150 * 16 + c)] = 3.0f * t.q[size_t(399 * 16 + c)];
  for (int64_t i = 60; i < 400; ++i) decode_token(*session, t, i);
  EXPECT_TRUE(rows_of(session->last_ranges(0, 0)).contains(150));
  const KvHeadView view = session->cache().view(0, 0);
  EXPECT_EQ(std::vector<uint8_t>(view.k, view.k + 60 * 64), before);
  EXPECT_EQ(view.rows, 400);
}

TEST(Preselect, LaterTurnReachesABlockThatTheFirstVoteLeftOut) {
  const KvShape s = make_shape(1, 1, 1, 16);
  Tokens t(s, 160, 84);
  // Queries of the first prompt's end look at row 20, those of the second at row 50.
  for (int64_t i = 88; i < 100; ++i) {
    for (int c = 0; c < 16; ++c) t.q[size_t(i * 16 + c)] = 4.0f * t.k[size_t(20 * 16 + c)];
  }
  for (int64_t i = 108; i < 121; ++i) {
    for (int c = 0; c < 16; ++c) t.q[size_t(i * 16 + c)] = 4.0f * t.k[size_t(50 * 16 + c)];
  }
  for (int64_t i = 100; i < 102; ++i) {
    for (int c = 0; c < 16; ++c) t.q[size_t(i * 16 + c)] = 4.0f * t.k[size_t(50 * 16 + c)];
  }
  ThreadPool pool(1);
  Recipe r = preselecting(SelectHeads::kPerKvHead);
  r.select.preselect = 1;
  auto session = make_session(s, r, 160, pool);
  feed_prompt(*session, t, 0, 100, 30);
  decode_token(*session, t, 100);
  EXPECT_TRUE(rows_of(session->last_ranges(0, 0)).contains(20));
  EXPECT_FALSE(rows_of(session->last_ranges(0, 0)).contains(50));
  feed_prompt(*session, t, 101, 120, 30);
  decode_token(*session, t, 120);
  EXPECT_TRUE(rows_of(session->last_ranges(0, 0)).contains(50));
}

TEST(FillRandom, SeededUnitScaleAndIndexed) {
  const KvShape s = make_shape(2, 2, 2, 32);
  Recipe r = full_f32();
  r.index = {.kind = IndexKind::kMinMax, .block = 16, .coarse = 1};
  r.select.all = false;
  r.select.budget = 256;
  const Tokens t(s, 4, 85);
  std::vector<std::vector<float>> first;
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    auto session = make_session(s, r, 3000, pool);
    ASSERT_TRUE(session->fill_random(2500, 7).ok());
    EXPECT_EQ(session->tokens().v, 2500);
    EXPECT_FALSE(session->fill_random(10, 7).ok());
    const KvHeadView view = session->cache().view(1, 1);
    double sum = 0, squares = 0;
    const float* k = reinterpret_cast<const float*>(view.k);
    for (int64_t i = 0; i < 2500 * 32; ++i) {
      sum += k[i];
      squares += double(k[i]) * k[i];
    }
    EXPECT_NEAR(sum / (2500 * 32), 0.0, 0.02);
    EXPECT_NEAR(squares / (2500 * 32), 1.0, 0.02);
    EXPECT_NE(k[0], reinterpret_cast<const float*>(view.v)[0]);
    EXPECT_NE(k[0], reinterpret_cast<const float*>(session->cache().view(0, 1).k)[0]);
    const auto outs = decode_token(*session, t, 0);
    if (first.empty()) first = outs;
    EXPECT_EQ(outs, first);
    EXPECT_LE(count_rows(session->last_ranges(0, 0)), 256);
    EXPECT_GT(session->stats().index_bytes, 0);
  }
  ThreadPool pool(1);
  auto session = make_session(s, r, 100, pool);
  EXPECT_EQ(session->fill_random(101, 1).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace longkv::test
