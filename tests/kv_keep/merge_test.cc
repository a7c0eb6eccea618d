// Merging: what a merge conserves, which links are taken, and the cache that results.
#include "kv/keep/merge.h"

#include <gtest/gtest.h>

#include "kv_keep/oracle.h"

namespace longkv::test {
namespace {

MergeRows random_rows(int64_t n, uint64_t seed, int64_t fixed_ends = 0) {
  std::mt19937_64 engine(seed);
  std::uniform_real_distribution<double> uniform(0.01, 1.0);
  MergeRows rows;
  for (int64_t r = 0; r < n; ++r) {
    rows.mass.push_back(uniform(engine));
    rows.weight.push_back(rows.mass.back() * uniform(engine));
    rows.bias.push_back(0);
    rows.count.push_back(1);
    rows.pos.push_back(r);
    rows.fixed.push_back(r < fixed_ends || r >= n - fixed_ends ? 1 : 0);
  }
  return rows;
}

// One head.
void merge_links(const KeepSpec& spec, int64_t budget, MergeRows& rows, std::vector<int64_t>& kept,
                 std::vector<RowMerge>& merges) {
  longkv::merge_links(spec, budget, {&rows, 1}, kept, {&merges, 1});
}

KeepSpec merging(KeepKeyWeight weight = KeepKeyWeight::kNorm, KeepBias bias = KeepBias::kEntropy) {
  KeepSpec spec = default_keep(KeepKind::kNormmass);
  spec.key_weight = weight;
  spec.link_score = KeepLinkScore::kMass;
  spec.max_count = 8;
  spec.merge_bias = bias;
  return spec;
}

TEST(MergeLinks, BudgetsAreExactAndNoTokenIsLost) {
  for (const int64_t max_count : {0, 2, 8}) {
    for (const int64_t budget : {20, 37, 99, 100, 150}) {
      KeepSpec spec = merging();
      spec.max_count = max_count;
      MergeRows rows = random_rows(100, 1, 5);
      const MergeRows before = rows;
      std::vector<int64_t> kept;
      std::vector<RowMerge> merges;
      merge_links(spec, budget, rows, kept, merges);
      ASSERT_EQ(int64_t(kept.size()), std::min<int64_t>(budget, 100));
      EXPECT_TRUE(std::is_sorted(kept.begin(), kept.end()));
      int64_t tokens = 0;
      double mass = 0;
      for (const int64_t r : kept) {
        tokens += rows.count[size_t(r)];
        mass += rows.mass[size_t(r)];
        EXPECT_LE(rows.count[size_t(r)], max_count > 0 ? max_count : 100);
      }
      for (int64_t r = 0; r < 5; ++r) EXPECT_EQ(rows.count[size_t(r)], 1) << "protected";
      for (int64_t r = 95; r < 100; ++r) EXPECT_EQ(rows.count[size_t(r)], 1) << "protected";
      if (max_count != 0) continue;  // a limit on counts leaves some to be dropped
      EXPECT_EQ(tokens, 100);
      EXPECT_NEAR(mass, std::accumulate(before.mass.begin(), before.mass.end(), 0.0), 1e-12);
    }
  }
}

TEST(MergeLinks, LeastLinksFirstAndDisjoint) {
  MergeRows rows = random_rows(12, 2);
  rows.mass = {5, 1, 1, 1, 9, 9, 2, 9, 9, 9, 9, 3};
  std::vector<int64_t> kept;
  std::vector<RowMerge> merges;
  KeepSpec spec = merging();
  merge_links(spec, 9, rows, kept, merges);  // three links, a quarter of twelve
  ASSERT_EQ(merges.size(), 3u);
  EXPECT_EQ(merges[0].into, 1);  // 1 + 1; the link of 2 and 3 shares row 2 and must wait
  EXPECT_EQ(merges[0].from, 2);
  EXPECT_EQ(merges[1].into, 3);  // 1 + 9 shares nothing with it
  EXPECT_EQ(merges[1].from, 4);
  EXPECT_EQ(merges[2].into, 5);  // 9 + 2, of two equal ones the older
  EXPECT_EQ(merges[2].from, 6);
  EXPECT_EQ(kept, (std::vector<int64_t>{0, 1, 3, 5, 7, 8, 9, 10, 11}));
  // Where links run out rows of least mass leave.
  rows = random_rows(4, 3);
  rows.mass = {4, 1, 3, 2};
  spec.max_count = 1;
  kept.clear();
  merges.clear();
  merge_links(spec, 2, rows, kept, merges);
  EXPECT_TRUE(merges.empty());
  EXPECT_EQ(kept, (std::vector<int64_t>{0, 2}));
}

struct Row {
  double z;
  std::vector<double> v;
};

// Softmax over logits z + bias: total mass and output.
std::pair<double, std::vector<double>> attend_rows(const std::vector<Row>& rows, const std::vector<double>& bias,
                                                   const std::vector<int64_t>& kept) {
  double total = 0;
  std::vector<double> out(rows[0].v.size(), 0.0);
  for (const int64_t r : kept) {
    const double w = std::exp(rows[size_t(r)].z + bias[size_t(r)]);
    total += w;
    for (size_t c = 0; c < out.size(); ++c) out[c] += w * rows[size_t(r)].v[c];
  }
  for (double& x : out) x /= total;
  return {total, out};
}

// With keys shared by mass, values by mass and the entropy bias, mass and output of the query that gave the masses are
// unchanged, through any number of merges.
TEST(MergeLinks, EntropyBiasIsExactForItsQuery) {
  const int64_t n = 64;
  MergeRows rows = random_rows(n, 4);
  std::mt19937_64 engine(5);
  std::normal_distribution<double> normal;
  std::vector<Row> values;
  for (int64_t r = 0; r < n; ++r) {
    values.push_back({2 * normal(engine), {normal(engine), normal(engine), normal(engine)}});
    rows.mass[size_t(r)] = std::exp(values.back().z);  // not normalised: shares are the same
  }
  const auto before = attend_rows(values, rows.bias, first_tokens(n));
  KeepSpec spec = merging(KeepKeyWeight::kMass);
  spec.max_count = 0;
  std::vector<int64_t> kept;
  std::vector<RowMerge> merges;
  merge_links(spec, 9, rows, kept, merges);
  for (const RowMerge& m : merges) {
    Row& into = values[size_t(m.into)];
    const Row& from = values[size_t(m.from)];
    into.z = m.k_share * into.z + (1 - m.k_share) * from.z;  // logits of a query are linear in keys
    for (size_t c = 0; c < 3; ++c) into.v[c] = m.v_into * into.v[c] + m.v_from * from.v[c];
  }
  const auto after = attend_rows(values, rows.bias, kept);
  EXPECT_NEAR(after.first / before.first, 1.0, 1e-5);  // shares are fp32
  for (size_t c = 0; c < 3; ++c) EXPECT_NEAR(after.second[c], before.second[c], 1e-5);
}

// Count bias: exact for equal keys, and equal to a sum of values over a sum of counts.
TEST(MergeLinks, CountBiasEqualsSumsOfValues) {
  MergeRows rows = random_rows(16, 6);
  KeepSpec spec = merging(KeepKeyWeight::kMean, KeepBias::kCount);
  spec.max_count = 0;
  std::vector<double> v(16), sum(16);
  for (size_t r = 0; r < 16; ++r) v[r] = sum[r] = double(r * r);
  std::vector<int64_t> kept;
  std::vector<RowMerge> merges;
  merge_links(spec, 3, rows, kept, merges);
  for (const RowMerge& m : merges) {
    v[size_t(m.into)] = m.v_into * v[size_t(m.into)] + m.v_from * v[size_t(m.from)];
    sum[size_t(m.into)] += sum[size_t(m.from)];
  }
  double numerator = 0, biased = 0, denominator = 0;
  for (const int64_t r : kept) {
    EXPECT_NEAR(rows.bias[size_t(r)], std::log(double(rows.count[size_t(r)])), 1e-12);
    numerator += sum[size_t(r)];
    biased += std::exp(rows.bias[size_t(r)]) * v[size_t(r)];
    denominator += double(rows.count[size_t(r)]);
  }
  EXPECT_EQ(denominator, 16);
  EXPECT_NEAR(biased, numerator, 1e-4 * numerator);
}

TEST(MergeLinks, KeyShares) {
  const auto share = [](KeepKeyWeight weight, double m1, double m2, double w1, double w2, double rest) {
    MergeRows rows = random_rows(3, 7);
    rows.mass = {m1, m2, rest};
    rows.weight = {w1, w2, 0.1};
    rows.count = {1, 1, 100};  // the third row never merges first
    KeepSpec spec = merging(weight);
    spec.norms = KeepNorms::kPooled;
    spec.max_count = 2;
    std::vector<int64_t> kept;
    std::vector<RowMerge> merges;
    merge_links(spec, 2, rows, kept, merges);
    EXPECT_EQ(merges.size(), 1u);
    return double(merges.at(0).k_share);
  };
  EXPECT_NEAR(share(KeepKeyWeight::kMean, 0.1, 0.3, 0.5, 0.5, 0.6), 0.5, 1e-6);
  EXPECT_NEAR(share(KeepKeyWeight::kMass, 0.1, 0.3, 0.5, 0.5, 0.6), 0.25, 1e-6);
  EXPECT_NEAR(share(KeepKeyWeight::kNorm, 0.1, 0.3, 0.2, 0.05, 0.6), 0.8, 1e-6);
  // d1 = 2, d2 = 1: h1 = 0.1 * 0.8 * 2, h2 = 0.3 * 0.4 * 1, h12 = 0.03 * 3.
  EXPECT_NEAR(share(KeepKeyWeight::kSlimmer, 0.1, 0.3, 0.2, 0.3, 0.6), (0.16 - 0.09) / (0.16 + 0.12 - 0.18), 1e-6);
  // Half of the mass in one row: the published denominator is 0 and the share falls back to mass.
  EXPECT_NEAR(share(KeepKeyWeight::kSlimmer, 0.5, 0.25, 0.5, 0.25, 0.25), 2.0 / 3, 1e-6);
  for (const double m : {0.05, 0.2, 0.45, 0.6}) {
    const double s = share(KeepKeyWeight::kSlimmer, m, 0.3, 3 * m, 0.1, 0.7 - m);
    EXPECT_GE(s, 0.0);
    EXPECT_LE(s, 1.0);
  }
}

// Smooth keys with changing topics, as neighbouring tokens have.
Tokens smooth_tokens(const KvShape& s, int64_t n, uint64_t seed) {
  Tokens t(s, n, seed);
  const int64_t width = s.kv_heads * s.dim_k;
  for (int64_t i = 1; i < n; ++i) {
    if (i % 40 == 0) continue;
    for (int64_t c = 0; c < width; ++c) {
      float* k = t.k.data() + i * width + c;
      *k = 0.95f * *(k - width) + 0.3f * *k;
    }
  }
  for (float& k : t.k) k *= 1.5f;
  return t;
}

double error_of(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
    norm += double(b[i]) * b[i];
  }
  return std::sqrt(difference / norm);
}

TEST(MergingSession, ChunksStayInTheBudgetAndCountEveryToken) {
  ThreadPool pool(2);
  const KvShape s = make_shape(2, 2, 3, 32, 24);
  const Tokens t = smooth_tokens(s, 700, 8);
  for (const char* keep :
       {"keep=normmass(budget=80,sink=4,window=16,max_count=0)", "keep=kvslimmer(budget=80,sink=4,window=8)",
        "keep=normmass(budget=81,sink=0,window=16,max_count=0,key_weight=mass,bias=count)"}) {
    const Recipe recipe = parse_recipe(std::string(keep) + " + store=f32").value();
    auto session = make_session(s, recipe, 700, pool);
    for (int64_t begin = 0; begin < 600; begin += 60) {
      std::vector<float> out(size_t(60 * s.kv_heads * s.group_size * s.dim_v));
      ASSERT_TRUE(
          session->prefill(0, t.q_at(s, begin), t.k_at(s, begin), t.v_at(s, begin), 60, 600, out.data(), nullptr).ok());
      EXPECT_EQ(session->cache().rows(0).v, std::min<int64_t>(begin + 60, recipe.keep.budget)) << "after every chunk";
    }
    ASSERT_TRUE(session->truncate({0}).ok());
    feed_prompt(*session, t, 0, 600, 60);
    for (int h = 0; h < 2; ++h) {
      const KvHeadView head = session->cache().view(1, h);
      int64_t tokens = 0;
      for (int64_t r = 0; r < head.rows; ++r) tokens += head.count[r];
      EXPECT_EQ(tokens, 600) << keep;
      EXPECT_TRUE(std::is_sorted(head.pos, head.pos + head.rows));
    }
    // The next turn goes on from merged rows, as a new session does.
    decode_token(*session, t, 600);
    auto fresh = make_session(s, recipe, 700, pool);
    feed_prompt(*fresh, t, 0, 600, 60);
    decode_token(*fresh, t, 600);
    EXPECT_EQ(feed_prompt(*session, t, 601, 680, 40), feed_prompt(*fresh, t, 601, 680, 40));
    EXPECT_EQ(decode_token(*session, t, 680), decode_token(*fresh, t, 680));
  }
}

TEST(MergingSession, BudgetOverAllRowsIsFull) {
  ThreadPool pool(2);
  const KvShape s = make_shape(2, 2, 3, 32, 24);
  const Tokens t(s, 150, 9);
  auto full = make_session(s, full_f32(), 512, pool);
  auto merged = make_session(s, parse_recipe("normmass:budget=150+store=f32").value(), 512, pool);
  EXPECT_EQ(feed_prompt(*full, t, 0, 100, 30), feed_prompt(*merged, t, 0, 100, 30));
  EXPECT_EQ(decode_token(*full, t, 100), decode_token(*merged, t, 100));
}

TEST(MergingSession, LosesLessThanDroppingOnSmoothKeys) {
  ThreadPool pool(2);
  const KvShape s = make_shape(1, 2, 2, 32);
  const auto error = [&](const std::string& keep) {
    double sum = 0;
    for (uint64_t seed = 20; seed < 26; ++seed) {
      const Tokens t = smooth_tokens(s, 620, seed);
      auto full = make_session(s, full_f32(), 620, pool);
      auto kept = make_session(s, parse_recipe(keep + "+store=f32").value(), 620, pool);
      feed_prompt(*full, t, 0, 600, 60);
      feed_prompt(*kept, t, 0, 600, 60);
      for (int64_t i = 600; i < 620; ++i) sum += error_of(decode_token(*kept, t, i)[0], decode_token(*full, t, i)[0]);
    }
    return sum / 120;
  };
  const double merged = error("normmass:budget=120,sink=4,window=16");
  EXPECT_LT(merged, error("streaming:sink=4,window=116"));
  EXPECT_LT(merged, error("keep=random(budget=120,sink=4,window=16)"));
  EXPECT_LT(merged, error("snapkv:budget=120,window=16"));
}

}  // namespace
}  // namespace longkv::test
