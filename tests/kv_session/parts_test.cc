// The selector's parts: top-k, aggregation, votes, plans of layers and levels.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "base/cpu.h"
#include "kv/select/aggregate.h"
#include "kv/select/coarse.h"
#include "kv/select/layer_plan.h"
#include "kv/select/topk.h"
#include "kv/select/vote.h"
#include "kv_session/harness.h"

namespace longkv::test {
namespace {

std::vector<int64_t> sorted_top(const std::vector<float>& s, int64_t k) {
  std::vector<int64_t> order(s.size());
  std::iota(order.begin(), order.end(), 0);
  const auto value = [&](int64_t i) { return std::isnan(s[size_t(i)]) ? -INFINITY : s[size_t(i)]; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return value(a) > value(b); });
  order.resize(size_t(std::min<int64_t>(k, int64_t(order.size()))));
  std::sort(order.begin(), order.end());
  return order;
}

TEST(TopK, LargestScoresTiesToTheLowerIndexNanLast) {
  std::vector<uint64_t> scratch;
  std::vector<int64_t> picked;
  std::mt19937 engine(1);
  for (const int n : {1, 2, 16, 17, 100, 1000}) {
    std::vector<float> s(static_cast<size_t>(n));
    for (float& x : s) {
      x = float(int(engine() % 7)) - 3.0f;  // many ties
      if (engine() % 11 == 0) x = NAN;
      if (engine() % 13 == 0) x = -INFINITY;
      if (engine() % 17 == 0) x = INFINITY;
      if (engine() % 5 == 0) x = -0.0f;
    }
    for (const int k : {0, 1, n / 2, n - 1, n, n + 3}) {
      top_k(s.data(), n, k, scratch, picked);
      EXPECT_EQ(picked, sorted_top(s, k)) << "n " << n << " k " << k;
    }
  }
}

TEST(Aggregate, MatchesDouble) {
  for (const IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (const int heads : {1, 2, 3, 7, 8, 9, 17}) {
      for (const int64_t n : {1, 5, 8, 33}) {
        const int64_t stride = n + 3;
        Rng rng(uint64_t(heads * 100 + n));
        const auto s = rng.normal(heads * stride, 30.0f);
        for (const Aggregate kind : {Aggregate::kSum, Aggregate::kMax, Aggregate::kSoftmaxSum}) {
          auto work = s;
          std::vector<float> out(size_t(n) + 1, -7.0f);
          aggregate_scores(kind, work.data(), stride, heads, n, 0.125f, out.data());
          EXPECT_EQ(out[size_t(n)], -7.0f);
          auto in_place = s;
          aggregate_scores(kind, in_place.data(), stride, heads, n, 0.125f, in_place.data());
          for (int64_t b = 0; b < n; ++b) {
            double want = kind == Aggregate::kMax ? -INFINITY : 0.0;
            for (int j = 0; j < heads; ++j) {
              const double x = s[size_t(j * stride + b)];
              double total = 0;
              for (int64_t i = 0; i < n; ++i) total += std::exp((s[size_t(j * stride + i)] - x) * 0.125);
              want = kind == Aggregate::kMax   ? std::max(want, x)
                     : kind == Aggregate::kSum ? want + x
                                               : want + 1 / total;
            }
            ASSERT_NEAR(out[size_t(b)], want, 1e-5 * std::max(1.0, std::abs(want))) << isa_name(level);
            ASSERT_EQ(in_place[size_t(b)], out[size_t(b)]);
          }
        }
      }
    }
  }
  ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok());
}

TEST(Aggregate, NanAndInfiniteScoresLeaveTheOthersInOrder) {
  for (const Aggregate kind : {Aggregate::kSum, Aggregate::kMax, Aggregate::kSoftmaxSum}) {
    std::vector<float> s = {1, NAN, 3, -INFINITY, 2, 1, 1, 1, 1, 1};
    std::vector<float> out(5);
    EXPECT_TRUE(aggregate_scores(kind, s.data(), 5, 2, 5, 1.0f, out.data()));
    EXPECT_GT(out[2], out[4]);
    EXPECT_GT(out[4], out[0]);
    if (kind != Aggregate::kMax) {
      EXPECT_GT(out[0], out[1]);
    }
    for (float x : out) EXPECT_FALSE(std::isnan(x));
    s = {INFINITY, 0, 1, INFINITY, 0, 1};
    EXPECT_FALSE(aggregate_scores(kind, s.data(), 3, 2, 3, 1.0f, out.data()));
    EXPECT_GT(out[0], out[1]);
    EXPECT_FALSE(std::isnan(out[0]));
  }
}

TEST(Vote, MatchesBruteForceOverSizes) {
  Rng rng(4);
  const int heads = 3;
  for (const int64_t block : {1, 4, 16}) {
    for (const int64_t rows : {1, 15, 16, 17, 33, 64, 65, 200}) {
      for (const int64_t kernel : {1, 2, 7}) {
        const int64_t queries = 20, count = 3, stride = rows + 2;
        auto mass = rng.normal(heads * stride);
        for (float& m : mass) m = std::abs(m);
        mass[0] = NAN;
        const VoteMask mask = vote_blocks(mass.data(), stride, heads, rows, block, count, queries, kernel);
        const int64_t blocks = std::max<int64_t>(0, rows - queries) / block;
        if (blocks <= count) {
          EXPECT_FALSE(mask.active());
          continue;
        }
        std::vector<float> score(size_t(blocks), 0.0f);
        for (int64_t r = 0; r < blocks * block; ++r) {
          double sum = 0;
          int n = 0;
          for (int64_t i = r - (kernel - 1) / 2; i <= r + kernel / 2; ++i) {
            if (i < 0 || i >= rows) continue;
            ++n;
            for (int j = 0; j < heads; ++j) {
              const float m = mass[size_t(j * stride + i)];
              if (!std::isnan(m)) sum += m;
            }
          }
          score[size_t(r / block)] = std::max(score[size_t(r / block)], float(sum / n));
        }
        std::vector<int64_t> voted;
        for (const RowRange& r : mask.blocks) {
          for (int64_t b = r.begin; b < r.end; ++b) voted.push_back(b);
        }
        EXPECT_EQ(voted, sorted_top(score, count)) << "rows " << rows << " block " << block << " kernel " << kernel;
        EXPECT_EQ(mask.voted_end, blocks);
      }
    }
  }
}

TEST(Vote, TruncationMakesRewrittenBlocksCandidatesAgain) {
  VoteMask mask{{{1, 3}, {6, 8}}, 10};
  truncate_vote(mask, 20);
  EXPECT_EQ(mask.voted_end, 10);
  truncate_vote(mask, 7);
  EXPECT_EQ(mask.blocks, (std::vector<RowRange>{{1, 3}, {6, 7}}));
  EXPECT_EQ(mask.voted_end, 7);
  truncate_vote(mask, 0);
  EXPECT_TRUE(mask.blocks.empty());
  EXPECT_FALSE(mask.active());
}

TEST(LayerPlan, StepsThatDivideNothingDenseLayersAndWindows) {
  KvShape s = make_shape(9, 1, 1, 32);
  s.window = {0, 0, 64, 0, 512, 0, 0, 512, 0};
  Recipe recipe = full_f32();
  recipe.select.all = false;
  recipe.select.budget = 128;
  recipe.select.dense_layers = 1;
  recipe.select.layer_step = 2;
  const auto plans = plan_layers(s, recipe);
  std::vector<int> sources;
  for (const LayerPlan& p : plans) sources.push_back(p.source);
  // Layer 0 is dense by number, layer 2 by its window; layers 4 and 7 see a window and only share among themselves.
  EXPECT_EQ(sources, (std::vector<int>{-1, 1, -1, 1, 4, 5, 5, 4, 8}));
  EXPECT_EQ(plans[3].role, LayerRole::kReuse);
  EXPECT_EQ(plans[8].role, LayerRole::kChoose);
  EXPECT_EQ(plans[2].role, LayerRole::kDense);
}

TEST(Coarse, IndexBytesStayBelowAttentionBytesAtOneMillion) {
  for (const int dim : {64, 128}) {
    const KvShape s = make_shape(1, 1, 4, dim);
    for (const IndexKind kind : {IndexKind::kMean, IndexKind::kMinMax, IndexKind::kFixed}) {
      for (const int64_t block : {16, 64, 128}) {
        for (const int64_t rows : {int64_t{8192}, int64_t{131072}, int64_t{1048576}}) {
          const IndexSpec spec{.kind = kind, .block = block, .reps = 2};
          const int64_t limit = 2048 * 4 * dim;  // f16 K and V of the budget
          const int64_t factor = choose_coarse_factor(spec, s, rows, limit);
          const int64_t blocks = rows / block, flat = blocks * summary_bytes(spec, s);
          if (factor == 1) {
            EXPECT_LE(flat, limit);
            continue;
          }
          EXPECT_GT(flat, limit);
          const int64_t coarse = (blocks + factor - 1) / factor * summary_bytes(coarse_spec(spec, factor), s);
          const int64_t refine = kRefineBudgets * (2048 / block) * summary_bytes(spec, s);
          EXPECT_LE(coarse, limit / 2);
          EXPECT_LE(coarse + refine, limit) << int(kind) << " block " << block << " rows " << rows;
        }
      }
    }
  }
}

TEST(Coarse, ByteSummariesReadAsManyBlocksAsHalvesWould) {
  for (const int dim : {64, 128}) {
    const KvShape s = make_shape(1, 1, 4, dim);
    for (const int64_t rows : {8192, 32768, 131072, 1048576}) {
      const IndexSpec halves{.kind = IndexKind::kMinMax, .block = 16};
      IndexSpec bytes = halves;
      bytes.eight = true;
      const int64_t attention = 1024 * 4 * dim, limit = index_limit(bytes, s, attention);
      EXPECT_EQ(index_limit(halves, s, attention), attention);
      EXPECT_EQ(limit / summary_bytes(bytes, s), attention / summary_bytes(halves, s));
      EXPECT_EQ(choose_coarse_factor(bytes, s, rows, limit), choose_coarse_factor(halves, s, rows, attention));
    }
  }
}

TEST(Coarse, KindsThatReadEveryTokenHaveOneLevelUnlessTheRecipeNamesMore) {
  const KvShape s = make_shape(1, 1, 4, 64);
  for (const IndexKind kind : {IndexKind::kBits, IndexKind::kChannels, IndexKind::kLabels}) {
    IndexSpec spec{.kind = kind, .block = 16};
    EXPECT_EQ(choose_coarse_factor(spec, s, 1048576, 1), 1);
    spec.coarse = 8;
    EXPECT_EQ(choose_coarse_factor(spec, s, 1048576, 1), 8);
  }
}

}  // namespace
}  // namespace longkv::test
