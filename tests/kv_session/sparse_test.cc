// Block-sparse decoding against the slow simulator and double-precision attention over the rows it names.
#include <gtest/gtest.h>

#include "kv/layout.h"
#include "kv_session/simulator.h"

namespace longkv::test {
namespace {

Recipe quest(int64_t block, int64_t budget, int64_t sink, int64_t local) {
  Recipe r = full_f32();
  r.name = "custom";
  r.index = {.kind = IndexKind::kMinMax, .block = block, .coarse = 1};
  r.select.all = false;
  r.select.budget = budget;
  r.select.sink = sink;
  r.select.local = local;
  return r;
}

struct Feed {
  explicit Feed(const KvShape& s, int64_t n, uint64_t seed) {
    for (int l = 0; l < s.layers; ++l) layers.push_back(whole_number_tokens(s, n, seed + uint64_t(l)));
  }
  std::vector<Tokens> layers;
};

void feed_prompt(KvSession& session, const Feed& feed, int64_t begin, int64_t end, int64_t chunk) {
  const KvShape& s = session.cache().shape();
  std::vector<float> out(size_t((end - begin) * s.kv_heads * s.group_size * s.dim_v));
  for (int l = 0; l < s.layers; ++l) {
    const Tokens& t = feed.layers[size_t(l)];
    for (int64_t i = begin; i < end; i += chunk) {
      const int64_t n = std::min(chunk, end - i);
      ASSERT_TRUE(session.prefill(l, t.q_at(s, i), t.k_at(s, i), t.v_at(s, i), n, end, out.data(), nullptr).ok());
    }
    ASSERT_TRUE(session.finish_prefill(l).ok());
  }
}

// Decodes tokens [begin, end) and compares the rows of every layer and the outputs of some steps with the simulator.
void decode_and_compare(KvSession& session, Simulator& sim, const Feed& feed, int64_t begin, int64_t end) {
  const KvShape& s = session.cache().shape();
  const Recipe& r = session.recipe();
  const bool per_query = r.select.heads == SelectHeads::kPerQueryHead;
  std::vector<float> out(size_t(s.kv_heads * s.group_size * s.dim_v));
  for (int64_t i = begin; i < end; ++i) {
    sim.next_step();
    for (int l = 0; l < s.layers; ++l) {
      const Tokens& t = feed.layers[size_t(l)];
      ASSERT_TRUE(session.decode(l, t.q_at(s, i), t.k_at(s, i), t.v_at(s, i), out.data()).ok());
      const auto want = sim.attend(l, t, i + 1);
      for (int h = 0; h < s.kv_heads; ++h) {
        std::set<int64_t> rows;
        if (per_query) {
          for (int j = 0; j < s.group_size; ++j) {
            rows.insert(want[size_t(h * s.group_size + j)].begin(), want[size_t(h * s.group_size + j)].end());
          }
        } else {
          rows = want[want.size() == 1 ? 0 : size_t(h)];
        }
        ASSERT_EQ(rows_of(session.last_ranges(l, h)), rows) << "token " << i << " layer " << l << " head " << h;
        ASSERT_TRUE(rows.contains(i));
      }
      if (i % 7 != 0) continue;
      for (int j = 0; j < s.kv_heads * s.group_size; ++j) {
        const auto& set = want[per_query ? size_t(j) : want.size() == 1 ? 0 : size_t(j / s.group_size)];
        std::vector<RowRange> ranges;
        for (const int64_t row : set) ranges.push_back({row, row + 1});
        const Partial p = reference_attend(s, t, i, j, ranges, 1.0 / std::sqrt(double(s.dim_k)));
        for (int c = 0; c < s.dim_v; ++c) ASSERT_NEAR(out[size_t(j * s.dim_v + c)], p.out[size_t(c)], 2e-4);
      }
    }
  }
  EXPECT_EQ(session.stats().selections, sim.selections);
}

// A prompt, a long answer over many blocks, a second turn, a cut and an answer again.
void run_history(const KvShape& s, const Recipe& recipe) {
  ThreadPool pool(1);
  const Feed feed(s, 260, 17);
  auto session = make_session(s, recipe, 260, pool);
  Simulator sim(s, recipe);
  feed_prompt(*session, feed, 0, 61, 19);
  sim.restart();
  decode_and_compare(*session, sim, feed, 61, 190);
  feed_prompt(*session, feed, 190, 207, 16);  // its last chunk is one token
  sim.restart();
  decode_and_compare(*session, sim, feed, 207, 230);
  ASSERT_TRUE(session->truncate({201}).ok());
  sim.restart();
  decode_and_compare(*session, sim, feed, 201, 240);
}

TEST(Sparse, HistoriesOfTokenAndLayerSteps) {
  struct Case {
    int layers, dense, layer_step, token_step;
    int64_t block;
  };
  for (const Case& c : {Case{2, 0, 1, 1, 4}, Case{5, 1, 2, 1, 8}, Case{7, 2, 3, 4, 4}, Case{4, 1, 1, 20, 8},
                        Case{3, 0, 3, 5, 1}, Case{5, 2, 4, 7, 16}}) {
    SCOPED_TRACE(c.layers * 1000 + c.token_step);
    Recipe r = quest(c.block, 64, 5, 9);
    r.select.dense_layers = c.dense;
    r.select.layer_step = c.layer_step;
    r.select.token_step = c.token_step;
    run_history(make_shape(c.layers, 2, 2, 16, 8), r);
  }
}

TEST(Sparse, WithoutLocalWindowATokenStillSeesItself) {
  for (const int64_t block : {4, 16}) {
    Recipe r = quest(block, 48, 0, 0);
    run_history(make_shape(1, 1, 2, 16, 8), r);
    r.select.token_step = 3;
    run_history(make_shape(1, 1, 2, 16, 8), r);
  }
}

TEST(Sparse, HeadModesAndGroups) {
  for (const SelectHeads heads : {SelectHeads::kPerKvHead, SelectHeads::kShared, SelectHeads::kPerQueryHead}) {
    for (const int group : {1, 3, 4, 7, 8}) {
      for (const Aggregate aggregate : {Aggregate::kSum, Aggregate::kMax}) {
        if (group > 4 && aggregate == Aggregate::kMax) continue;  // sum covers the sizes
        Recipe r = quest(8, 56, 8, 8);
        r.select.heads = heads;
        r.select.aggregate = aggregate;
        r.select.token_step = 3;
        run_history(make_shape(1, 2, group, 16, 8), r);
      }
    }
  }
}

TEST(Sparse, BudgetSweepNeverExceedsTheBudget) {
  const KvShape s = make_shape(1, 1, 2, 16, 8);
  for (int64_t budget = 24; budget <= 130; budget += 15) {
    for (const int64_t block : {1, 7, 16}) {
      Recipe r = quest(block, budget, 3, 5);
      const bool fits = 3 + 5 + 2 * block - 1 <= budget;
      ThreadPool pool(1);
      EXPECT_EQ(KvSession::create(s, r, {150}, plain_params(s), pool).ok(), fits);
      if (!fits) continue;
      run_history(s, r);
      const Feed feed(s, 150, 3);
      auto session = make_session(s, r, 150, pool);
      feed_prompt(*session, feed, 0, 80, 80);
      std::vector<float> out(size_t(s.group_size * s.dim_v));
      for (int64_t i = 80; i < 150; ++i) {
        const Tokens& t = feed.layers[0];
        ASSERT_TRUE(session->decode(0, t.q_at(s, i), t.k_at(s, i), t.v_at(s, i), out.data()).ok());
        const int64_t rows = count_rows(session->last_ranges(0, 0));
        EXPECT_LE(rows, budget);
        if (i + 1 > budget) {
          EXPECT_GT(rows, budget - 3 * block - 3);
        }
      }
    }
  }
}

TEST(Sparse, TwoLevelsRefineTheBestCoarseBlocks) {
  const KvShape s = make_shape(1, 2, 2, 16, 16);
  for (const SelectHeads heads : {SelectHeads::kPerKvHead, SelectHeads::kShared, SelectHeads::kPerQueryHead}) {
    Recipe r = quest(2, 16, 2, 2);
    r.select.heads = heads;
    r.index.coarse = 4;
    // Attending 16 rows reads 2048 bytes, a box 64: from 33 candidate blocks on coarse blocks are scored first. Of 61
    // tokens and more the refined share is 4 x 5 or 6 blocks, or what is left of the 2048 bytes if that is more.
    ThreadPool pool(1);
    const Feed feed(s, 128, 23);
    auto session = make_session(s, r, 128, pool);
    Simulator sim(s, r);
    feed_prompt(*session, feed, 0, 100, 100);
    for (int64_t i = 100; i < 128; ++i) {
      const int64_t n = i + 1, tail = std::min(n - 2, n / 2 * 2);
      const int64_t k = (16 - 2 - (n - tail)) / 2;
      const int64_t first = 1, end = (tail + 1) / 2;
      const int64_t n_coarse = (end + 3) / 4 - first / 4;
      sim.coarse_keep = (std::max(4 * k, (2048 - n_coarse * 64) / 64) + 3) / 4;
      ASSERT_LT(sim.coarse_keep, n_coarse);
      decode_and_compare(*session, sim, feed, i, i + 1);
    }
    const int64_t scored = session->stats().index_bytes / 28;
    EXPECT_LT(scored, 2 * 50 * 64 * (heads == SelectHeads::kPerQueryHead ? 2 : 1));
  }
}

TEST(Sparse, BudgetThatHoldsEverythingGivesTheBitsOfFullAttention) {
  const KvShape s = make_shape(2, 2, 3, 32);
  const Tokens t(s, 120, 31);
  ThreadPool pool(2);
  for (const KvType type : {KvType::kF32, KvType::kF16, KvType::kQ8_0}) {
    Recipe full = full_f32(), sparse = quest(16, 120, 4, 8);
    full.store = sparse.store = {type, type};
    auto a = make_session(s, full, 120, pool), b = make_session(s, sparse, 120, pool);
    EXPECT_EQ(feed_prompt(*a, t, 0, 90, 33), feed_prompt(*b, t, 0, 90, 33));
    for (int64_t i = 90; i < 120; ++i) ASSERT_EQ(decode_token(*a, t, i), decode_token(*b, t, i));
    EXPECT_EQ(b->stats().selections, 0);
  }
}

TEST(Sparse, SameBitsForEveryThreadCount) {
  const KvShape s = make_shape(2, 3, 4, 64);
  const int64_t n = 4200;
  const Tokens t(s, n + 8, 41);
  for (const IndexKind kind : {IndexKind::kMean, IndexKind::kMinMax, IndexKind::kBits, IndexKind::kDynamic}) {
    Recipe r = quest(kind == IndexKind::kBits ? 1 : 4, 256, 4, 16);
    r.index.kind = kind;
    r.index.coarse = kind == IndexKind::kMinMax ? 16 : 1;
    r.select.aggregate = Aggregate::kSoftmaxSum;
    r.store = {KvType::kF16, KvType::kF16};
    std::vector<std::vector<std::vector<float>>> first;
    for (const int threads : {1, 2, 5}) {
      ThreadPool pool(threads);
      auto session = make_session(s, r, n + 8, pool);
      ASSERT_TRUE(session->fill_random(n, 99).ok());
      std::vector<std::vector<std::vector<float>>> outs;
      for (int64_t i = 0; i < 8; ++i) outs.push_back(decode_token(*session, t, i));
      if (first.empty()) first = outs;
      ASSERT_EQ(outs, first) << "threads " << threads << " kind " << int(kind);
    }
  }
}

TEST(Sparse, CapturedMassAndOutputErrorAreExact) {
  const KvShape s = make_shape(2, 2, 2, 32);
  const Tokens t(s, 100, 51);
  ThreadPool pool(2);
  Recipe r = quest(4, 32, 2, 4);
  r.select.dense_layers = 1;
  auto session = make_session(s, r, 100, pool);
  session->set_check_every(3);
  feed_prompt(*session, t, 0, 80, 80);
  double mass = 0, error = 0;
  for (int64_t i = 80; i < 90; ++i) {
    const auto outs = decode_token(*session, t, i);
    if ((i - 80) % 3 != 0) continue;
    double difference = 0, norm = 0;
    for (int j = 0; j < 4; ++j) {
      const double scale = 1.0 / std::sqrt(32.0);
      const Partial all = reference_attend(s, t, i, j, {{0, i + 1}}, scale);
      const Partial some = reference_attend(s, t, i, j, session->last_ranges(1, j / 2), scale);
      mass += std::exp(some.lse - all.lse) / 4;
      for (int c = 0; c < 32; ++c) {
        difference += std::pow(some.out[size_t(c)] - all.out[size_t(c)], 2);
        norm += std::pow(all.out[size_t(c)], 2);
      }
    }
    error += std::sqrt(difference / norm);
  }
  EXPECT_EQ(session->stats().checked_steps, 4);
  EXPECT_EQ(session->stats().captured_mass[0], 4.0);
  EXPECT_NEAR(session->stats().captured_mass[1], mass, 1e-4);
  EXPECT_NEAR(session->stats().output_error[1], error, 1e-4);
  EXPECT_LT(mass, 3.9);
}

TEST(Sparse, NanKeysDoNotBreakTheOrderOfTheOthers) {
  const KvShape s = make_shape(1, 1, 2, 16);
  Feed feed(s, 90, 61);
  Tokens& t = feed.layers[0];
  for (int c = 0; c < 16; ++c) t.k[size_t(41 * 16 + c)] = NAN;                                 // in block 10
  for (int c = 0; c < 16; ++c) t.k[size_t(22 * 16 + c)] = 1000.0f * t.q[size_t(85 * 32 + c)];  // block 5 must win
  for (const IndexKind kind : {IndexKind::kMean, IndexKind::kFixed, IndexKind::kBits}) {
    Recipe r = quest(4, 24, 2, 4);
    r.index.kind = kind;
    r.index.reps = kind == IndexKind::kFixed ? 4 : 1;
    ThreadPool pool(1);
    auto session = make_session(s, r, 90, pool);
    feed_prompt(*session, feed, 0, 85, 85);
    std::vector<float> out(32);
    ASSERT_TRUE(session->decode(0, t.q_at(s, 85), t.k_at(s, 85), t.v_at(s, 85), out.data()).ok());
    const auto rows = rows_of(session->last_ranges(0, 0));
    EXPECT_FALSE(rows.contains(41)) << int(kind);
    EXPECT_TRUE(rows.contains(22)) << int(kind);
  }
}

TEST(Sparse, WindowLayersChooseInsideTheirWindow) {
  KvShape s = make_shape(2, 1, 1, 16);
  s.window = {40, 100};
  const Tokens t = whole_number_tokens(s, 200, 71);
  ThreadPool pool(1);
  auto session = make_session(s, quest(4, 48, 4, 8), 200, pool);
  feed_prompt(*session, t, 0, 150, 64);
  for (int64_t i = 150; i < 170; ++i) {
    decode_token(*session, t, i);
    EXPECT_EQ(session->last_ranges(0, 0), (std::vector<RowRange>{{i - 39, i + 1}}));
    const auto& ranges = session->last_ranges(1, 0);
    EXPECT_GE(ranges.front().begin, i - 99);
    EXPECT_EQ(ranges.back().end, i + 1);
    EXPECT_LE(count_rows(ranges), 48);
    EXPECT_GT(count_rows(ranges), 36);
  }
}

}  // namespace
}  // namespace longkv::test
