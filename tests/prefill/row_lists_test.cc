#include "prefill/row_lists.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "prefill/choose.h"

namespace longkv::testing {
namespace {

// Rows of a list, after checking that it covers each of them once, in order, and none after the queries.
std::set<int64_t> rows_in(const std::vector<RowRange>& list, RowRange queries) {
  EXPECT_TRUE(ranges_valid(list, {0, queries.end}));
  std::set<int64_t> rows;
  for (const RowRange& r : list) {
    for (int64_t row = r.begin; row < r.end; ++row) EXPECT_TRUE(rows.insert(row).second) << "row " << row;
  }
  for (int64_t q = queries.begin; q < queries.end; ++q) EXPECT_TRUE(rows.contains(q)) << "query " << q;
  return rows;
}

std::vector<RowRange> ranges(const std::set<int64_t>& values) {
  std::vector<RowRange> out;
  for (const int64_t v : values) append_range(out, {v, v + 1});
  return out;
}

TEST(RowListsTest, AShapeHoldsSinksAndEveryWindow) {
  std::vector<RowRange> list;
  for (int64_t sink : {0, 1, 5, 64, 1000}) {
    for (int64_t window : {1, 2, 63, 64, 65, 500}) {
      for (int64_t begin : {0, 1, 63, 64, 200}) {
        for (int64_t size : {1, 64}) {
          const RowRange queries{begin, begin + size};
          a_shape_rows(sink, window, queries, list);
          std::set<int64_t> expected;
          for (int64_t q = queries.begin; q < queries.end; ++q) {
            for (int64_t row = 0; row < queries.end; ++row) {
              if (row < sink || (row <= q && row > q - window) || row >= queries.begin) expected.insert(row);
            }
          }
          ASSERT_EQ(rows_in(list, queries), expected) << sink << " " << window << " " << begin << " " << size;
        }
      }
    }
  }
}

// The union of what every query asks for, over lengths that are no multiples of the block and adversarial lines: all
// distances too large, columns inside diagonals, duplicates by overlap.
TEST(RowListsTest, VerticalSlashCoversColumnsAndDiagonalsOnce) {
  std::mt19937 random(3);
  std::vector<RowRange> list;
  for (int trial = 0; trial < 400; ++trial) {
    const int64_t begin = int64_t(random() % 6) * 64 + (trial % 3 == 0 ? int64_t(random() % 64) : 0);
    const RowRange queries{begin, begin + 1 + int64_t(random() % 64)};
    std::set<int64_t> columns, distances;
    const int64_t bound = trial % 5 == 0 ? 5 : 700;  // clustered or spread, many beyond the queries
    for (unsigned i = random() % 40; i > 0; --i) columns.insert(int64_t(random()) % bound);
    for (unsigned i = random() % 40; i > 0; --i)
      distances.insert(int64_t(random()) % bound + (trial % 7 == 0 ? 600 : 0));
    const auto c = ranges(columns), d = ranges(distances);
    vertical_slash_rows(c, d, queries, list);
    std::set<int64_t> expected;
    for (int64_t row = queries.begin; row < queries.end; ++row) expected.insert(row);
    for (const int64_t row : columns) {
      if (row < queries.begin) expected.insert(row);
    }
    for (const int64_t s : distances) {
      for (int64_t row = queries.begin - s; row < queries.end - s; ++row) {
        if (row >= 0) expected.insert(row);
      }
    }
    ASSERT_EQ(rows_in(list, queries), expected) << "trial " << trial;
  }
}

TEST(RowListsTest, BlocksEndAtTheQueries) {
  std::vector<RowRange> list;
  const std::vector<int64_t> blocks{0, 2, 3, 5, 9};
  for (int64_t begin : {0, 64, 70, 320, 330}) {
    const RowRange queries{begin, begin + 20};
    block_list_rows(blocks, 64, queries, list);
    std::set<int64_t> expected;
    for (const int64_t b : blocks) {
      for (int64_t row = b * 64; row < b * 64 + 64 && row < queries.end; ++row) {
        if (b * 64 < queries.begin) expected.insert(row);
      }
    }
    for (int64_t row = queries.begin; row < queries.end; ++row) expected.insert(row);
    ASSERT_EQ(rows_in(list, queries), expected) << begin;
  }
}

TEST(RowListsTest, PairsAreCountedAsTheKernelMasksThem) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 200; ++trial) {
    const RowRange queries{int64_t(random() % 50), 50 + int64_t(random() % 50)};
    std::set<int64_t> rows;
    for (int i = 0; i < 60; ++i) rows.insert(int64_t(random()) % 110);
    int64_t expected = 0;
    for (int64_t q = queries.begin; q < queries.end; ++q) {
      for (const int64_t row : rows) expected += row <= q;
    }
    ASSERT_EQ(causal_pairs(ranges(rows), queries), expected);
  }
  EXPECT_EQ(causal_pairs(0, {0, 10}), 55);
  EXPECT_EQ(causal_pairs(3, {5, 6}), 3);
}

TEST(CoverTest, PicksTheFewestLargestScores) {
  std::mt19937 random(7);
  std::vector<uint64_t> scratch;
  std::vector<int64_t> picked;
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<float> scores(1 + random() % 200);
    // Eighths add without rounding, so that ties and exact shares are met.
    for (float& s : scores) s = float(random() % (trial % 2 == 0 ? 4 : 1000)) / 8;
    for (double share : {0.0, 0.25, 0.5, 0.75, 1.0}) {
      cover(scores, share, scratch, picked);
      std::vector<int64_t> order(scores.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = int64_t(i);
      std::stable_sort(order.begin(), order.end(),
                       [&](auto a, auto b) { return scores[size_t(a)] > scores[size_t(b)]; });
      double total = 0;
      for (const float s : scores) total += s;
      double held = 0;
      std::vector<int64_t> expected;
      for (const int64_t i : order) {
        if (held >= share * total) break;
        held += scores[size_t(i)];
        expected.push_back(i);
      }
      std::sort(expected.begin(), expected.end());
      ASSERT_EQ(picked, expected) << "trial " << trial << " share " << share;
    }
  }
}

TEST(CoverTest, NotANumberPicksEverything) {
  std::vector<uint64_t> scratch;
  std::vector<int64_t> picked;
  cover(std::vector<float>{1, 2, std::numeric_limits<float>::quiet_NaN(), 4}, 0.5, scratch, picked);
  EXPECT_EQ(picked, (std::vector<int64_t>{0, 1, 2, 3}));
  cover({}, 0.5, scratch, picked);
  EXPECT_TRUE(picked.empty());
}

}  // namespace
}  // namespace longkv::testing
