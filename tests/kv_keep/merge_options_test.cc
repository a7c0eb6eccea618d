// What merging can be told: links that lose tokens, clipped counts, one choice for a layer, published weights, fitted
// biases, costs of links, shares per channel. Each against the formula written once more in double.
#include <gtest/gtest.h>

#include <numeric>

#include "kv/keep/merge.h"
#include "kv_keep/oracle.h"

namespace longkv::test {
namespace {

// A head as attention would see it: keys, values, queries, in double.
struct Head {
  int dim = 8, queries = 12;
  std::vector<std::vector<double>> k, v, q, out;  // out: of full attention
  std::vector<double> bias, lse;
  std::vector<int64_t> count;

  Head(int64_t n, uint64_t seed, int64_t most_tokens = 1) {
    std::mt19937_64 engine(seed);
    std::normal_distribution<double> normal;
    const auto row = [&](double size) {
      std::vector<double> x;
      for (int c = 0; c < dim; ++c) x.push_back(size * normal(engine));
      return x;
    };
    for (int64_t r = 0; r < n; ++r) {
      k.push_back(row(1));
      v.push_back(row(1));
      count.push_back(1 + int64_t(engine() % uint64_t(most_tokens)));
      bias.push_back(std::log(double(count.back())));
    }
    for (int t = 0; t < queries; ++t) q.push_back(row(0.8));
    attend();
  }

  double logit(size_t t, const std::vector<double>& key) const {
    return std::inner_product(q[t].begin(), q[t].end(), key.begin(), 0.0);
  }
  double mass(size_t t, size_t r) const { return std::exp(logit(t, k[r]) + bias[r] - lse[t]); }
  void attend() {
    out.assign(q.size(), std::vector<double>(size_t(dim), 0.0));
    lse.assign(q.size(), 0.0);
    for (size_t t = 0; t < q.size(); ++t) {
      double sum = 0;
      for (size_t r = 0; r < k.size(); ++r) sum += std::exp(logit(t, k[r]) + bias[r]);
      lse[t] = std::log(sum);
      for (size_t r = 0; r < k.size(); ++r) {
        for (size_t c = 0; c < size_t(dim); ++c) out[t][c] += mass(t, r) * v[r][c];
      }
    }
  }
  double distance(size_t t, const std::vector<double>& value) const {
    double sum = 0;
    for (size_t c = 0; c < size_t(dim); ++c) sum += (value[c] - out[t][c]) * (value[c] - out[t][c]);
    return std::sqrt(sum);
  }

  MergeRows rows() const {
    MergeRows rows;
    MergeSample& s = rows.sample;
    s.queries = queries;
    s.dim_v = dim;
    for (const auto& o : out) s.out_square.push_back(float(std::inner_product(o.begin(), o.end(), o.begin(), 0.0)));
    for (size_t r = 0; r < k.size(); ++r) {
      double sum = 0, weight = 0;
      for (size_t t = 0; t < q.size(); ++t) {
        sum += mass(t, r);
        weight += mass(t, r) * distance(t, v[r]);
        s.logit.push_back(float(logit(t, k[r]) - lse[t]));
        s.dot.push_back(float(std::inner_product(out[t].begin(), out[t].end(), v[r].begin(), 0.0)));
      }
      for (const double x : v[r]) s.values.push_back(float(x));
      rows.mass.push_back(sum);
      rows.weight.push_back(weight);
      rows.bias.push_back(bias[r]);
      rows.count.push_back(count[r]);
      rows.pos.push_back(int64_t(r));
      rows.fixed.push_back(0);
    }
    return rows;
  }
};

struct Outcome {
  std::vector<int64_t> kept;
  std::vector<RowMerge> merges;
};

Outcome run(const KeepSpec& spec, int64_t budget, MergeRows& rows) {
  Outcome out;
  merge_links(spec, budget, {&rows, 1}, out.kept, {&out.merges, 1});
  return out;
}

KeepSpec slimmer(KeepNorms norms) {
  KeepSpec spec = default_keep(KeepKind::kKvslimmer);
  spec.norms = norms;
  return spec;
}

std::vector<double> mix(const std::vector<double>& a, const std::vector<double>& b, double x, double y) {
  std::vector<double> out;
  for (size_t c = 0; c < a.size(); ++c) out.push_back(x * a[c] + y * b[c]);
  return out;
}

// The released choice: the K least links, each deleting its right row, whatever the others do.
TEST(MergeOptions, ChainedLinksLoseTheTokensOfARun) {
  MergeRows rows = Head(10, 1).rows();
  rows.mass = {9, 1, 1, 1, 1, 9, 9, 1, 1, 9};
  KeepSpec spec = slimmer(KeepNorms::kPooled);
  spec.links = KeepLinks::kChained;
  spec.gamma = 0;
  const Outcome found = run(spec, 6, rows);  // links 1-2, 2-3, 3-4 and 7-8
  EXPECT_EQ(found.kept, (std::vector<int64_t>{0, 1, 5, 6, 7, 9}));
  ASSERT_EQ(found.merges.size(), 2u);
  int64_t tokens = 0;
  for (const int64_t r : found.kept) tokens += rows.count[size_t(r)];
  EXPECT_EQ(tokens, 8) << "of a run of three links, two tokens are lost";
  EXPECT_EQ(rows.count[1], 2);
  EXPECT_EQ(rows.count[7], 2);
  // The same without the defect: as many rows, every token counted.
  MergeRows all = Head(10, 1).rows();
  all.mass = {9, 1, 1, 1, 1, 9, 9, 1, 1, 9};
  spec.links = KeepLinks::kDisjoint;
  const Outcome whole = run(spec, 6, all);
  EXPECT_EQ(whole.kept.size(), 6u);
  tokens = 0;
  for (const int64_t r : whole.kept) tokens += all.count[size_t(r)];
  EXPECT_EQ(tokens, 10);
}

// Values stay sums where counts are clipped, so rows say more than their mass.
TEST(MergeOptions, ClippedCountsAreSumsOverClippedMass) {
  const Head head(24, 2, 3);
  KeepSpec spec = slimmer(KeepNorms::kQuery);
  spec.clip = 5;
  MergeRows rows = head.rows();
  std::vector<std::vector<double>> v = head.v, sum = head.v;
  for (size_t r = 0; r < v.size(); ++r) sum[r] = mix(sum[r], sum[r], double(head.count[r]), 0);
  const Outcome found = run(spec, 4, rows);
  for (const RowMerge& m : found.merges) {
    v[size_t(m.into)] = mix(v[size_t(m.into)], v[size_t(m.from)], m.v_into, m.v_from);
    sum[size_t(m.into)] = mix(sum[size_t(m.into)], sum[size_t(m.from)], 1, 1);
  }
  int64_t clipped = 0;
  for (const int64_t r : found.kept) {
    const int64_t count = rows.count[size_t(r)];
    EXPECT_LE(count, 5);
    clipped += count == 5;
    EXPECT_NEAR(rows.bias[size_t(r)], std::log(double(count)), 1e-12);
    for (size_t c = 0; c < v[size_t(r)].size(); ++c) {
      EXPECT_NEAR(v[size_t(r)][c] * double(count), sum[size_t(r)][c], 1e-4);
    }
  }
  EXPECT_GT(clipped, 0);
}

TEST(MergeOptions, CountFactorAndGammaOrderLinks) {
  const auto first = [](bool factor, double gamma) {
    MergeRows rows = Head(4, 3).rows();
    rows.mass = {1, 1, 0.8, 0.8};
    rows.count = {1, 1, 4, 4};
    KeepSpec spec = slimmer(KeepNorms::kPooled);
    spec.count_factor = factor;
    spec.gamma = gamma;
    return run(spec, 3, rows).merges.at(0).into;
  };
  EXPECT_EQ(first(true, 0), 0) << "2 tokens of mass 2 before 8 of 1.6";
  EXPECT_EQ(first(false, 0), 2);
  EXPECT_EQ(first(true, 1.0), 2) << "newer links are made e^2 times lighter";
}

TEST(MergeOptions, LayerScopeMergesTheSameRowsEverywhere) {
  MergeRows heads[2] = {Head(20, 4).rows(), Head(20, 5).rows()};
  const MergeRows before[2] = {heads[0], heads[1]};
  KeepSpec spec = slimmer(KeepNorms::kPooled);
  std::vector<int64_t> kept;
  std::vector<RowMerge> merges[2];
  merge_links(spec, 19, heads, kept, merges);
  ASSERT_EQ(merges[0].size(), 1u);
  ASSERT_EQ(merges[1].size(), 1u);
  EXPECT_EQ(merges[0][0].into, merges[1][0].into);
  EXPECT_NE(merges[0][0].k_share, merges[1][0].k_share) << "weights stay those of the head";
  double least = INFINITY;
  size_t best = 0;
  for (size_t r = 0; r + 1 < 20; ++r) {
    double mass = 0;
    for (const MergeRows& h : before) mass += h.mass[r] + h.mass[r + 1];
    mass *= 4 * std::exp(-double(r) / spec.gamma);
    if (mass < least) best = r;
    least = std::min(least, mass);
  }
  EXPECT_EQ(merges[0][0].into, int64_t(best));
}

TEST(MergeOptions, SlimmerNormsPerQuery) {
  for (uint64_t seed = 10; seed < 20; ++seed) {
    const Head head(6, seed, 2);
    MergeRows rows = head.rows();
    const Outcome found = run(slimmer(KeepNorms::kQuery), 5, rows);
    const auto a = size_t(found.merges.at(0).into), b = size_t(found.merges.at(0).from);
    double x = 0, y = 0;
    for (size_t t = 0; t < head.q.size(); ++t) {
      const double a1 = head.mass(t, a), a2 = head.mass(t, b);
      const std::vector<double> both = mix(head.v[a], head.v[b], 0.5, 0.5);
      const double cross = a1 * a2 * 2 * head.distance(t, both);  // |v1 + v2 - 2 o|
      x += a1 * std::abs(1 - 2 * a1) * head.distance(t, head.v[a]) - cross;
      y += a2 * std::abs(1 - 2 * a2) * head.distance(t, head.v[b]) - cross;
    }
    const double p = rows.mass[a] > 0 ? head.rows().mass[a] / (head.rows().mass[a] + head.rows().mass[b]) : 0;
    const double expected = x + y < 1e-12 ? p : std::clamp(x / (x + y), 0.0, 1.0);
    EXPECT_NEAR(found.merges[0].k_share, expected, 1e-4) << seed;
  }
}

TEST(MergeOptions, ReleasedWeightsAreNotClamped) {
  MergeRows rows = Head(4, 6).rows();
  rows.mass = {0.30, 0.25, 0.25, 0.20};
  rows.weight = {0.02, 0.30, 0.25, 0.10};  // h
  KeepSpec spec = slimmer(KeepNorms::kRelease);
  spec.gamma = 0;
  const Outcome found = run(spec, 3, rows);  // rows 2 and 3
  ASSERT_EQ(found.merges.at(0).into, 2);
  const double a1 = 0.25, a2 = 0.20, h1 = 0.25, h2 = 0.10;
  const double d1 = h1 / (a1 * (1 - 2 * a1)), d2 = h2 / (a2 * (1 - 2 * a2)), cross = a1 * a2 * (d1 + d2);
  const double share = (h1 - cross) / (h1 + h2 - 2 * cross);
  EXPECT_GT(share, 1.0);
  EXPECT_NEAR(found.merges[0].k_share, share, 1e-5);
  EXPECT_NEAR(rows.weight[2], share * share * h1 + (1 - share) * (1 - share) * h2, 1e-9);
}

// The release's denominators vanish at half of the mass: costs of such links are no numbers, and the order still holds.
TEST(MergeOptions, CostsThatAreNoNumbersComeLast) {
  for (uint64_t seed = 60; seed < 64; ++seed) {
    MergeRows rows = Head(12, seed).rows();
    std::fill(rows.mass.begin(), rows.mass.end(), 0.0);
    rows.mass[3] = rows.mass[7] = 1.0;
    rows.weight[3] = rows.weight[4] = 1e300;
    KeepSpec spec = slimmer(KeepNorms::kRelease);
    spec.link_score = KeepLinkScore::kCost;
    spec.sink = spec.window = 0;
    const Outcome found = run(spec, 9, rows);
    EXPECT_EQ(found.kept.size(), 9u);
    for (const RowMerge& m : found.merges) EXPECT_TRUE(std::isfinite(m.k_share)) << "seed " << seed;
  }
}

// A row's count is kept in 16 bits: links beyond are left out, so no count is ever too small.
TEST(MergeOptions, CountsStayWithinTheirBits) {
  MergeRows rows = Head(6, 9).rows();
  rows.count = {40000, 30000, 1, 1, 1, 1};
  rows.mass = {1e-9, 1e-9, 1, 1, 1, 1};  // the least link by far would stand for 70,000 tokens
  const Outcome found = run(slimmer(KeepNorms::kPooled), 4, rows);
  EXPECT_EQ(found.kept.size(), 4u);
  ASSERT_EQ(found.merges.size(), 2u);
  for (const int64_t r : found.kept) EXPECT_LE(rows.count[size_t(r)], 65535);
  for (const RowMerge& m : found.merges) EXPECT_FALSE(m.into == 0 && m.from == 1);
}

// The fitted bias gives the sampled queries, together, the mass of both rows, through any number of merges.
TEST(MergeOptions, FittedBiasKeepsTheMassOfTheSample) {
  Head head(30, 7);
  MergeRows rows = head.rows();
  const MergeRows before = rows;
  KeepSpec spec = default_keep(KeepKind::kNormmass);
  spec.merge_bias = KeepBias::kFit;
  spec.max_count = 0;
  const Outcome found = run(spec, 20, rows);
  std::vector<double> wanted = before.mass;
  for (const RowMerge& m : found.merges) {
    head.k[size_t(m.into)] = mix(head.k[size_t(m.into)], head.k[size_t(m.from)], m.k_share, 1 - m.k_share);
    head.bias[size_t(m.into)] = m.bias;
    wanted[size_t(m.into)] += wanted[size_t(m.from)];
  }
  int64_t checked = 0;
  for (const int64_t r : found.kept) {
    double mass = 0;
    for (size_t t = 0; t < head.q.size(); ++t) mass += head.mass(t, size_t(r));
    const bool clipped =
        rows.bias[size_t(r)] > std::log(double(rows.count[size_t(r)])) + 1.999 || rows.bias[size_t(r)] < -1.999;
    if (rows.count[size_t(r)] == 1 || clipped) continue;
    EXPECT_NEAR(mass / wanted[size_t(r)], 1.0, 1e-4) << r;
    ++checked;
  }
  EXPECT_GT(checked, 3);
}

// The link taken first is the one whose merge changes the sampled outputs least, by trying all of them.
TEST(MergeOptions, CostIsThePredictedChangeOfOutputs) {
  for (const KeepBias bias : {KeepBias::kEntropy, KeepBias::kFit, KeepBias::kCount}) {
    for (uint64_t seed = 30; seed < 36; ++seed) {
      const Head head(9, seed);
      KeepSpec spec = default_keep(KeepKind::kNormmass);
      spec.link_score = KeepLinkScore::kCost;
      spec.merge_bias = bias;
      spec.sink = spec.window = 0;
      MergeRows rows = head.rows();
      const Outcome found = run(spec, 8, rows);
      double least = INFINITY, second = INFINITY;
      size_t best = 0;
      for (size_t a = 0; a + 1 < 9; ++a) {
        // What merging this pair alone would be.
        MergeRows pair = head.rows();
        for (size_t r = 0; r < 9; ++r) pair.fixed[r] = r != a && r != a + 1;
        const RowMerge m = run(spec, 8, pair).merges.at(0);
        const std::vector<double> key = mix(head.k[a], head.k[a + 1], m.k_share, 1 - m.k_share);
        const std::vector<double> value = mix(head.v[a], head.v[a + 1], m.v_into, m.v_from);
        double cost = 0;
        for (size_t t = 0; t < head.q.size(); ++t) {
          // To first order in the change of masses: old masses elsewhere, old output as the centre.
          const double mass = std::exp(head.logit(t, key) + m.bias - head.lse[t]);
          for (size_t c = 0; c < size_t(head.dim); ++c) {
            const double now = mass * (value[c] - head.out[t][c]);
            const double was = head.mass(t, a) * (head.v[a][c] - head.out[t][c]) +
                               head.mass(t, a + 1) * (head.v[a + 1][c] - head.out[t][c]);
            cost += (now - was) * (now - was);
          }
        }
        if (cost < least) {
          second = least;
          least = cost;
          best = a;
        } else {
          second = std::min(second, cost);
        }
      }
      if (second < 1.001 * least) continue;
      EXPECT_EQ(found.merges.at(0).into, int64_t(best)) << "seed " << seed << " bias " << int(bias);
    }
  }
}

TEST(MergeOptions, GradientsShareChannels) {
  MergeRows rows = Head(3, 8).rows();
  rows.sample = {};
  rows.mass = {1, 1, 9};
  rows.weight = rows.mass;
  rows.gradient = {3, 0, 1, 0, 1, 0, 2, 0, 5, 5, 5, 5};  // [3][4]
  const Outcome found = run(default_keep(KeepKind::kAsymkv), 2, rows);
  ASSERT_EQ(found.merges.size(), 1u);
  const std::vector<float>& shares = found.merges[0].k_shares;
  ASSERT_EQ(shares.size(), 4u);
  EXPECT_NEAR(shares[0], 0.9, 1e-6);
  EXPECT_NEAR(shares[1], 0.5, 1e-6) << "no gradient at all: the mean";
  EXPECT_NEAR(shares[2], 0.2, 1e-6);
  EXPECT_NEAR(shares[3], 0.5, 1e-6);
  EXPECT_EQ(rows.gradient[0], 4);
  EXPECT_EQ(rows.gradient[2], 3);
  EXPECT_NEAR(rows.bias[0], std::log(2.0), 1e-12);
  EXPECT_NEAR(found.merges[0].v_into, 0.5, 1e-7);
}

}  // namespace
}  // namespace longkv::test
