// Samples, means and weighted partials against their definitions; estimators by Monte Carlo with stated confidence.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>

#include "kv/codec/codec.h"
#include "kv/layout.h"
#include "kv/tail/sample.h"
#include "kv/tail/value_means.h"
#include "kv/tail/weighted.h"

namespace longkv::test {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

std::vector<float> normal(int64_t n, uint64_t seed, float scale = 1.0f) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> d(0.0f, scale);
  std::vector<float> v(static_cast<size_t>(n));
  for (float& x : v) x = d(engine);
  return v;
}

struct Rows {
  Rows(int64_t n, int dim, uint64_t seed) : k(normal(n * dim, seed)), v(normal(n * dim, seed + 1)) {
    view.k_type = view.v_type = KvType::kF32;
    view.dim_k = view.dim_v = dim;
    view.k = reinterpret_cast<const uint8_t*>(k.data());
    view.v = reinterpret_cast<const uint8_t*>(v.data());
    view.k_stride = view.v_stride = int64_t(dim) * 4;
    view.rows = n;
  }
  std::vector<float> k, v;
  KvHeadView view;
};

TEST(Sample, OrderIsAPermutationThatItsKeyDecides) {
  for (const int64_t n : {1, 2, 3, 17, 64, 1000}) {
    std::vector<int64_t> first, second;
    const SampleOrder a(sample_key(1, 2, 3, 4), n), b(sample_key(1, 2, 3, 5), n);
    for (int64_t i = 0; i < n; ++i) {
      first.push_back(a.at(i));
      second.push_back(b.at(i));
      EXPECT_EQ(SampleOrder(sample_key(1, 2, 3, 4), n).at(i), first.back());
    }
    EXPECT_TRUE(n < 17 || first != second);
    for (auto* order : {&first, &second}) {
      std::sort(order->begin(), order->end());
      for (int64_t i = 0; i < n; ++i) ASSERT_EQ((*order)[size_t(i)], i);
    }
  }
}

TEST(Sample, RowsAreUniform) {
  // 20000 samples of 7 of 60 rows in three ranges: every row's count is binomial; five standard deviations on each of
  // 60 rows fail once in 30000 runs, and the keys are fixed.
  const std::vector<RowRange> ranges = {{5, 20}, {100, 130}, {131, 146}};
  std::vector<int64_t> counts(200, 0), scratch;
  std::vector<RowRange> out;
  const int trials = 20000;
  for (int i = 0; i < trials; ++i) {
    sample_ranges(ranges, SampleOrder(sample_key(9, 0, 0, i), 60), 7, scratch, out);
    ASSERT_EQ(count_rows(out), 7);
    ASSERT_TRUE(ranges_valid(out, {0, 200}));
    for (const RowRange& r : out) {
      for (int64_t row = r.begin; row < r.end; ++row) ++counts[size_t(row)];
    }
  }
  const double p = 7.0 / 60, deviation = std::sqrt(trials * p * (1 - p));
  for (int64_t row = 0; row < 200; ++row) {
    const bool in = (row >= 5 && row < 20) || (row >= 100 && row < 130) || (row >= 131 && row < 146);
    EXPECT_NEAR(double(counts[size_t(row)]), in ? trials * p : 0, in ? 5 * deviation : 0.0) << row;
  }
}

TEST(Sample, OtherRowsAreTheComplement) {
  std::vector<RowRange> out;
  const std::vector<RowRange> some = {{0, 4}, {7, 9}, {20, 30}};
  other_rows(some, {0, 30}, out);
  EXPECT_EQ(out, (std::vector<RowRange>{{4, 7}, {9, 20}}));
  other_rows(some, {2, 40}, out);
  EXPECT_EQ(out, (std::vector<RowRange>{{4, 7}, {9, 20}, {30, 40}}));
  other_rows({}, {3, 5}, out);
  EXPECT_EQ(out, (std::vector<RowRange>{{3, 5}}));
  other_rows(std::vector<RowRange>{{0, 10}}, {0, 10}, out);
  EXPECT_TRUE(out.empty());
}

TEST(Sample, NormalQuantile) {
  EXPECT_NEAR(normal_quantile(0.975), 1.959963985, 1e-8);
  EXPECT_NEAR(normal_quantile(0.5), 0.0, 1e-12);
  EXPECT_NEAR(normal_quantile(0.001), -3.090232306, 1e-8);
}

struct Truth {
  double denominator = 0;
  std::vector<double> numerator;
};

Truth softmax_sums(const Rows& rows, const std::vector<float>& q, double scale, RowRange range) {
  const int dim = rows.view.dim_k;
  Truth t{0, std::vector<double>(size_t(dim), 0.0)};
  for (int64_t r = range.begin; r < range.end; ++r) {
    double logit = 0;
    for (int c = 0; c < dim; ++c) logit += scale * q[size_t(c)] * rows.k[size_t(r * dim + c)];
    const double w = std::exp(logit);
    t.denominator += w;
    for (int c = 0; c < dim; ++c) t.numerator[size_t(c)] += w * rows.v[size_t(r * dim + c)];
  }
  return t;
}

// Numerator and denominator of a partial over a sample, weighted by one over its rate.
TEST(Sample, EstimatesAreUnbiasedAndKeepTheirPromisedError) {
  const int dim = 16;
  const int64_t n = 600;
  const Rows rows(n, dim, 5);
  const auto q = normal(dim, 6, 1.5f);
  const double scale = 0.25;
  const AttendParams params{float(scale), 0.0f};
  const Truth truth = softmax_sums(rows, q, scale, {0, n}), read = softmax_sums(rows, q, scale, {0, 40});
  std::vector<float> out(static_cast<size_t>(dim)), head_out(static_cast<size_t>(dim));
  for (int c = 0; c < dim; ++c) head_out[size_t(c)] = float(read.numerator[size_t(c)] / read.denominator);
  const float head_lse = float(std::log(read.denominator));
  const std::vector<RowRange> rest = {{40, n}};
  std::vector<int64_t> scratch;
  std::vector<RowRange> picked;
  const int trials = 1500;
  double sum_d = 0, sum_d2 = 0;
  int missed = 0;
  std::vector<double> sum_n(size_t(dim), 0.0), sum_n2(size_t(dim), 0.0);
  for (int i = 0; i < trials; ++i) {
    const SampleOrder order(sample_key(7, 0, 0, i), n - 40);
    sample_ranges(rest, order, 48, scratch, picked);
    std::vector<int64_t> ids;
    std::vector<float> logits, values;
    const auto take = [&] {
      ids.clear();
      for (const RowRange& r : picked) {
        for (int64_t row = r.begin; row < r.end; ++row) ids.push_back(row);
      }
    };
    take();
    for (const int64_t row : ids) {
      double logit = 0;
      for (int c = 0; c < dim; ++c) logit += scale * q[size_t(c)] * rows.k[size_t(row * dim + c)];
      logits.push_back(float(logit));
      values.insert(values.end(), rows.v.begin() + row * dim, rows.v.begin() + (row + 1) * dim);
    }
    // Unbiased at a fixed size.
    float lse = 0;
    attend_weighted(rows.view, q.data(), params, ids, std::vector<float>(ids.size(), float(std::log((n - 40) / 48.0))),
                    out.data(), &lse);
    const double d = std::exp(double(lse));
    sum_d += d;
    sum_d2 += d * d;
    for (int c = 0; c < dim; ++c) {
      const double x = d * out[size_t(c)];
      sum_n[size_t(c)] += x;
      sum_n2[size_t(c)] += x * x;
    }
    // The size for 10% at 90%.
    const int64_t size =
        sample_size(logits.data(), values.data(), 48, dim, n - 40, head_out.data(), head_lse, 0.1, 0.1);
    ASSERT_GE(size, 48);
    ASSERT_LE(size, n - 40);
    sample_ranges(rest, order, size, scratch, picked);
    take();
    attend_weighted(rows.view, q.data(), params, ids,
                    std::vector<float>(ids.size(), float(std::log(double(n - 40) / double(size)))), out.data(), &lse);
    const double total = std::exp(double(lse)) + read.denominator;
    double error2 = 0, size2 = 0;
    for (int c = 0; c < dim; ++c) {
      const double x = std::exp(double(lse)) * out[size_t(c)] + read.numerator[size_t(c)];
      error2 += std::pow(x - truth.numerator[size_t(c)], 2);
      size2 += std::pow(truth.numerator[size_t(c)], 2);
    }
    missed += std::abs(total / truth.denominator - 1) > 0.1 || error2 > 0.01 * size2 ? 1 : 0;
  }
  // Means within 4.5 standard errors: 17 tests, a false alarm once in 8000 runs, and the seeds are fixed.
  const double true_d = truth.denominator - read.denominator;
  const auto error_of_mean = [&](double s, double s2) {
    return std::sqrt(std::max(0.0, s2 / trials - s / trials * s / trials) / trials);
  };
  EXPECT_NEAR(sum_d / trials, true_d, 4.5 * error_of_mean(sum_d, sum_d2));
  for (int c = 0; c < dim; ++c) {
    EXPECT_NEAR(sum_n[size_t(c)] / trials, truth.numerator[size_t(c)] - read.numerator[size_t(c)],
                4.5 * error_of_mean(sum_n[size_t(c)], sum_n2[size_t(c)]));
  }
  // Promised: at most 10% miss. The base sample's variance is an estimate itself, which costs a little.
  EXPECT_LT(missed, trials * 0.12);
}

TEST(Sample, SizesGrowWithTheErrorThatIsAllowed) {
  const int64_t base = 50;
  const auto logits = normal(base, 8), values = normal(base * 4, 9);
  const std::vector<float> out(4, 1.0f);
  int64_t before = INT64_MAX;
  for (const double epsilon : {0.01, 0.05, 0.2, 1.0}) {
    const int64_t size = sample_size(logits.data(), values.data(), base, 4, 100000, out.data(), 3.0f, epsilon, 0.05);
    EXPECT_LE(size, before);
    before = size;
  }
  EXPECT_EQ(sample_size(logits.data(), values.data(), base, 4, 100000, out.data(), 3.0f, 0.0, 0.05), base);
  // Equal rows: nothing varies, the base sample is enough.
  const std::vector<float> same(50, 1.0f), ones(200, 1.0f);
  EXPECT_EQ(sample_size(same.data(), ones.data(), base, 4, 100000, out.data(), 3.0f, 0.01, 0.05), base);
  // Nothing read and weights of zero: no bound can be formed, and nothing fails.
  const std::vector<float> none(50, kNone);
  EXPECT_EQ(sample_size(none.data(), ones.data(), base, 4, 100000, out.data(), kNone, 0.01, 0.05), base);
}

TEST(Weighted, EqualsTheSoftmaxWithWeights) {
  const int dim = 20;
  const Rows rows(90, dim, 11);
  const auto q = normal(dim, 12);
  const std::vector<int64_t> ids = {0, 3, 4, 50, 89};
  const std::vector<float> weights = {0.0f, 1.0f, -2.0f, 3.0f, 0.5f};
  for (const float softcap : {0.0f, 2.0f}) {
    std::vector<float> out(static_cast<size_t>(dim));
    float lse = 0;
    attend_weighted(rows.view, q.data(), {0.3f, softcap}, ids, weights, out.data(), &lse);
    double total = 0;
    std::vector<double> want(size_t(dim), 0.0);
    for (size_t i = 0; i < ids.size(); ++i) {
      double logit = 0;
      for (int c = 0; c < dim; ++c) logit += 0.3 * q[size_t(c)] * rows.k[size_t(ids[i] * dim + c)];
      if (softcap > 0) logit = softcap * std::tanh(logit / softcap);
      const double w = std::exp(logit + weights[i]);
      total += w;
      for (int c = 0; c < dim; ++c) want[size_t(c)] += w * rows.v[size_t(ids[i] * dim + c)];
    }
    EXPECT_NEAR(lse, std::log(total), 1e-5);
    for (int c = 0; c < dim; ++c) EXPECT_NEAR(out[size_t(c)], want[size_t(c)] / total, 1e-5);
  }
  std::vector<float> out(size_t(dim), 7.0f);
  float lse = 0;
  attend_weighted(rows.view, q.data(), {0.3f, 0.0f}, {}, {}, out.data(), &lse);
  EXPECT_EQ(lse, kNone);
  EXPECT_EQ(out, std::vector<float>(size_t(dim), 0.0f));
  std::vector<float> kept(size_t(dim), 2.0f);
  merge_into(kept.data(), 1.0f, out.data(), lse, dim);
  EXPECT_EQ(kept, std::vector<float>(size_t(dim), 2.0f));
}

TEST(ValueMeans, AnyHistoryEqualsOneMadeAtOnce) {
  const int dim = 12;
  const int64_t n = 3 * ValueMeans::kStride + 50;
  const Rows rows(n, dim, 21);
  KvShape shape;
  shape.layers = shape.kv_heads = shape.group_size = 1;
  shape.dim_k = shape.dim_v = dim;
  for (const int64_t cut : {int64_t{0}, int64_t{5}, ValueMeans::kStride - 1, ValueMeans::kStride,
                            ValueMeans::kStride + 1, 3 * ValueMeans::kStride, n - 1, n}) {
    ValueMeans once(shape), history(shape), longer(shape);
    once.append(0, rows.view, 0, cut);
    history.append(0, rows.view, 0, 1000);
    history.append(0, rows.view, 1000, n);
    history.truncate(0, rows.view, cut);
    std::vector<float> a(static_cast<size_t>(dim)), b(a);
    once.mean(0, a.data());
    history.mean(0, b.data());
    EXPECT_EQ(a, b) << cut;
    for (int c = 0; c < dim; ++c) {
      double want = 0;
      for (int64_t r = 0; r < cut; ++r) want += rows.v[size_t(r * dim + c)] / double(cut);
      EXPECT_NEAR(a[size_t(c)], want, 1e-6);
    }
    history.append(0, rows.view, cut, n);
    longer.append(0, rows.view, 0, n);
    history.mean(0, b.data());
    longer.mean(0, a.data());
    EXPECT_EQ(a, b) << cut;
  }
}

}  // namespace
}  // namespace longkv::test
