#include "train/channel_counts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "train/channel_quadratic.h"

namespace longkv {
namespace {

MaskShape shape_of(int layers, int kv_heads, int dim) {
  return {layers, kv_heads, dim, dim, std::vector<bool>(size_t(layers), true), {}};
}

TEST(ChannelCounts, ThresholdRoundsToTheNearestMultiple) {
  const MaskShape shape = shape_of(1, 3, 64);
  // 40 large alphas in head 0, 20 in head 1, 4 in head 2: 64 of 192 are kept, a third.
  std::vector<float> alpha(192, 0.1f);
  std::fill_n(alpha.begin(), 40, 0.9f);
  std::fill_n(alpha.begin() + 64, 20, 0.9f);
  std::fill_n(alpha.begin() + 128, 4, 0.9f);
  EXPECT_EQ(counts_by_threshold(shape, alpha, 2.0 / 3, 16), (ChannelCounts{48, 16, 0}));
  EXPECT_EQ(counts_by_threshold(shape, alpha, 2.0 / 3, 32), (ChannelCounts{32, 32, 0}));
}

TEST(ChannelCounts, TiesAtZeroDoNotKeepEverything) {
  const MaskShape shape = shape_of(2, 2, 32);
  std::vector<float> alpha(128, 0.0f);  // nine tenths exactly 0, where a quantile would be 0 as well
  std::fill_n(alpha.begin(), 12, 1.0f);
  const ChannelCounts counts = counts_by_threshold(shape, alpha, 0.75, 16);
  EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), int64_t{0}), 32);
}

TEST(ChannelCounts, LayersWithoutOldRowsAreLeftOut) {
  MaskShape shape = shape_of(2, 1, 32);
  shape.learns[0] = false;
  std::vector<float> alpha(64, 0.5f);
  const ChannelCounts counts = counts_by_threshold(shape, alpha, 0.5, 16);
  EXPECT_EQ(counts, (ChannelCounts{0, 16}));
  const std::vector<float> mask = largest_channels(shape, alpha, counts);
  EXPECT_EQ(std::accumulate(mask.begin(), mask.begin() + 32, 0.0f), 32.0f);
  EXPECT_EQ(std::accumulate(mask.begin() + 32, mask.end(), 0.0f), 16.0f);
  EXPECT_DOUBLE_EQ(share_kept(shape, counts), 0.5);
  EXPECT_DOUBLE_EQ(share_of_bytes(shape, counts), 0.75);
}

// The best of all counts within the budget, tried one by one.
double best_loss(const MaskShape& shape, const std::vector<double>& loss, double share, int64_t align) {
  const int64_t levels = shape.dim_k / align + 1, heads = shape.heads();
  const double budget = share * double(heads * (shape.dim_k + shape.dim_v));
  double best = INFINITY;
  std::vector<int64_t> level(size_t(heads), 0);
  while (true) {
    double sum = 0, bytes = 0;
    for (int64_t h = 0; h < heads; ++h) {
      sum += loss[size_t(h * levels + level[size_t(h)])];
      bytes += level[size_t(h)] == 0 ? 0 : double(level[size_t(h)] * align + shape.dim_v);
    }
    if (bytes <= budget) best = std::min(best, sum);
    int64_t at = 0;
    while (at < heads && ++level[size_t(at)] == levels) level[size_t(at++)] = 0;
    if (at == heads) return best;
  }
}

TEST(ChannelCounts, BytesGoWhereTheySaveMost) {
  MaskShape shape = shape_of(1, 4, 64);
  std::mt19937 rng(5);
  for (int trial = 0; trial < 80; ++trial) {
    shape.dim_v = trial < 40 ? 64 : 0;  // 0: V costs nothing
    std::vector<double> loss;
    for (int h = 0; h < 4; ++h) {
      // Falling curves that end in 0.
      std::vector<double> curve{0};
      for (int i = 0; i < 4; ++i) curve.push_back(curve.back() + double(rng() % 1000) / 1000.0);
      loss.insert(loss.end(), curve.rbegin(), curve.rend());
    }
    const double share = 0.3 + 0.6 * double(rng() % 100) / 100.0;
    const ChannelCounts counts = counts_by_bytes(shape, loss, share, 16);
    EXPECT_LE(share_of_bytes(shape, counts), share);
    double sum = 0;
    for (int h = 0; h < 4; ++h) sum += loss[size_t(h * 5 + counts[size_t(h)] / 16)];
    EXPECT_NEAR(sum, best_loss(shape, loss, share, 16), 1e-9);
  }
  // Heads that stream get nothing, and the others what they leave.
  MaskShape streaming = shape;
  streaming.streams = {true, false, true, false};
  std::vector<double> steep;
  for (int h = 0; h < 4; ++h) steep.insert(steep.end(), {9.0, 4.0, 1.0, 0.5, 0.0});
  EXPECT_EQ(counts_by_bytes(streaming, steep, 0.5, 16), (ChannelCounts{0, 64, 0, 64}));
  const std::vector<double> flat(20, 0.0);
  EXPECT_EQ(counts_by_bytes(shape, flat, 1.0, 16), (ChannelCounts{64, 64, 64, 64}));
}

TEST(ChannelQuadratic, EliminationFollowsTheQuadraticForm) {
  constexpr int64_t kDim = 16;
  std::mt19937 rng(9);
  std::normal_distribution<double> draw;
  std::vector<double> z(size_t(kDim * 40)), e(40);
  for (double& x : z) x = draw(rng);
  for (double& x : e) x = draw(rng);
  ChannelQuadratic q{std::vector<double>(size_t(kDim * kDim)), std::vector<double>(size_t(kDim)), 0.0};
  for (int64_t t = 0; t < 40; ++t) {
    q.base += e[size_t(t)] * e[size_t(t)];
    for (int64_t a = 0; a < kDim; ++a) {
      q.linear[size_t(a)] += e[size_t(t)] * z[size_t(a * 40 + t)];
      for (int64_t b = 0; b < kDim; ++b) q.h[size_t(a * kDim + b)] += z[size_t(a * 40 + t)] * z[size_t(b * 40 + t)];
    }
  }
  std::vector<int> order;
  std::vector<bool> kept(size_t(kDim), true);
  // loss = sum over t of (e_t - sum of z_tc over dropped c)^2.
  for (size_t dropped : {0, 4, 7}) {
    const double loss = eliminate_channels(q, int64_t(dropped), kept, order);
    ASSERT_EQ(order.size(), dropped);
    double expected = 0;
    for (int64_t t = 0; t < 40; ++t) {
      double left = e[size_t(t)];
      for (int c : order) left -= z[size_t(c * 40 + t)];
      expected += left * left;
    }
    EXPECT_NEAR(loss, expected, 1e-9 * expected);
    order.clear();
    kept.assign(size_t(kDim), true);
  }
}

}  // namespace
}  // namespace longkv
