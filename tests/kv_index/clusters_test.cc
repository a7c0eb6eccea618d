// Clusters against their definition: a partition of the rows, centroids as means, estimates by the formula.
#include "kv/index/clusters.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "kv_index/harness.h"

namespace longkv::test {
namespace {

// Keys in a few tight directions, so that a good clustering exists; V equals K in this harness.
Keys bundled(int64_t n, int dim, uint64_t seed) {
  Keys keys(KvType::kF32, n, dim, seed);
  for (int64_t r = 0; r < n; ++r) {
    const auto noise = keys.row(r);
    const auto centre = normal_values(dim, 7000 + uint64_t(r * 7919 % 23));
    std::vector<float> k(static_cast<size_t>(dim));
    for (int c = 0; c < dim; ++c) k[size_t(c)] = 3.0f * centre[size_t(c)] + 0.3f * float(noise[size_t(c)]);
    keys.set_row(r, k);
  }
  return keys;
}

IndexSpec spec_of(int64_t skip, int64_t keep) {
  IndexSpec spec{.kind = IndexKind::kClusters, .block = 1, .cluster = 16, .segment = 512};
  spec.skip_rows = skip;
  spec.keep_rows = keep;
  return spec;
}

void check_partition(const ClusterIndex& index, const Keys& keys, int64_t skip) {
  std::vector<int> seen(size_t(keys.rows), 0);
  const int64_t clusters = index.blocks(0);
  const auto q = normal_values(keys.dim, 97);
  const auto s = scores_of(index, 0, q, 1, 0, clusters);
  for (int64_t k = 0; k < clusters; ++k) {
    const auto members = index.members(0, k);
    EXPECT_TRUE(std::is_sorted(members.begin(), members.end()));
    if (members.empty()) {
      EXPECT_EQ(s[size_t(k)], -INFINITY);
      continue;
    }
    double want = 0;
    for (const int32_t row : members) {
      ++seen[size_t(row)];
      const auto key = keys.row(row);
      for (int c = 0; c < keys.dim; ++c) want += double(q[size_t(c)]) * key[size_t(c)] / double(members.size());
    }
    ASSERT_NEAR(s[size_t(k)], want, 1e-3) << k;
  }
  for (int64_t r = 0; r < keys.rows; ++r) EXPECT_EQ(seen[size_t(r)], r >= skip && r < index.covered(0) ? 1 : 0) << r;
}

TEST(Clusters, PartitionTheRowsBetweenSinksAndWindow) {
  for (const int64_t n : {int64_t{1}, int64_t{20}, int64_t{84}, int64_t{700}, int64_t{1400}}) {
    const Keys keys = bundled(n, 24, 98);
    ClusterIndex index(spec_of(4, 64), index_shape(1, 1, 24));
    index.append(0, keys.view(n), 0, n);
    EXPECT_EQ(index.covered(0), 4);
    index.finish_prompt(0, keys.view(n));
    EXPECT_LE(index.covered(0), std::max<int64_t>(4, n - 64));
    EXPECT_GE(index.covered(0), std::min<int64_t>(std::max<int64_t>(4, n - 64 - 15), n));
    check_partition(index, keys, 4);
  }
}

TEST(Clusters, FindBundlesOfKeys) {
  const int64_t n = 1100;
  const Keys keys = bundled(n, 24, 99);
  ClusterIndex index(spec_of(0, 1), index_shape(1, 1, 24));
  index.append(0, keys.view(n), 0, n);
  index.finish_prompt(0, keys.view(n));
  // The spread inside of clusters is a small part of the whole.
  double inside = 0, all = 0;
  std::vector<double> mean(24, 0.0);
  for (int64_t r = 0; r < n; ++r) {
    for (int c = 0; c < 24; ++c) mean[size_t(c)] += keys.row(r)[size_t(c)] / double(n);
  }
  for (int64_t k = 0; k < index.blocks(0); ++k) {
    std::vector<double> centre(24, 0.0);
    const auto members = index.members(0, k);
    for (const int32_t row : members) {
      for (int c = 0; c < 24; ++c) centre[size_t(c)] += keys.row(row)[size_t(c)] / double(members.size());
    }
    for (const int32_t row : members) {
      for (int c = 0; c < 24; ++c) {
        inside += std::pow(keys.row(row)[size_t(c)] - centre[size_t(c)], 2);
        all += std::pow(keys.row(row)[size_t(c)] - mean[size_t(c)], 2);
      }
    }
  }
  EXPECT_LT(inside, 0.1 * all);
}

TEST(Clusters, EstimateIsTheSoftmaxWithKeysAtTheirCentroid) {
  const int64_t n = 500;
  const int dim = 24;
  const Keys keys = bundled(n, dim, 100);
  ClusterIndex index(spec_of(0, 1), index_shape(1, 1, dim));
  index.append(0, keys.view(n), 0, n);
  index.finish_prompt(0, keys.view(n));
  const auto q = normal_values(dim, 101);
  std::vector<int64_t> some;
  for (int64_t k = 1; k < index.blocks(0); k += 2) some.push_back(k);
  std::vector<float> out(static_cast<size_t>(dim));
  float lse = 0;
  const double scale = 0.2;
  index.estimate(0, q.data(), float(scale), some, out.data(), &lse);
  double total = 0;
  std::vector<double> want(static_cast<size_t>(dim));
  for (const int64_t k : some) {
    const auto members = index.members(0, k);
    std::vector<double> values(static_cast<size_t>(dim));
    double logit = 0;
    for (const int32_t row : members) {
      for (int c = 0; c < dim; ++c) {
        values[size_t(c)] += keys.row(row)[size_t(c)];
        logit += scale * q[size_t(c)] * keys.row(row)[size_t(c)] / double(members.size());
      }
    }
    total += double(members.size()) * std::exp(logit);
    for (int c = 0; c < dim; ++c) want[size_t(c)] += std::exp(logit) * values[size_t(c)];
  }
  EXPECT_NEAR(lse, std::log(total), 1e-4);
  for (int c = 0; c < dim; ++c) EXPECT_NEAR(out[size_t(c)], want[size_t(c)] / total, 1e-3);
  index.estimate(0, q.data(), float(scale), {}, out.data(), &lse);
  EXPECT_EQ(lse, -INFINITY);
  EXPECT_EQ(out, std::vector<float>(size_t(dim), 0.0f));
}

TEST(Clusters, GrowWhileDecodingAndFollowCuts) {
  const int64_t n = 2500, prompt = 900;
  const Keys keys = bundled(n, 24, 102);
  ClusterIndex index(spec_of(4, 64), index_shape(1, 1, 24)), other(spec_of(4, 64), index_shape(1, 1, 24));
  for (ClusterIndex* i : {&index, &other}) {
    i->append(0, keys.view(prompt), 0, prompt);
    i->finish_prompt(0, keys.view(prompt));
  }
  for (int64_t r = prompt; r < n; ++r) index.append(0, keys.view(r + 1), r, r + 1);
  EXPECT_GE(index.covered(0), n - 64 - ClusterIndex::kGather);
  check_partition(index, keys, 4);
  // Cut into the rows clustered last and grown again: the same as before.
  const auto q = normal_values(24, 103);
  const auto want = scores_of(index, 0, q, 1, 0, index.blocks(0));
  const int64_t covered = index.covered(0);
  index.truncate(0, keys.view(covered - 3), covered - 3);
  EXPECT_LT(index.covered(0), covered - 3);
  for (int64_t r = covered - 3; r < n; ++r) index.append(0, keys.view(r + 1), r, r + 1);
  EXPECT_EQ(scores_of(index, 0, q, 1, 0, index.blocks(0)), want);
  index.truncate(0, keys.view(0), 0);
  EXPECT_EQ(index.blocks(0), 0);
  index.append(0, keys.view(prompt), 0, prompt);
  index.finish_prompt(0, keys.view(prompt));
  EXPECT_EQ(scores_of(index, 0, q, 1, 0, index.blocks(0)), scores_of(other, 0, q, 1, 0, other.blocks(0)));
}

}  // namespace
}  // namespace longkv::test
