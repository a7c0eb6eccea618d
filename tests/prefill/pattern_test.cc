// What patterns choose, against choices made in double precision.
#include "prefill/pattern.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "attention_case.h"
#include "prefill/antidiagonal.h"
#include "prefill/sparse.h"

namespace longkv::testing {
namespace {

std::set<int64_t> rows_of(const RowLists& lists, int head, RowRange queries) {
  std::vector<RowRange> list;
  lists.rows(head, queries, list);
  EXPECT_TRUE(ranges_valid(list, {0, queries.end}));
  std::set<int64_t> rows;
  for (const RowRange& r : list) {
    for (int64_t row = r.begin; row < r.end; ++row) rows.insert(row);
  }
  for (int64_t q = queries.begin; q < queries.end; ++q) EXPECT_TRUE(rows.contains(q)) << "query " << q;
  return rows;
}

// Mass of the `queries` last queries before `end`, by column and by distance, in double.
struct Lines {
  std::vector<double> columns, distances;
  Lines(const AttentionCase& c, int head, int64_t end, int64_t queries) {
    columns.assign(size_t(end), 0.0);
    distances.assign(size_t(end), 0.0);
    for (int64_t q = end - queries; q < end; ++q) {
      double error = 0;
      const auto w = c.weights(q, head, &error);
      for (int64_t row = 0; row <= q; ++row) {
        columns[size_t(row)] += w[size_t(row)];
        distances[size_t(q - row)] += w[size_t(row)];
      }
    }
  }
};

std::vector<int64_t> descending(const std::vector<double>& scores) {
  std::vector<int64_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return scores[size_t(a)] > scores[size_t(b)]; });
  return order;
}

// The smallest k from `at_least` on whose choice no rounding can change.
int64_t clear_cut(const std::vector<double>& scores, const std::vector<int64_t>& order, int64_t at_least) {
  for (size_t k = size_t(at_least); k < order.size(); ++k) {
    if (scores[size_t(order[k])] < 0.999 * scores[size_t(order[k - 1])]) return int64_t(k);
  }
  return int64_t(order.size());
}

TEST(AssignedPatternTest, VerticalSlashTakesTheBestLines) {
  ThreadPool pool(2);
  for (int64_t first : {0, 130}) {
    AttentionCase c({.rows = 700, .kv_heads = 2, .group = 2, .dim_k = 16, .dim_v = 16, .amplitude = 6});
    PatternAssignment assignment(1, std::vector<HeadPattern>(4));
    std::vector<std::set<int64_t>> columns(4), distances(4);
    for (int head = 0; head < 4; ++head) {
      Lines lines(c, head, 700, 64);
      std::fill_n(lines.columns.begin(), 30, 1e9);
      std::fill_n(lines.distances.begin(), 100, 1e9);
      const auto by_column = descending(lines.columns), by_distance = descending(lines.distances);
      const int64_t n_columns = clear_cut(lines.columns, by_column, 60 + head);
      const int64_t n_distances = clear_cut(lines.distances, by_distance, 120 + head);
      assignment[0][size_t(head)] = {PrefillKind::kVerticalSlash, n_columns, n_distances};
      columns[size_t(head)].insert(by_column.begin(), by_column.begin() + n_columns);
      distances[size_t(head)].insert(by_distance.begin(), by_distance.begin() + n_distances);
    }
    const auto pattern = make_assigned_pattern(assignment);
    std::vector<float> out(size_t(700 * 4 * 16));
    pattern->estimate(c.args(first, 700 - first, out.data()), 0, pool);
    ASSERT_EQ(pattern->block_rows(), 64);
    for (int head = 0; head < 4; ++head) {
      for (int64_t begin = first; begin < 700; begin = begin / 64 * 64 + 64) {
        const RowRange queries{begin, std::min<int64_t>(begin / 64 * 64 + 64, 700)};
        std::set<int64_t> expected;
        for (int64_t q = queries.begin; q < queries.end; ++q) {
          expected.insert(q);
          for (const int64_t s : distances[size_t(head)]) {
            if (q - s >= 0) expected.insert(q - s);
          }
        }
        for (const int64_t column : columns[size_t(head)]) {
          if (column < queries.end) expected.insert(column);
        }
        ASSERT_EQ(rows_of(*pattern, head, queries), expected) << "head " << head << " queries " << begin;
      }
    }
  }
}

TEST(AssignedPatternTest, SmallSizesAreRaisedAndLargeOnesMeanEverything) {
  ThreadPool pool(1);
  AttentionCase c({.rows = 400, .kv_heads = 1, .group = 4, .dim_k = 16, .dim_v = 16});
  const auto pattern = make_assigned_pattern({{{PrefillKind::kVerticalSlash, 0, 0},
                                               {PrefillKind::kVerticalSlash, 1 << 30, 1 << 30},
                                               {PrefillKind::kDense, 0, 0},
                                               {PrefillKind::kAShape, 0, 0}}});
  std::vector<float> out(size_t(400 * 4 * 16));
  pattern->estimate(c.args(0, 400, out.data()), 0, pool);
  const RowRange last{384, 400};
  const auto few = rows_of(*pattern, 0, last);
  for (int64_t row = 0; row < 30; ++row) EXPECT_TRUE(few.contains(row));     // forced columns
  for (int64_t row = 335; row < 400; ++row) EXPECT_TRUE(few.contains(row));  // the nearest 50 distances
  EXPECT_LT(few.size(), 200u);
  EXPECT_EQ(rows_of(*pattern, 1, last).size(), 400u);
  EXPECT_EQ(rows_of(*pattern, 2, last).size(), 400u);
  EXPECT_EQ(rows_of(*pattern, 3, last).size(), 16u);
}

TEST(AssignedPatternTest, BlockSparseTakesTheBlocksOfTheBestMeans) {
  ThreadPool pool(2);
  AttentionCase c({.rows = 650, .kv_heads = 1, .group = 2, .dim_k = 16, .dim_v = 16, .amplitude = 5});
  const auto pattern = make_assigned_pattern({{{PrefillKind::kBlockSparse, 4, 0}, {PrefillKind::kBlockSparse, 1, 0}}});
  std::vector<float> out(size_t(650 * 2 * 16));
  pattern->estimate(c.args(0, 650, out.data()), 0, pool);
  for (int head = 0; head < 2; ++head) {
    for (int64_t block = 0; block <= 650 / 64; ++block) {
      const RowRange queries{block * 64, std::min<int64_t>(block * 64 + 64, 650)};
      const auto rows = rows_of(*pattern, head, queries);
      std::vector<double> scores(size_t(block), 0.0);
      for (int64_t b = 0; b < block; ++b) {
        for (int64_t i = 0; i < 16; ++i) {
          double query = 0, key = 0;
          for (int64_t q = queries.begin; q < queries.end; ++q) query += c.q[size_t((q * 2 + head) * 16 + i)];
          for (int64_t row = b * 64; row < b * 64 + 64; ++row) key += c.k[0].values[size_t(row * 16 + i)];
          scores[size_t(b)] += query * key;
        }
      }
      const auto order = descending(scores);
      std::set<int64_t> expected;
      for (int64_t q = queries.begin; q < queries.end; ++q) expected.insert(q);
      for (int64_t i = 0; i < std::min<int64_t>(block, head == 0 ? 3 : 0); ++i) {
        for (int64_t row = 0; row < 64; ++row) expected.insert(order[size_t(i)] * 64 + row);
      }
      ASSERT_EQ(rows, expected) << "head " << head << " block " << block;
    }
  }
}

// Blocks of a list that hold rows before the queries' own block.
std::set<int64_t> blocks_in(const std::set<int64_t>& rows, int64_t block) {
  std::set<int64_t> blocks;
  for (const int64_t row : rows) blocks.insert(row / block);
  return blocks;
}

TEST(XAttentionPatternTest, TakesTheFewestBlocksThatReachTheShare) {
  ThreadPool pool(2);
  for (const bool shared : {false, true}) {
    for (const double share : {0.5, 0.8, 0.95}) {
      AttentionCase c({.rows = 1800, .kv_heads = 2, .group = 2, .dim_k = 16, .dim_v = 16, .amplitude = 12});
      PrefillSpec spec;
      spec.kind = PrefillKind::kXAttention;
      spec.share = share;
      spec.min_blocks = 3;
      spec.stride = 8;
      spec.shared = shared;
      const auto pattern = make_xattention_pattern(spec);
      std::vector<float> out(size_t(1800 * 4 * 16));
      const int64_t first = 700;
      const auto chunk = c.args(first, 1100, out.data());
      pattern->estimate(chunk, 0, pool);
      ASSERT_EQ(pattern->heads_per_list(), shared ? 2 : 1);
      int64_t beyond_minimum = 0;
      for (int h = 0; h < 2; ++h) {
        AntidiagonalArgs args;
        args.q = chunk.q + h * 2 * 16;
        args.q_stride = 4 * 16;
        args.queries = 1100;
        args.row = first;
        args.group = 2;
        args.kv = c.views[size_t(h)];
        args.scale = c.spec.scale;
        args.stride = 8;
        BlockShares shares;
        antidiagonal_shares(args, pool, shares);
        for (int64_t b = 0; b < shares.query_blocks; ++b) {
          const int64_t own = shares.first_block + b;
          const RowRange queries{std::max(first, own * 128), std::min<int64_t>(1800, own * 128 + 128)};
          std::set<int64_t> united;
          for (int j = 0; j < 2; ++j) {
            const float* row = shares.shares.data() + (j * shares.query_blocks + b) * shares.key_blocks;
            std::vector<double> rest(row, row + own + 1);
            double held = rest[0] + rest[size_t(own)];
            double total = std::accumulate(rest.begin(), rest.end(), 0.0);
            rest[0] = rest[size_t(own)] = -1;  // sink and diagonal are in already
            std::set<int64_t> expected{0, own};
            for (const int64_t k : descending(rest)) {
              if ((held >= share * total && expected.size() >= 3) || rest[size_t(k)] < 0) break;
              beyond_minimum += expected.size() >= 3;
              expected.insert(k);
              held += rest[size_t(k)];
            }
            united.insert(expected.begin(), expected.end());
            if (!shared) {
              ASSERT_EQ(blocks_in(rows_of(*pattern, h * 2 + j, queries), 128), expected) << own;
            }
          }
          if (shared) {
            ASSERT_EQ(blocks_in(rows_of(*pattern, h * 2, queries), 128), united) << own;
          }
        }
      }
      EXPECT_GT(beyond_minimum, 0);
    }
  }
}

// A head whose last queries look at blocks as a whole is read by pooled blocks; one that looks for a single key is not.
TEST(FlexPatternTest, ChoosesTheModeByHowWellMeansPredict) {
  ThreadPool pool(2);
  AttentionCase c({.rows = 2000, .kv_heads = 2, .group = 1, .dim_k = 32, .dim_v = 16, .amplitude = 0.05f});
  // KV head 1: every query looks for key 777 and finds it at a score of 30.
  const float strong = 30 * std::sqrt(32.0f) / 5;
  for (int64_t q = 0; q < 2000; ++q) c.q[size_t((q * 2 + 1) * 32)] = 5;
  std::memcpy(c.k[1].bytes.data() + 777 * c.k[1].stride, &strong, 4);
  c.k[1].values[777 * 32] = strong;
  PrefillSpec spec;
  spec.kind = PrefillKind::kFlex;
  spec.min_budget = 256;
  const auto pattern = make_flex_pattern(spec);
  std::vector<float> out(size_t(2000 * 2 * 16));
  pattern->estimate(c.args(0, 2000, out.data()), 0, pool);

  // Flat scores: pooled blocks in whole, nine tenths of all pairs.
  int64_t pairs = 0, chosen = 0;
  for (int64_t block = 0; block < 16; ++block) {
    const RowRange queries{block * 128, std::min<int64_t>(2000, block * 128 + 128)};
    const auto rows = rows_of(*pattern, 0, queries);
    for (const int64_t b : blocks_in(rows, 128)) {
      for (int64_t row = b * 128; row < std::min(b * 128 + 128, queries.end); ++row) ASSERT_TRUE(rows.contains(row));
    }
    EXPECT_TRUE(rows.contains(0));
    EXPECT_GE(blocks_in(rows, 128).size(), size_t(std::min<int64_t>(2, block + 1)));
    chosen += int64_t(blocks_in(rows, 128).size());
    pairs += block + 1;
  }
  EXPECT_GT(double(chosen), 0.75 * double(pairs));
  EXPECT_LT(chosen, pairs);

  // One key takes all: its column in every later block, and as few others as the minimum asks for.
  for (int64_t block = 7; block < 16; ++block) {
    const RowRange queries{block * 128, std::min<int64_t>(2000, block * 128 + 128)};
    const auto rows = rows_of(*pattern, 1, queries);
    EXPECT_TRUE(rows.contains(777));
    EXPECT_TRUE(rows.contains(0) && rows.contains(127));
    // Minimum: 256 columns, and two blocks of 128 distances that reach over 255 rows each.
    EXPECT_LE(rows.size(), size_t(128 + 256 + 128 + 3 * 255));
  }
  const Lines lines(c, 1, 2000, 128);
  double covered = 0, total = 0;
  const auto last = rows_of(*pattern, 1, {1920, 2000});
  for (int64_t row = 0; row < 2000; ++row) {
    total += lines.columns[size_t(row)];
    if (last.contains(row)) covered += lines.columns[size_t(row)];
  }
  EXPECT_GE(covered, 0.9 * total);
}

TEST(SparsePrefillTest, AppliesToLongPromptsDeepLayersAndFullWindows) {
  KvShape shape;
  shape.layers = 4;
  shape.kv_heads = shape.group_size = 1;
  shape.dim_k = shape.dim_v = 16;
  shape.window = {0, 0, 100, 0};
  PrefillSpec spec;
  spec.kind = PrefillKind::kXAttention;
  const auto stage = SparsePrefill::create(spec, shape);
  ASSERT_TRUE(stage.ok());
  for (int layer = 0; layer < 4; ++layer) {
    EXPECT_FALSE(stage.value()->applies(layer, 32767));
    EXPECT_EQ(stage.value()->applies(layer, 32768), layer == 3);
  }
  spec.kind = PrefillKind::kDense;
  EXPECT_FALSE(SparsePrefill::create(spec, shape).value()->applies(3, 1 << 20));
  EXPECT_EQ(SparsePrefill::chunk_tokens(spec, 512, 1 << 20), 512);
  spec.kind = PrefillKind::kFlex;
  EXPECT_EQ(SparsePrefill::chunk_tokens(spec, 512, 1 << 20), 4096);
  EXPECT_EQ(SparsePrefill::chunk_tokens(spec, 8192, 1 << 20), 8192);
  EXPECT_EQ(SparsePrefill::chunk_tokens(spec, 512, 4096), 512);
}

TEST(SparsePrefillTest, LastRowsAndObservedRowsAreDense) {
  ThreadPool pool(2);
  AttentionCase c({.rows = 1000, .kv_heads = 1, .group = 2, .dim_k = 16, .dim_v = 16, .amplitude = 3});
  const auto dense = c.run(pool, 1000);
  KvShape shape;
  shape.layers = 1;
  shape.kv_heads = 1;
  shape.group_size = 2;
  shape.dim_k = shape.dim_v = 16;
  PrefillSpec spec;
  spec.kind = PrefillKind::kAShape;
  spec.sink = 4;
  spec.window = 50;
  spec.dense_layers = 0;
  spec.threshold = 500;
  spec.last = 70;
  const auto stage = SparsePrefill::create(spec, shape);
  ASSERT_TRUE(stage.ok());
  for (const int64_t mass_from : {1000, 970, 900}) {
    PrefillAttention attention(pool);
    std::vector<float> out(dense.size(), 0.0f), mass(2000, 0.0f);
    PrefillPairs pairs;
    for (int64_t first = 0; first < 1000; first += 150) {
      auto args = c.args(first, std::min<int64_t>(150, 1000 - first), out.data());
      if (mass_from < 1000 && first + args.tokens > mass_from) {
        args.mass = mass.data();
        args.mass_stride = 1000;
        args.mass_from = mass_from;
      }
      const auto part = stage.value()->run(args, 0, 1000, attention, pool);
      pairs.attended += part.attended;
      pairs.causal += part.causal;
    }
    const int64_t exact = std::min<int64_t>(930, mass_from);
    const int64_t width = 2 * 16;
    EXPECT_TRUE(std::equal(out.begin() + exact * width, out.end(), dense.begin() + exact * width));
    EXPECT_FALSE(std::equal(out.begin() + (exact - 1) * width, out.begin() + exact * width,
                            dense.begin() + (exact - 1) * width));
    // A query that sees sinks and window only, whole blocks of 64 of it.
    EXPECT_EQ(pairs.causal, 2 * 1000 * 1001 / 2);
    EXPECT_LT(pairs.attended, pairs.causal / 2);
    const double sum = std::accumulate(mass.begin(), mass.end(), 0.0);
    EXPECT_NEAR(sum, 2.0 * double(1000 - mass_from), 1e-2);
  }
}

}  // namespace
}  // namespace longkv::testing
