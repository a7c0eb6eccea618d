// Every method that chooses, as a whole session: threads, histories, full budgets, and what each promises.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/float16.h"
#include "kv/layout.h"
#include "kv_session/simulator.h"

namespace longkv::test {
namespace {

Recipe recipe_of(const std::string& text) {
  const auto recipe = parse_recipe(text);
  EXPECT_TRUE(recipe.ok()) << recipe.status().message();
  return recipe.ok() ? recipe.value() : Recipe{};
}

// The presets with numbers that leave something to choose in a few hundred tokens.
const char* const kSmall[] = {
    "quest:budget=64,dense_layers=0",
    "quest:budget=64,dense_layers=0,summary=f16",
    "quest:budget=64,dense_layers=0,index=meandev",
    "quest:budget=64,dense_layers=0,index=cuboid,summary=q8",
    "infllm:block=16,budget=128,sink=16,local=32",
    "ktransformers:block=16,budget=128,local=32",
    "ktransformers-preselect:block=16,budget=128,local=32,preselect=8,dense_layers=0",
    "onebit:budget=128",
    "onebit:budget=64,sink=4,local=16,refine=exact,width=2",
    "sparq:budget=64,local=16,channels=8",
    "double_sparsity:budget=64,local=16,channels=8",
    "twilight:budget=512,candidates=128,dense_layers=0",
    "magicpig:hash_bits=4,tables=12,dense=9",
    "retroinfer:budget=96,cluster=8,segment=256",
    "vattention:budget=64,sink=4,local=16",
    "onebit:budget=64,sink=4,local=16,token_step=4,drift=0.5",
};

std::string with_store(const std::string& text) { return text + " + store=f32"; }

std::vector<std::vector<std::vector<float>>> history(const KvShape& s, const Recipe& r, const Tokens& t, int threads,
                                                     int64_t chunk, KvStats* stats = nullptr) {
  ThreadPool pool(threads);
  auto session = make_session(s, r, 700, pool);
  std::vector<std::vector<std::vector<float>>> outs;
  feed_prompt(*session, t, 0, 420, chunk);
  for (int64_t i = 420; i < 440; ++i) outs.push_back(decode_token(*session, t, i));
  feed_prompt(*session, t, 440, 500, chunk);  // a second turn
  for (int64_t i = 500; i < 506; ++i) outs.push_back(decode_token(*session, t, i));
  if (stats != nullptr) *stats = session->stats();
  return outs;
}

TEST(Methods, SameBitsForAnyThreadCountAndChunkSize) {
  const KvShape s = make_shape(2, 2, 3, 32);
  const Tokens t(s, 700, 301);
  for (const char* text : kSmall) {
    SCOPED_TRACE(text);
    const Recipe r = recipe_of(with_store(text));
    KvStats stats;
    const auto one = history(s, r, t, 1, 420, &stats);
    EXPECT_GT(stats.selections, 0);
    EXPECT_GT(stats.index_bytes, 0);
    for (const auto& token : one) {
      for (const auto& layer : token) {
        for (const float x : layer) ASSERT_TRUE(std::isfinite(x));
      }
    }
    EXPECT_EQ(history(s, r, t, 3, 420), one);
    EXPECT_EQ(history(s, r, t, 2, 420), one);
  }
}

TEST(Methods, ACutAndAnotherTurnEqualASessionThatNeverWentThere) {
  const KvShape s = make_shape(1, 2, 2, 32);
  const Tokens t(s, 700, 302), other(s, 700, 303);
  ThreadPool pool(2);
  for (const char* text : kSmall) {
    SCOPED_TRACE(text);
    const Recipe r = recipe_of(with_store(text));
    auto a = make_session(s, r, 700, pool), b = make_session(s, r, 700, pool);
    feed_prompt(*b, other, 0, 550, 128);
    for (int64_t i = 550; i < 560; ++i) decode_token(*b, other, i);
    ASSERT_TRUE(b->truncate({0}).ok());
    for (auto* session : {a.get(), b.get()}) feed_prompt(*session, t, 0, 400, 100);
    for (int64_t i = 400; i < 410; ++i) ASSERT_EQ(decode_token(*a, t, i), decode_token(*b, t, i));
  }
}

TEST(Methods, BudgetsThatHoldEverythingGiveTheBitsOfFullAttention) {
  const KvShape s = make_shape(2, 2, 3, 32);
  const Tokens t(s, 200, 304);
  ThreadPool pool(2);
  const Recipe full = recipe_of("full + store=f32");
  for (const char* text :
       {"quest:budget=200", "infllm:budget=6272", "onebit:budget=200,refine=exact", "sparq:budget=300,local=16",
        "double_sparsity:budget=200", "retroinfer:budget=200", "vattention:budget=300", "twilight:p=1",
        "onebit:budget=128,share=100%", "onebit:budgets=\"200,300/250\""}) {
    SCOPED_TRACE(text);
    auto a = make_session(s, full, 200, pool), b = make_session(s, recipe_of(with_store(text)), 200, pool);
    feed_prompt(*a, t, 0, 150, 50);
    feed_prompt(*b, t, 0, 150, 50);
    for (int64_t i = 150; i < 200; ++i) ASSERT_EQ(decode_token(*a, t, i), decode_token(*b, t, i));
    EXPECT_EQ(b->stats().selections, 0);
  }
}

// Exact logits of rows [0, n) for query head j.
std::vector<double> logits_of(const KvShape& s, const Tokens& t, int64_t token, int j) {
  std::vector<double> out;
  const float* q = t.q_at(s, token) + int64_t(j) * s.dim_k;
  for (int64_t r = 0; r <= token; ++r) {
    const float* k = t.k_at(s, r) + int64_t(j / s.group_size) * s.dim_k;
    double dot = 0;
    for (int c = 0; c < s.dim_k; ++c) dot += double(q[c]) * k[c];
    out.push_back(dot / std::sqrt(double(s.dim_k)));
  }
  return out;
}

TEST(Refine, ExactScoresOfAllCandidatesGiveTheBestTokens) {
  const KvShape s = make_shape(1, 2, 3, 32);
  const Tokens t(s, 300, 305);
  ThreadPool pool(2);
  // 64 times the budget: every block is a candidate.
  auto session = make_session(
      s, recipe_of("index=minmax(block=8) + select=topk(budget=40,sink=3,local=9,refine=exact,over=64) + store=f32"),
      300, pool);
  feed_prompt(*session, t, 0, 280, 280);
  for (int64_t i = 280; i < 290; ++i) {
    decode_token(*session, t, i);
    for (int h = 0; h < 2; ++h) {
      const int64_t tail = std::min<int64_t>(i + 1 - 9, (i + 1) / 8 * 8);
      std::vector<double> total(size_t(i + 1), 0.0);
      for (int j = h * 3; j < h * 3 + 3; ++j) {
        const auto logits = logits_of(s, t, i, j);
        for (size_t r = 0; r < total.size(); ++r) total[r] += logits[r];
      }
      std::vector<int64_t> order;
      for (int64_t r = 3; r < tail; ++r) order.push_back(r);
      std::stable_sort(order.begin(), order.end(),
                       [&](int64_t a, int64_t b) { return total[size_t(a)] > total[size_t(b)]; });
      std::set<int64_t> want(order.begin(), order.begin() + 40 - 3 - (i + 1 - tail));
      for (int64_t r = 0; r < 3; ++r) want.insert(r);
      for (int64_t r = tail; r <= i; ++r) want.insert(r);
      EXPECT_EQ(rows_of(session->last_ranges(0, h)), want);
    }
  }
}

TEST(TopP, KeepsTheSmallestSetsThatHoldTheMass) {
  const KvShape s = make_shape(1, 2, 3, 32);
  Tokens t(s, 300, 306);
  for (float& x : t.q) x *= 2.0f;  // some peaks
  ThreadPool pool(1);
  for (const double p : {0.5, 0.9}) {
    auto session =
        make_session(s,
                     recipe_of(fmt::format("index=minmax(block=8) + select=topp(budget=300,sink=3,local=9,p={},"
                                           "candidates=300,refine=exact) + store=f32",
                                           p)),
                     300, pool);
    feed_prompt(*session, t, 0, 280, 280);
    for (int64_t i = 280; i < 290; ++i) {
      decode_token(*session, t, i);
      for (int h = 0; h < 2; ++h) {
        const int64_t tail = std::min<int64_t>(i + 1 - 9, (i + 1) / 8 * 8);
        std::set<int64_t> want;
        for (int64_t r = 0; r <= i; ++r) {
          if (r < 3 || r >= tail) want.insert(r);
        }
        const std::set<int64_t> forced = want;
        for (int j = h * 3; j < h * 3 + 3; ++j) {
          const auto logits = logits_of(s, t, i, j);
          double total = 0, held = 0;
          for (const double x : logits) total += std::exp(x);
          std::vector<int64_t> order;
          for (int64_t r = 0; r <= i; ++r) {
            if (forced.contains(r)) {
              held += std::exp(logits[size_t(r)]) / total;
            } else {
              order.push_back(r);
            }
          }
          std::sort(order.begin(), order.end(),
                    [&](int64_t a, int64_t b) { return logits[size_t(a)] > logits[size_t(b)]; });
          for (const int64_t r : order) {
            if (held >= p) break;
            held += std::exp(logits[size_t(r)]) / total;
            want.insert(r);
          }
        }
        EXPECT_EQ(rows_of(session->last_ranges(0, h)), want) << "p " << p << " token " << i;
      }
    }
  }
}

TEST(TopP, TheBudgetCapsTheUnion) {
  const KvShape s = make_shape(1, 1, 4, 32);
  const Tokens t(s, 300, 307);
  ThreadPool pool(1);
  auto session =
      make_session(s, recipe_of("twilight:budget=60,candidates=256,p=0.99,dense_layers=0 + store=f32"), 300, pool);
  feed_prompt(*session, t, 0, 280, 280);
  for (int64_t i = 280; i < 300; ++i) {
    decode_token(*session, t, i);
    EXPECT_LE(count_rows(session->last_ranges(0, 0)), 60);
    EXPECT_GT(count_rows(session->last_ranges(0, 0)), 40);
  }
}

TEST(SparQ, OutputIsItsFormula) {
  const KvShape s = make_shape(1, 2, 2, 32);
  const Tokens t(s, 200, 308);
  ThreadPool pool(1);
  const int r = 12;
  auto session = make_session(s, recipe_of("sparq:budget=40,local=10,channels=12 + store=f32"), 200, pool);
  feed_prompt(*session, t, 0, 180, 180);
  for (int64_t i = 180; i < 190; ++i) {
    const auto out = decode_token(*session, t, i)[0];
    for (int h = 0; h < 2; ++h) {
      std::vector<std::pair<double, int>> size;
      for (int c = 0; c < 32; ++c) {
        double sum = 0;
        for (int j = 0; j < 2; ++j) sum += std::abs(double(t.q_at(s, i)[(h * 2 + j) * 32 + c]));
        size.push_back({-sum, c});
      }
      std::sort(size.begin(), size.end());
      std::vector<std::vector<double>> z(2, std::vector<double>(size_t(i + 1), 0.0));
      std::vector<double> total(size_t(i + 1), 0.0);
      for (int j = 0; j < 2; ++j) {
        const float* q = t.q_at(s, i) + (h * 2 + j) * 32;
        double all = 0, held = 0;
        for (int c = 0; c < 32; ++c) all += std::abs(double(q[c]));
        for (int c = 0; c < r; ++c) held += std::abs(double(q[size[size_t(c)].second]));
        for (int64_t row = 0; row <= i; ++row) {
          for (int c = 0; c < r; ++c) {
            const int channel = size[size_t(c)].second;
            // The index holds halves.
            const float k = to_float(to_f16(t.k_at(s, row)[h * 32 + channel]));
            z[size_t(j)][size_t(row)] += double(q[channel]) * k / std::sqrt(32.0 * held / all);
          }
          total[size_t(row)] += z[size_t(j)][size_t(row)];
        }
      }
      std::vector<int64_t> order;
      for (int64_t row = 0; row < i + 1 - 10; ++row) order.push_back(row);
      std::stable_sort(order.begin(), order.end(),
                       [&](int64_t a, int64_t b) { return total[size_t(a)] > total[size_t(b)]; });
      std::set<int64_t> rows(order.begin(), order.begin() + 30);
      for (int64_t row = i + 1 - 10; row <= i; ++row) rows.insert(row);
      ASSERT_EQ(rows_of(session->last_ranges(0, h)), rows);
      std::vector<RowRange> ranges;
      for (const int64_t row : rows) append_range(ranges, {row, row + 1});
      for (int j = 0; j < 2; ++j) {
        double all = 0, chosen = 0;
        for (int64_t row = 0; row <= i; ++row) {
          const double e = std::exp(z[size_t(j)][size_t(row)]);
          all += e;
          if (rows.contains(row)) chosen += e;
        }
        const double alpha = chosen / all;
        const Partial p = reference_attend(s, t, i, h * 2 + j, ranges, 1.0 / std::sqrt(32.0));
        for (int c = 0; c < 32; ++c) {
          double mean = 0;
          for (int64_t row = 0; row <= i; ++row) mean += double(t.v_at(s, row)[h * 32 + c]) / double(i + 1);
          ASSERT_NEAR(out[size_t((h * 2 + j) * 32 + c)], alpha * p.out[size_t(c)] + (1 - alpha) * mean, 2e-4);
        }
      }
    }
  }
}

double mean_error(const KvShape& s, const Tokens& t, const std::string& text) {
  ThreadPool pool(2);
  auto session = make_session(s, recipe_of(text + " + store=f32"), 1300, pool);
  session->set_check_every(1);
  feed_prompt(*session, t, 0, 1200, 300);
  for (int64_t i = 1200; i < 1230; ++i) decode_token(*session, t, i);
  return session->stats().output_error[0] / 30;
}

TEST(Tails, BringTheOutputNearerToFullAttention) {
  const KvShape s = make_shape(1, 2, 2, 32);
  const Tokens t(s, 1300, 309);
  const double alone =
      mean_error(s, t, "index=bits(block=1) + select=topk(budget=128,sink=4,local=16,aggregate=softmax)");
  const double sampled = mean_error(s, t,
                                    "index=bits(block=1) + select=topk(budget=128,sink=4,local=16,aggregate=softmax) + "
                                    "tail=sample(rate=0.3,epsilon=0,delta=0.05)");
  EXPECT_LT(sampled, 0.5 * alone);
  // Every other row sampled is full attention, up to rounding.
  EXPECT_LT(mean_error(s, t,
                       "index=bits(block=1) + select=topk(budget=128,sink=4,local=16) + "
                       "tail=sample(rate=1,epsilon=0,delta=0.05)"),
            1e-5);
}

TEST(Tails, ClustersOfEqualKeysAreEstimatedExactly) {
  // Keys are one of 20 vectors: a cluster of equal keys is its centroid, so estimating all clusters is full attention.
  const KvShape s = make_shape(1, 1, 2, 32);
  Tokens t(s, 1300, 310);
  const Tokens base(s, 20, 320);
  for (int64_t i = 0; i < 1300; ++i) {
    for (int c = 0; c < 32; ++c) t.k[size_t(i * 32 + c)] = base.k[size_t(i * 7919 % 20 * 32 + c)];
  }
  const std::string index = "index=clusters(cluster=8,segment=512) + select=topk(budget=128,sink=4,local=64)";
  const double without = mean_error(s, t, index), with = mean_error(s, t, index + " + tail=clusters(share=1)");
  EXPECT_GT(without, 0.05);
  EXPECT_LT(with, 0.3 * without);
}

TEST(MagicPig, DrawingAlmostEverythingIsAlmostFullAttention) {
  const KvShape s = make_shape(1, 2, 2, 32);
  const Tokens t(s, 1300, 311);
  // Codes of one bit in 64 tables: nearly every row collides twice.
  EXPECT_LT(mean_error(s, t, "index=lsh(hash_bits=1,tables=64) + select=sampled(sink=4,local=16)"), 0.02);
  // Far fewer rows, and still nearer than sinks and window alone.
  const double drawn = mean_error(s, t, "index=lsh(hash_bits=4,tables=24) + select=sampled(sink=4,local=16)");
  EXPECT_LT(drawn, 0.8);
}

TEST(Drift, ChoosesAnewWhenQueriesTurn) {
  const KvShape s = make_shape(1, 1, 2, 32);
  const Tokens t(s, 300, 312);
  ThreadPool pool(1);
  const auto selections = [&](const std::string& more) {
    auto session = make_session(s, recipe_of("onebit:budget=96,sink=4,local=16," + more + " + store=f32"), 300, pool);
    feed_prompt(*session, t, 0, 250, 250);
    for (int64_t i = 250; i < 290; ++i) decode_token(*session, t, i);
    return session->stats().selections;
  };
  EXPECT_EQ(selections("token_step=1"), 40);
  EXPECT_EQ(selections("token_step=10"), 4);
  EXPECT_EQ(selections("token_step=10,drift=1"), 40);  // random queries are never the same
  EXPECT_EQ(selections("token_step=10,drift=-1"), 4);  // and never opposite
}

TEST(BudgetLists, GiveEveryLayerAndHeadItsOwn) {
  const KvShape s = make_shape(3, 2, 2, 32);
  const Tokens t(s, 400, 313);
  ThreadPool pool(2);
  auto session =
      make_session(s, recipe_of("onebit:sink=4,local=16,block=4,budgets=\"64/96,120\" + store=f32"), 400, pool);
  feed_prompt(*session, t, 0, 350, 350);
  for (int64_t i = 350; i < 360; ++i) {
    decode_token(*session, t, i);
    const int64_t budgets[3][2] = {{64, 96}, {120, 120}, {120, 120}};
    for (int l = 0; l < 3; ++l) {
      for (int h = 0; h < 2; ++h) {
        const int64_t rows = count_rows(session->last_ranges(l, h));
        EXPECT_LE(rows, budgets[l][h]);
        EXPECT_GT(rows, budgets[l][h] - 12);
      }
    }
  }
  auto shared = make_session(s, recipe_of("onebit:budget=64,sink=4,local=16,block=4,share=25% + store=f32"), 400, pool);
  feed_prompt(*shared, t, 0, 360, 360);
  decode_token(*shared, t, 360);
  EXPECT_LE(count_rows(shared->last_ranges(0, 0)), 91);
  EXPECT_GT(count_rows(shared->last_ranges(0, 0)), 80);
}

TEST(Recipes, IllegalCombinationsNameTheNearestLegalOne) {
  for (const char* text :
       {"index=minmax(block=16) + select=sampled(sink=4,local=64)", "index=lsh + select=topp(budget=100,p=0.9)",
        "index=minmax(block=16) + select=topp(budget=8192,p=0.9,refine=none)", "quest + tail=mean",
        "quest + tail=clusters", "sparq:token_step=2", "retroinfer:heads=shared", "infllm:heads=query",
        "full + tail=sample", "onebit:width=3", "onebit:budgets=\"64,x\"", "onebit:budgets=64",
        "magicpig:dense=\"0,y\""}) {
    const auto recipe = parse_recipe(text);
    EXPECT_FALSE(recipe.ok()) << text;
    if (recipe.ok()) continue;
    EXPECT_NE(recipe.status().message().find_first_of(";:"), std::string::npos);
  }
}

}  // namespace
}  // namespace longkv::test
