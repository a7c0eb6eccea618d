// Every method against its definition in double: lists of kept positions, over one prompt, the next one, and tokens.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "kv/keep/snapkv.h"
#include "kv_keep/oracle.h"

namespace longkv::test {
namespace {

KvShape shape_with(int group) { return make_shape(2, 2, group, 32, 24); }

std::unique_ptr<KvSession> open(const KvShape& s, const std::string& keep, ThreadPool& pool, int64_t capacity = 512) {
  const auto recipe = parse_recipe(keep + " + store=f32");
  EXPECT_TRUE(recipe.ok()) << recipe.status().message();
  return make_kept_session(s, recipe.value(), capacity, pool, nullptr, test_rotate(s.dim_k));
}

// Runs a prompt, tokens and a second prompt; `expected(held, n, from)` is asked for the choice of each head.
void expect_choices(
    const KvShape& s, const Tokens& t, const std::string& keep, int64_t decoded,
    const std::function<Positions(int layer, int head, const Positions& held, int64_t n, int64_t from)>& expected) {
  ThreadPool pool(2);
  auto session = open(s, keep, pool);
  feed_prompt(*session, t, 0, 90, 37);
  std::vector<std::vector<Positions>> held(size_t(s.layers), std::vector<Positions>(size_t(s.kv_heads)));
  for (int l = 0; l < s.layers; ++l) {
    for (int h = 0; h < s.kv_heads; ++h) {
      Positions& own = held[size_t(l)][size_t(h)];
      own = expected(l, h, first_tokens(90), 90, 0);
      ASSERT_EQ(sorted_positions(*session, l, h), own) << keep << " layer " << l << " head " << h;
    }
  }
  for (int64_t i = 90; i < 90 + decoded; ++i) decode_token(*session, t, i);
  feed_prompt(*session, t, 90 + decoded, 140, 20);
  for (int l = 0; l < s.layers; ++l) {
    for (int h = 0; h < s.kv_heads; ++h) {
      Positions& own = held[size_t(l)][size_t(h)];
      for (int64_t p = 90; p < 140; ++p) own.push_back(p);
      ASSERT_EQ(sorted_positions(*session, l, h), expected(l, h, own, 140, 90 + decoded)) << keep << " second prompt";
    }
  }
}

double key_norm(const KvShape& s, const Tokens& t, int64_t p, int h) {
  const float* k = t.k_at(s, p) + int64_t(h) * s.dim_k;
  return std::sqrt(dot(k, k, s.dim_k));
}

TEST(KeepMethods, Knorm) {
  const KvShape s = shape_with(3);
  Tokens t(s, 150, 20);
  std::copy_n(t.k_at(s, 3), 2 * s.dim_k, t.k.data() + 50 * 2 * s.dim_k);  // a tie: the newer stays first
  for (const auto& [keep, budget, sink, window] :
       {std::tuple<const char*, int64_t, int64_t, int64_t>{"keep=knorm(budget=30)", 30, 0, 0},
        {"keep=knorm(budget=31,sink=4,window=9)", 31, 4, 9},
        {"keep=knorm(budget=1)", 1, 0, 0}}) {
    expect_choices(s, t, keep, 3, [&](int, int h, const Positions& held, int64_t, int64_t) {
      std::vector<double> score;
      for (const int64_t p : held) score.push_back(-key_norm(s, t, p, h));
      return best_of(held, score, ends(held, sink, window), budget);
    });
  }
}

std::vector<double> keydiff_scores(const KvShape& s, const Tokens& t, const Positions& held, int h) {
  std::vector<double> anchor(size_t(s.dim_k), 0.0), score;
  for (const int64_t p : held) {
    for (int c = 0; c < s.dim_k; ++c) anchor[size_t(c)] += t.k_at(s, p)[h * s.dim_k + c] / key_norm(s, t, p, h);
  }
  double length = 0;
  for (const double a : anchor) length += a * a;
  for (const int64_t p : held) {
    double sum = 0;
    for (int c = 0; c < s.dim_k; ++c) sum += t.k_at(s, p)[h * s.dim_k + c] * anchor[size_t(c)];
    score.push_back(-sum / key_norm(s, t, p, h) / std::sqrt(length));
  }
  return score;
}

TEST(KeepMethods, Keydiff) {
  const KvShape s = shape_with(1);
  const Tokens t(s, 150, 21);
  expect_choices(s, t, "keep=keydiff(keep_ratio=0.25)", 0, [&](int, int h, const Positions& held, int64_t n, int64_t) {
    return best_of(held, keydiff_scores(s, t, held, h), {}, int64_t(double(n) * 0.25));
  });
}

// With a block: what is left meets the next tokens, and as many as the budget stay, until all have come.
TEST(KeepMethods, KeydiffByBlocks) {
  const KvShape s = shape_with(1);
  const Tokens t(s, 150, 23);
  constexpr int64_t kBudget = 31, kSink = 3, kWindow = 5;
  for (const int64_t block : {1, 7, 29, 30, 58, 59, 60, 200}) {
    const std::string keep =
        fmt::format("keep=keydiff(budget={},sink={},window={},block={})", kBudget, kSink, kWindow, block);
    expect_choices(s, t, keep, 0, [&](int, int h, const Positions& held, int64_t, int64_t) {
      const std::set<int64_t> forced = ends(held, kSink, kWindow);
      Positions left;
      for (size_t next = 0; next < held.size();) {
        const size_t wanted = left.empty() ? size_t(kBudget + block) : size_t(block);
        const size_t end = std::min(held.size(), next + wanted);
        left.insert(left.end(), held.begin() + int64_t(next), held.begin() + int64_t(end));
        next = end;
        left = best_of(left, keydiff_scores(s, t, left, h), forced, kBudget);
      }
      return left;
    });
  }
}

TEST(KeepMethods, RandomKeepsItsBudgetAndItsSeed) {
  ThreadPool one(1), two(2);
  const KvShape s = shape_with(2);
  const Tokens t(s, 150, 22);
  const auto kept = [&](const char* keep, ThreadPool& pool) {
    auto session = open(s, keep, pool);
    feed_prompt(*session, t, 0, 100, 30);
    return session->kept_positions(1, 0);
  };
  const Positions a = kept("keep=random(budget=40)", one);
  EXPECT_EQ(a.size(), 40u);
  EXPECT_EQ(kept("keep=random(budget=40)", two), a);
  EXPECT_NE(kept("keep=random(budget=40,seed=2)", one), a);
  // Roughly half of 40 in each half of the prompt: the binomial's 4 sigma are 12.6.
  const auto low = std::count_if(a.begin(), a.end(), [](int64_t p) { return p < 50; });
  EXPECT_NEAR(double(low), 20, 13);
}

TEST(KeepMethods, Snapkv) {
  for (const int group : {1, 3, 4}) {
    const KvShape s = shape_with(group);
    const Tokens t(s, 150, 23 + uint64_t(group));
    for (const char* keep :
         {"keep=snapkv(budget=40,window=8)", "keep=snapkv(budget=33,window=16,kernel=5,pool=avg)",
          "keep=snapkv(budget=20,window=1,kernel=1,reduce=max)", "keep=snapkv(budget=50,window=40,kernel=9,sink=2)"}) {
      const KeepSpec spec = parse_recipe(keep).value().keep;
      expect_choices(s, t, keep, 4, [&](int, int h, const Positions& held, int64_t n, int64_t from) {
        return best_of(held, snapkv_scores(s, t, n, from, h, held, spec), ends(held, spec.sink, spec.window),
                       spec.budget);
      });
    }
  }
}

TEST(KeepMethods, PyramidTotalsAreExact) {
  for (const int layers : {1, 2, 7, 30, 32}) {
    for (const int64_t budget : {65, 128, 1000, 2048, 2049, 4096}) {
      for (const int64_t tokens : {100, 2047, 2048, 2049, 3000, 4031, 4032, 4097, 100000}) {
        KeepSpec spec = default_keep(KeepKind::kPyramidkv);
        spec.budget = budget;
        int64_t sum = 0, last = int64_t{1} << 60;
        for (int l = 0; l < layers; ++l) {
          const int64_t rows = pyramid_budget(spec, l, layers, tokens);
          EXPECT_LE(rows, tokens);
          EXPECT_LE(rows, last + 1) << "deeper layers keep no more";
          sum += rows;
          last = rows;
        }
        EXPECT_EQ(sum, layers * std::min(budget, tokens)) << layers << " layers, " << budget << " of " << tokens;
      }
    }
  }
  // The worked example: c = 2016, from 3932 selected rows down to 100.
  const KeepSpec spec = default_keep(KeepKind::kPyramidkv);
  EXPECT_EQ(pyramid_budget(spec, 0, 32, 100000), 3932 + 32);
  EXPECT_EQ(pyramid_budget(spec, 31, 32, 100000), 100 + 32);
}

TEST(KeepMethods, Pyramidkv) {
  const KvShape s = make_shape(4, 2, 2, 32, 24);
  const Tokens t(s, 150, 27);
  const char* keep = "keep=pyramidkv(budget=24,window=4,beta=5)";
  const KeepSpec spec = parse_recipe(keep).value().keep;
  expect_choices(s, t, keep, 0, [&](int l, int h, const Positions& held, int64_t n, int64_t from) {
    return best_of(held, snapkv_scores(s, t, n, from, h, held, spec), ends(held, 0, spec.window),
                   pyramid_budget(spec, l, 4, n));
  });
}

// Mean weight of all query heads of a layer over rows that all heads share.
std::vector<double> tova_scores(const KvShape& s, const Tokens& t, int64_t token, const Positions& held) {
  std::vector<double> score(held.size(), 0.0);
  for (int j = 0; j < s.kv_heads * s.group_size; ++j) {
    const auto w = weights_of(s, t, token, j, held);
    for (size_t r = 0; r < held.size(); ++r) score[r] += w.at(held[r]);
  }
  return score;
}

TEST(KeepMethods, TovaInPromptsAndTokens) {
  ThreadPool pool(2);
  for (const int64_t sink : {0, 4}) {
    const KvShape s = shape_with(3);
    const Tokens t(s, 200, 28);
    auto session = open(s, fmt::format("keep=tova(budget=30,sink={})", sink), pool);
    Positions held;
    const auto drop_to = [&](int64_t token) {
      held = best_of(held, tova_scores(s, t, token, held), ends(held, sink, 1), 30);
    };
    int64_t n = 0;
    for (; n < 20; ++n) held.push_back(n);
    feed_prompt(*session, t, 0, 20, 20);
    for (; n < 60; ++n) {  // fills up, then one leaves per token
      held.push_back(n);
      const Positions attended = held;
      for (const auto& out : decode_token(*session, t, n)) expect_attends(s, t, n, {attended, attended}, out.data());
      drop_to(n);
      for (int h = 0; h < s.kv_heads; ++h) ASSERT_EQ(sorted_positions(*session, 1, h), held) << "token " << n;
    }
    feed_prompt(*session, t, 60, 100, 17);
    for (; n < 100; ++n) held.push_back(n);
    drop_to(99);
    ASSERT_EQ(sorted_positions(*session, 0, 1), held);
    for (; n < 110; ++n) {
      held.push_back(n);
      decode_token(*session, t, n);
      drop_to(n);
      ASSERT_EQ(sorted_positions(*session, 0, 0), held);
    }
  }
}

TEST(KeepMethods, H2oAccumulatesOverPromptsAndTokens) {
  ThreadPool pool(2);
  for (const char* keep : {"keep=h2o(budget=24)", "keep=h2o(budget=25,recent=0.2,normalise=visible,sink=3)",
                           "keep=h2o(budget=10,recent=0)"}) {
    const KvShape s = shape_with(2);
    const Tokens t(s, 200, 29);
    const KeepSpec spec = parse_recipe(keep).value().keep;
    auto session = open(s, keep, pool);
    std::vector<std::map<int64_t, double>> mass(size_t(s.kv_heads));  // of the held positions
    const auto held_of = [&](int h) {
      Positions held;
      for (const auto& [p, m] : mass[size_t(h)]) held.push_back(p);
      return held;
    };
    const auto see = [&](int h, int64_t token) {
      const Positions held = held_of(h);
      for (int g = 0; g < s.group_size; ++g) {
        for (const auto& [p, w] : weights_of(s, t, token, h * s.group_size + g, held)) mass[size_t(h)][p] += w;
      }
    };
    const auto drop = [&](int h, int64_t n) {
      const Positions held = held_of(h);
      std::vector<double> score;
      for (const int64_t p : held) {
        score.push_back(mass[size_t(h)][p] / (spec.normalise == KeepNormalise::kVisible ? double(n - p) : 1.0));
      }
      const auto forced = ends(held, spec.sink, int64_t(spec.recent * double(spec.budget)));
      const Positions kept = best_of(held, score, forced, spec.budget);
      std::erase_if(mass[size_t(h)],
                    [&](const auto& m) { return !std::binary_search(kept.begin(), kept.end(), m.first); });
    };
    const auto prompt = [&](int64_t from, int64_t to) {
      for (int h = 0; h < s.kv_heads; ++h) {
        for (int64_t p = from; p < to; ++p) mass[size_t(h)][p] = 0;
        for (int64_t p = from; p < to; ++p) see(h, p);
        drop(h, to);
      }
    };
    feed_prompt(*session, t, 0, 50, 21);
    prompt(0, 50);
    for (int h = 0; h < 2; ++h) ASSERT_EQ(sorted_positions(*session, 1, h), held_of(h)) << keep;
    for (int64_t n = 50; n < 80; ++n) {
      decode_token(*session, t, n);
      for (int h = 0; h < 2; ++h) {
        mass[size_t(h)][n] = 0;
        see(h, n);
        drop(h, n + 1);
        ASSERT_EQ(sorted_positions(*session, 0, h), held_of(h)) << keep << " token " << n;
      }
    }
    feed_prompt(*session, t, 80, 120, 11);
    prompt(80, 120);
    for (int h = 0; h < 2; ++h) ASSERT_EQ(sorted_positions(*session, 1, h), held_of(h)) << keep << " second prompt";
  }
}

// A tail that is cut takes its rows' mass with it; what it gave to others stays.
TEST(KeepMethods, H2oForgetsCutTails) {
  ThreadPool pool(1);
  const KvShape s = shape_with(2);
  const Tokens t(s, 100, 30), other(s, 100, 31);
  auto session = open(s, "keep=h2o(budget=45)", pool);
  std::map<int64_t, double> mass;
  const auto see = [&](const Tokens& from, int64_t token, const Tokens& keys) {
    mass[token] += 0;
    Positions held;
    for (const auto& [p, m] : mass) held.push_back(p);
    for (int g = 0; g < s.group_size; ++g) {
      Tokens mixed = keys;
      const int64_t width = s.kv_heads * s.group_size * s.dim_k;
      std::copy_n(from.q_at(s, token), width, mixed.q.data() + token * width);
      for (const auto& [p, w] : weights_of(s, mixed, token, g, held)) mass[p] += w;
    }
  };
  feed_prompt(*session, t, 0, 30, 30);
  for (int64_t i = 0; i < 30; ++i) see(t, i, t);
  // Eight tokens that are taken back.
  Tokens with_other = t;
  std::copy_n(other.k_at(s, 30), 8 * s.kv_heads * s.dim_k, with_other.k.data() + 30 * s.kv_heads * s.dim_k);
  for (int64_t i = 30; i < 38; ++i) {
    decode_token(*session, other, i);
    see(other, i, with_other);
  }
  ASSERT_TRUE(session->truncate({30}).ok());
  std::erase_if(mass, [](const auto& m) { return m.first >= 30; });
  for (int64_t i = 30; i < 70; ++i) {
    decode_token(*session, t, i);
    see(t, i, t);
    Positions held;
    std::vector<double> score;
    for (const auto& [p, m] : mass) {
      held.push_back(p);
      score.push_back(m);
    }
    const Positions kept = best_of(held, score, ends(held, 0, 22), 45);
    std::erase_if(mass, [&](const auto& m) { return !std::binary_search(kept.begin(), kept.end(), m.first); });
    ASSERT_EQ(sorted_positions(*session, 0, 0), kept) << "token " << i;
  }
}

TEST(KeepMethods, BudgetsThatHoldEverythingAreFull) {
  ThreadPool pool(2);
  const KvShape s = shape_with(3);
  const Tokens t(s, 150, 31);
  auto full = make_session(s, full_f32(), 512, pool);
  const auto a = feed_prompt(*full, t, 0, 100, 33), b = decode_token(*full, t, 100)[1];
  const auto c = feed_prompt(*full, t, 101, 140, 33), d = decode_token(*full, t, 140)[0];
  for (const char* keep : {"keep=streaming(sink=4,window=200)", "keep=knorm(budget=400)", "keep=keydiff(keep_ratio=1)",
                           "keep=random(budget=150)", "keep=snapkv(budget=150)", "keep=tova(budget=150)",
                           "keep=h2o(budget=150)", "keep=h2o(keep_ratio=1)", "keep=pyramidkv(budget=150)"}) {
    auto session = open(s, keep, pool);
    EXPECT_EQ(feed_prompt(*session, t, 0, 100, 33), a) << keep;
    EXPECT_EQ(decode_token(*session, t, 100)[1], b) << keep;
    if (std::string(keep) == "keep=h2o(keep_ratio=1)") continue;  // a share of the prompt bounds the tokens after it
    EXPECT_EQ(feed_prompt(*session, t, 101, 140, 33), c) << keep;
    EXPECT_EQ(decode_token(*session, t, 140)[0], d) << keep;
  }
}

TEST(KeepMethods, BudgetsAreExactAndSequencesStartAnew) {
  ThreadPool pool(2);
  const KvShape s = shape_with(2);
  const Tokens t(s, 300, 32);
  for (const char* keep : {"keep=streaming(sink=3,window=37)", "keep=knorm(budget=40)", "keep=keydiff(budget=40)",
                           "keep=random(budget=40)", "keep=snapkv(budget=40)", "keep=tova(budget=40)",
                           "keep=h2o(budget=40)", "keep=h2o(keep_ratio=0.2)"}) {
    auto session = open(s, keep, pool);
    feed_prompt(*session, t, 0, 200, 33);
    for (int l = 0; l < s.layers; ++l) {
      for (int h = 0; h < s.kv_heads; ++h) EXPECT_EQ(session->cache().rows(l, h).v, 40) << keep;
    }
    decode_token(*session, t, 200);
    // Another sequence in the same session equals a new session.
    ASSERT_TRUE(session->truncate({0}).ok());
    auto fresh = open(s, keep, pool);
    EXPECT_EQ(feed_prompt(*session, t, 50, 250, 40), feed_prompt(*fresh, t, 50, 250, 40)) << keep;
    EXPECT_EQ(decode_token(*session, t, 250), decode_token(*fresh, t, 250)) << keep;
    EXPECT_EQ(session->kept_positions(1, 1), fresh->kept_positions(1, 1)) << keep;
  }
}

TEST(KeepMethods, ComposeWithAnIndex) {
  ThreadPool pool(2);
  const KvShape s = shape_with(2);
  const Tokens t(s, 300, 33);
  const auto recipe = parse_recipe(
      "keep=snapkv(budget=128) + index=minmax(block=8) + select=topk(budget=48,sink=0,local=0) + store=f32");
  ASSERT_TRUE(recipe.ok()) << recipe.status().message();
  auto session = make_session(s, recipe.value(), 512, pool);
  feed_prompt(*session, t, 0, 200, 50);
  EXPECT_EQ(session->cache().rows(0).v, 128);
  decode_token(*session, t, 200);
  EXPECT_EQ(count_rows(session->last_ranges(0, 0)), 41);  // five blocks and the open one's row
  EXPECT_FALSE(parse_recipe("tova + index=minmax + select=topk(budget=2K)").ok());
  EXPECT_FALSE(parse_recipe("snapkv:budget=32").ok());
  EXPECT_FALSE(parse_recipe("snapkv:kernel=4").ok());
}

TEST(KeepMethods, MeasuresDepthWithoutAPrompt) {
  ThreadPool pool(1);
  const KvShape s = shape_with(2);
  for (const char* keep : {"keep=snapkv(budget=40)", "keep=h2o(budget=40)", "keep=knorm(budget=40)"}) {
    auto session = open(s, keep, pool);
    ASSERT_TRUE(session->fill_random(200, 1).ok());
    EXPECT_EQ(session->cache().rows(1, 1).v, 40) << keep;
    EXPECT_EQ(session->tokens().v, 200);
  }
}

}  // namespace
}  // namespace longkv::test
