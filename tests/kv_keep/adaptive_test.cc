// Expected Attention and Ada-KV against their definitions in double.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "kv_keep/oracle.h"

namespace longkv::test {
namespace {

std::unique_ptr<KvSession> open(const KvShape& s, const std::string& keep, ThreadPool& pool) {
  const auto recipe = parse_recipe(keep + " + store=f32");
  EXPECT_TRUE(recipe.ok()) << recipe.status().message();
  return make_kept_session(s, recipe.value(), 512, pool, nullptr, test_rotate(s.dim_k));
}

// raw: the tokens before RoPE. Scores of the held rows of a KV head after the prompt [from, n).
std::vector<double> expected_scores(const KvShape& s, const Tokens& raw, const Tokens& t, int64_t from, int64_t n,
                                    int h, const Positions& held, const KeepSpec& spec) {
  const int d = s.dim_k;
  const double scale = 1.0 / std::sqrt(double(d));
  std::vector<double> mean(held.size(), 0.0);
  for (int g = 0; g < s.group_size; ++g) {
    const int j = h * s.group_size + g;
    std::vector<const float*> queries;
    for (int64_t i = std::max(from, spec.sink); i < n; ++i) queries.push_back(raw.q_at(s, i) + int64_t(j) * d);
    std::vector<double> mu(size_t(d), 0.0);
    for (const float* q : queries) {
      for (int c = 0; c < d; ++c) mu[size_t(c)] += q[c] / double(queries.size());
    }
    std::vector<double> exponent(held.size(), -INFINITY);
    for (size_t r = 0; r < held.size(); ++r) {
      if (held[r] < spec.sink) continue;
      // The mean over future positions of the key turned back, so that un-rotated queries meet it.
      std::vector<double> w(size_t(d), 0.0);
      for (int64_t f = 0; f < spec.future; ++f) {
        std::vector<float> k(t.k_at(s, held[r]) + int64_t(h) * d, t.k_at(s, held[r]) + int64_t(h + 1) * d);
        turn(-double(n + f), k.data(), 1, d, d);
        for (int c = 0; c < d; ++c) w[size_t(c)] += k[size_t(c)] / double(spec.future);
      }
      double first = 0, second = 0;
      for (int c = 0; c < d; ++c) first += mu[size_t(c)] * w[size_t(c)];
      for (const float* q : queries) {
        double x = 0;
        for (int c = 0; c < d; ++c) x += (q[c] - mu[size_t(c)]) * w[size_t(c)];
        second += x * x / double(queries.size());
      }
      exponent[r] = scale * first + (spec.covariance ? scale * scale * second / 2 : 0.0);
    }
    const double top = *std::max_element(exponent.begin(), exponent.end());
    double total = 0;
    for (const double e : exponent) total += std::exp(e - top);
    for (size_t r = 0; r < held.size(); ++r) mean[r] += std::exp(exponent[r] - top) / total / s.group_size;
  }
  std::vector<double> out;
  for (size_t r = 0; r < held.size(); ++r) {
    const float* v = t.v_at(s, held[r]) + int64_t(h) * s.dim_v;
    out.push_back(spec.value_norm ? (mean[r] + spec.epsilon) * std::sqrt(dot(v, v, s.dim_v)) : mean[r]);
  }
  return out;
}

TEST(ExpectedAttention, KeepsWhatTheGaussianModelExpects) {
  ThreadPool pool(2);
  for (const int group : {1, 3}) {
    const KvShape s = make_shape(2, 2, group, 16, 24);
    Tokens raw(s, 150, 40 + uint64_t(group));
    for (size_t i = 0; i < raw.q.size(); ++i) raw.q[i] += (i % 16 < 5) ? 0.8f : 0.0f;  // a mean that matters
    const Tokens t = with_rope(s, raw);
    for (const char* keep : {"keep=expected_attention(budget=40,future=30)",
                             "keep=expected_attention(budget=25,future=7,covariance=false)",
                             "keep=expected_attention(budget=25,future=9,value_norm=false,sink=0)",
                             "keep=expected_attention(keep_ratio=0.3,future=20,epsilon=0.01,sink=2,window=5)"}) {
      const KeepSpec spec = parse_recipe(keep).value().keep;
      auto session = open(s, keep, pool);
      feed_prompt(*session, t, 0, 90, 40);
      std::vector<Positions> held(2, first_tokens(90));
      for (int h = 0; h < 2; ++h) {
        held[size_t(h)] = best_of(held[size_t(h)], expected_scores(s, raw, t, 0, 90, h, held[size_t(h)], spec),
                                  ends(held[size_t(h)], spec.sink, spec.window), keep_budget(spec, 90));
        ASSERT_EQ(sorted_positions(*session, 1, h), held[size_t(h)]) << keep;
      }
      feed_prompt(*session, t, 90, 140, 40);
      for (int h = 0; h < 2; ++h) {
        Positions& own = held[size_t(h)];
        for (int64_t p = 90; p < 140; ++p) own.push_back(p);
        const auto scores = expected_scores(s, raw, t, 90, 140, h, own, spec);
        ASSERT_EQ(sorted_positions(*session, 0, h),
                  best_of(own, scores, ends(own, spec.sink, spec.window), keep_budget(spec, 140)))
            << keep;
      }
    }
  }
}

struct Scored {
  double score;
  int64_t pos;
  int head;
  bool operator<(const Scored& o) const {
    if (score != o.score) return score > o.score;
    return pos != o.pos ? pos > o.pos : head < o.head;
  }
};

// Rows per head of one layer; scores by head and held row.
std::vector<int64_t> ada_counts(const std::vector<Positions>& held, const std::vector<std::vector<double>>& scores,
                                const KeepSpec& spec, int64_t budget) {
  const int heads = int(held.size());
  std::vector<int64_t> counts(held.size(), 0);
  std::vector<Scored> all;
  if (spec.safeguard_mode == KeepSafeguard::kMin) {
    for (int h = 0; h < heads; ++h) {
      const auto forced = ends(held[size_t(h)], spec.sink, spec.window);
      const auto safe = best_of(held[size_t(h)], scores[size_t(h)], forced, int64_t(double(budget) * spec.safeguard));
      for (size_t r = 0; r < held[size_t(h)].size(); ++r) {
        const int64_t p = held[size_t(h)][r];
        const bool sure = forced.count(p) != 0 || std::binary_search(safe.begin(), safe.end(), p);
        all.push_back({sure ? INFINITY : scores[size_t(h)][r], p, h});
      }
    }
    std::sort(all.begin(), all.end());
    for (int64_t i = 0; i < budget * heads; ++i) ++counts[size_t(all[size_t(i)].head)];
    return counts;
  }
  std::vector<int64_t> n(held.size(), 0);
  const int64_t c = budget - spec.window - spec.sink;
  for (int h = 0; h < heads; ++h) {
    const auto forced = ends(held[size_t(h)], spec.sink, spec.window);
    std::vector<double> own;
    for (size_t r = 0; r < held[size_t(h)].size(); ++r) {
      if (forced.count(held[size_t(h)][r]) == 0) own.push_back(scores[size_t(h)][r]);
    }
    std::sort(own.rbegin(), own.rend());
    double top = 0, sum = 0;
    for (size_t i = 0; i < own.size(); ++i) {
      sum += own[i];
      if (int64_t(i) < c) top += own[i];
    }
    for (size_t r = 0; r < held[size_t(h)].size(); ++r) {
      const int64_t p = held[size_t(h)][r];
      const double score = scores[size_t(h)][r] * (spec.normalise_heads ? top / sum : 1.0);
      if (forced.count(p) == 0) all.push_back({score, p, h});
    }
  }
  std::sort(all.begin(), all.end());
  for (int64_t i = 0; i < c * heads; ++i) ++n[size_t(all[size_t(i)].head)];
  // (1 - f) n + f c, whole numbers by largest remainder.
  std::vector<std::pair<double, int>> remainder;
  int64_t left = c * heads;
  for (int h = 0; h < heads; ++h) {
    const double wanted = (1 - spec.safeguard) * double(n[size_t(h)]) + spec.safeguard * double(c);
    counts[size_t(h)] = int64_t(wanted);
    left -= counts[size_t(h)];
    remainder.push_back({-(wanted - std::floor(wanted)), h});
  }
  std::stable_sort(remainder.begin(), remainder.end(), [](auto& a, auto& b) { return a.first < b.first; });
  for (int64_t i = 0; i < left; ++i) ++counts[size_t(remainder[size_t(i)].second)];
  for (int64_t& k : counts) k += spec.window + spec.sink;
  return counts;
}

TEST(AdaKv, HeadsShareALayersBudget) {
  ThreadPool pool(2);
  const KvShape s = make_shape(2, 3, 2, 16, 24);
  Tokens raw(s, 150, 50);
  // Heads of different sharpness, so that shares differ.
  for (size_t i = 0; i < raw.k.size(); ++i) raw.k[i] *= 0.5f + float(i / 16 % 3);
  const Tokens t = with_rope(s, raw);
  for (const char* keep :
       {"keep=adakv(budget=30,window=8)", "keep=adakv(budget=31,window=7,safeguard=0)",
        "keep=adakv(budget=30,window=8,safeguard=0.5,normalise=false,pool=avg,kernel=5)",
        "keep=adakv(budget=30,window=8,mode=min)", "keep=adakv(budget=30,window=4,mode=min,safeguard=0.5)",
        "keep=adakv(scorer=expected,budget=30,future=20)",
        "keep=adakv(scorer=expected,budget=29,future=20,mode=min)"}) {
    const KeepSpec spec = parse_recipe(keep).value().keep;
    auto session = open(s, keep, pool);
    const auto check = [&](std::vector<Positions>& held, int64_t from, int64_t n) {
      std::vector<std::vector<double>> scores;
      for (int h = 0; h < 3; ++h) {
        scores.push_back(spec.scorer == KeepScorer::kExpected
                             ? expected_scores(s, raw, t, from, n, h, held[size_t(h)], spec)
                             : snapkv_scores(s, t, n, from, h, held[size_t(h)], spec));
      }
      const auto counts = ada_counts(held, scores, spec, spec.budget);
      int64_t total = 0;
      for (int h = 0; h < 3; ++h) {
        Positions& own = held[size_t(h)];
        own = best_of(own, scores[size_t(h)], ends(own, spec.sink, spec.window), counts[size_t(h)]);
        EXPECT_EQ(sorted_positions(*session, 1, h), own) << keep << " head " << h;
        total += session->cache().rows(1, h).v;
      }
      EXPECT_EQ(total, 3 * spec.budget) << keep << ": the layer's total is exact";
    };
    feed_prompt(*session, t, 0, 90, 40);
    std::vector<Positions> held(3, first_tokens(90));
    check(held, 0, 90);
    for (int64_t p = 90; p < 94; ++p) decode_token(*session, t, p);
    feed_prompt(*session, t, 94, 140, 40);
    for (Positions& own : held) {
      for (int64_t p = 90; p < 140; ++p) own.push_back(p);
    }
    check(held, 94, 140);
  }
}

TEST(AdaKv, BudgetOverAllRowsIsFullAndIndexesAreRefused) {
  ThreadPool pool(2);
  const KvShape s = make_shape(2, 2, 3, 16, 24);
  const Tokens t = with_rope(s, Tokens(s, 120, 51));
  auto full = make_session(s, full_f32(), 512, pool);
  feed_prompt(*full, t, 0, 100, 33);
  const auto want = decode_token(*full, t, 100);
  for (const char* keep : {"keep=adakv(budget=100)", "keep=adakv(scorer=expected,keep_ratio=1)",
                           "keep=expected_attention(budget=200)", "keep=adakv(budget=100,mode=min)"}) {
    auto session = open(s, keep, pool);
    feed_prompt(*session, t, 0, 100, 33);
    EXPECT_EQ(decode_token(*session, t, 100), want) << keep;
  }
  const auto refused = parse_recipe("adakv+quest");
  EXPECT_NE(refused.status().message().find("keep=snapkv"), std::string::npos) << refused.status().message();
  // The scorer brings its own published values, and the canonical string keeps them.
  const Recipe expected = parse_recipe("adakv:scorer=expected,budget=512").value();
  EXPECT_EQ(expected.keep.sink, 4);
  EXPECT_EQ(expected.keep.epsilon, 0.01);
  EXPECT_EQ(parse_recipe(expected.canonical()).value(), expected) << expected.canonical();
}

}  // namespace
}  // namespace longkv::test
