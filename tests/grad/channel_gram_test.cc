// The quadratic of a mask of channels against differences of attention under masks near it.
#include "grad/channel_gram.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "grad/chunk_ops.h"

namespace longkv {
namespace {

constexpr int kHeads = 2, kGroup = 3, kDim = 24;
constexpr int64_t kRows = 70, kTokens = 5, kOut = 20;

std::vector<float> normal(int64_t n, uint32_t seed, float scale = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw(0.0f, scale);
  std::vector<float> v(static_cast<size_t>(n));
  for (float& x : v) x = draw(random);
  return v;
}

TEST(ChannelGram, EqualsDifferencesOfTheOutput) {
  const auto keys = normal(kHeads * kRows * kDim, 1), values = normal(kHeads * kRows * kDim, 2);
  const auto q = normal(kTokens * kHeads * kGroup * kDim, 3), k = normal(kTokens * kHeads * kDim, 4);
  const auto v = normal(kTokens * kHeads * kDim, 5), teacher = normal(int64_t(q.size()), 6);
  const auto weights = normal(kOut * kHeads * kGroup * kDim, 7, 0.2f), direction = normal(kHeads * kDim, 8);
  std::vector<float> mask = normal(kHeads * kDim, 9, 0.2f);
  for (float& x : mask) x += 0.6f;  // what holds near 0 and 1 holds between
  Weight wo;
  wo.rows = kOut;
  wo.cols = kHeads * kGroup * kDim;
  wo.row_bytes = wo.cols * 4;
  wo.data = reinterpret_cast<const uint8_t*>(weights.data());
  const std::vector<int64_t> rows = {0, 2, 4};
  std::vector<double> first;
  for (bool compensate : {false, true}) {
    for (int threads : {1, 3}) {
      ThreadPool pool(threads);
      const auto ops = make_cpu_chunk_ops(pool, ProductType::kF32);
      ChunkAttention a;
      a.kv_heads = kHeads;
      a.group = kGroup;
      a.dim_k = a.dim_v = kDim;
      a.scale = 0.2f;
      for (int h = 0; h < kHeads; ++h) {
        KvHeadView view;
        view.k = reinterpret_cast<const uint8_t*>(keys.data() + h * kRows * kDim);
        view.v = reinterpret_cast<const uint8_t*>(values.data() + h * kRows * kDim);
        view.k_stride = view.v_stride = kDim * 4;
        view.rows = kRows;
        a.prompt.push_back(view);
      }
      a.held = kRows;
      a.middle = {3, 67};
      a.compensate = compensate;
      a.tokens = kTokens;
      a.q = q.data();
      a.k = k.data();
      a.v = v.data();
      std::vector<float> mix, lse(q.size() / kDim);
      const auto outputs = [&](float step) {
        mix.assign(size_t(kHeads * kDim * kDim), 0.0f);
        for (size_t i = 0; i < mask.size(); ++i) mix[i * kDim + i % kDim] = mask[i] + step * direction[i];
        a.mix = mix.data();
        std::vector<float> out(q.size());
        EXPECT_TRUE(ops->attend(a, out.data(), lse.data()).ok());
        return out;
      };
      const float step = 0.02f;
      const std::vector<float> above = outputs(step), below = outputs(-step), out = outputs(0.0f);
      std::vector<double> grams(size_t(kHeads * (kDim + 1) * (kDim + 1)));
      const ChannelGramInputs in{mask.data(), out.data(), lse.data(), teacher.data(), &wo, rows};
      ASSERT_TRUE(ops->channel_grams(a, in, grams.data()).ok());
      for (int h = 0; h < kHeads; ++h) {
        // moved: Wo times the derivative along the direction; away: Wo times what the output lacks.
        double moved_moved = 0, moved_away = 0, away_away = 0;
        for (int64_t t : rows) {
          for (int64_t r = 0; r < kOut; ++r) {
            double moved = 0, away = 0;
            for (int64_t i = h * kGroup * kDim; i < (h + 1) * kGroup * kDim; ++i) {
              const auto at = size_t(t * wo.cols + i);
              const double w = weights[size_t(r * wo.cols + i)];
              moved += w * (double(above[at]) - below[at]) / (2.0 * step);
              away += w * (double(out[at]) - teacher[at]);
            }
            moved_moved += moved * moved;
            moved_away += moved * away;
            away_away += away * away;
          }
        }
        const double* gram = grams.data() + h * (kDim + 1) * (kDim + 1);
        double quadratic = 0, linear = 0;
        for (int i = 0; i < kDim; ++i) {
          const double d = direction[size_t(h * kDim + i)];
          for (int j = 0; j < kDim; ++j) quadratic += d * gram[i * (kDim + 1) + j] * direction[size_t(h * kDim + j)];
          linear += d * gram[i * (kDim + 1) + kDim];
          // Tiles of the product round differently at its edge.
          EXPECT_NEAR(gram[i * (kDim + 1) + kDim], gram[kDim * (kDim + 1) + i], 1e-5 * std::sqrt(away_away));
        }
        EXPECT_NEAR(gram[kDim * (kDim + 1) + kDim], away_away, 1e-5 * away_away);
        EXPECT_NEAR(quadratic, moved_moved, 5e-3 * moved_moved);
        EXPECT_NEAR(linear, moved_away, 5e-3 * std::sqrt(moved_moved * away_away));
      }
      if (threads == 1) first = grams;
      EXPECT_EQ(grams, first) << "threads change the result";
    }
  }
}

}  // namespace
}  // namespace longkv
