#include "prefill/search.h"

#include <gtest/gtest.h>

#include "attention_case.h"

namespace longkv::testing {
namespace {

double relative_error(const std::vector<float>& sparse, const std::vector<float>& dense, int head, int heads,
                      int64_t dim, int64_t first, int64_t end) {
  double difference = 0, norm = 0;
  for (int64_t t = first; t < end; ++t) {
    for (int64_t i = 0; i < dim; ++i) {
      const size_t at = size_t((t * heads + head) * dim + i);
      difference += (double(sparse[at]) - dense[at]) * (double(sparse[at]) - dense[at]);
      norm += double(dense[at]) * dense[at];
    }
  }
  return std::sqrt(difference / norm);
}

TEST(AssignmentSearchTest, EqualBudgetsAndTheLeastError) {
  constexpr int64_t kRows = 1280, kFirst = 1024, kBudget = 500, kDim = 16;
  ThreadPool pool(2);
  AttentionCase c({.rows = kRows, .kv_heads = 1, .group = 3, .dim_k = kDim, .dim_v = kDim, .amplitude = 2});
  // Head 0 looks for one key in the middle: a window does not hold it, a column does.
  const float strong = 12;
  std::memcpy(c.k[0].bytes.data() + 600 * c.k[0].stride, &strong, 4);
  c.k[0].values[600 * kDim] = strong;
  for (int64_t q = 0; q < kRows; ++q) c.q[size_t(q * 3 * kDim)] = 4;
  std::vector<float> dense = c.run(pool, kRows);
  KvShape shape;
  shape.layers = 2;
  shape.kv_heads = 1;
  shape.group_size = 3;
  shape.dim_k = shape.dim_v = kDim;
  AssignmentSearch search(shape, kBudget, pool);
  const auto chunk = c.args(kFirst, kRows - kFirst, dense.data());
  search.choose(1, chunk);
  EXPECT_EQ(search.assignment()[0][0], HeadPattern{});

  std::vector<float> out(dense.size());
  // Output under one pattern for all heads, and the pairs of one of them.
  const auto run = [&](const HeadPattern& p, int head) {
    const auto pattern = make_assigned_pattern({{p, p, p}});
    auto args = c.args(kFirst, kRows - kFirst, out.data());
    pattern->estimate(args, 0, pool);
    PrefillAttention(pool).run_listed(args, *pattern);
    int64_t pairs = 0;
    std::vector<RowRange> rows;
    for (int64_t block = kFirst; block < kRows; block += 64) {
      pattern->rows(head, {block, block + 64}, rows);
      pairs += causal_pairs(rows, {block, block + 64});
    }
    return pairs;
  };
  // The largest window whose pairs fit, found one by one.
  constexpr int64_t kPairs = kBudget * (kRows - kFirst);
  int64_t window = 1;
  while (run({PrefillKind::kAShape, 100, window + 1}, 0) <= kPairs) ++window;
  run({PrefillKind::kAShape, 100, window}, 0);
  const std::vector<float> a_shape = out;

  EXPECT_EQ(search.assignment()[1][0].kind, PrefillKind::kVerticalSlash);
  for (int head = 0; head < 3; ++head) {
    const HeadPattern& best = search.assignment()[1][size_t(head)];
    ASSERT_NE(best.kind, PrefillKind::kDense);
    EXPECT_LE(search.pairs()[1][size_t(head)].attended, kPairs);
    EXPECT_GT(search.pairs()[1][size_t(head)].attended, kPairs * 3 / 4);
    EXPECT_EQ(run(best, head), search.pairs()[1][size_t(head)].attended);
    const double error = relative_error(out, dense, head, 3, kDim, kFirst, kRows);
    EXPECT_NEAR(search.errors()[1][size_t(head)], error, 1e-6);
    // The search stops within a 64th of the best size.
    EXPECT_LE(error, 1.05 * relative_error(a_shape, dense, head, 3, kDim, kFirst, kRows));
  }
}

}  // namespace
}  // namespace longkv::testing
