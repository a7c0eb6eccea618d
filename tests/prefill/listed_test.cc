// Attention over lists of rows against the reference, and the estimates of patterns against double precision.
#include <gtest/gtest.h>

#include <map>
#include <numbers>
#include <set>

#include "attention_case.h"
#include "base/cpu.h"
#include "prefill/antidiagonal.h"
#include "prefill/attention.h"
#include "prefill/pooled.h"
#include "prefill/row_lists.h"
#include "prefill/sample.h"

namespace longkv::testing {
namespace {

// Random rows for every block of queries and head, drawn once so that the reference can ask again.
class RandomLists final : public RowLists {
 public:
  RandomLists(int64_t block, int per_list, double density) : block_(block), per_list_(per_list), density_(density) {}
  int64_t block_rows() const override { return block_; }
  int heads_per_list() const override { return per_list_; }
  void rows(int head, RowRange queries, std::vector<RowRange>& out) const override {
    out.clear();
    for (int64_t row = 0; row < queries.end; ++row) {
      if (row >= queries.begin / block_ * block_ || listed(head, queries.begin / block_, row))
        append_range(out, {row, row + 1});
    }
  }
  bool attends(int head, int64_t query, int64_t row) const {
    if (row > query) return false;
    return row >= query / block_ * block_ || listed(head, query / block_, row);
  }

 private:
  bool listed(int head, int64_t block, int64_t row) const {
    const uint32_t x = uint32_t(row * 2654435761u) ^ uint32_t(block * 40503u) ^ uint32_t(head / per_list_ * 977u);
    return double((x * 2246822519u) >> 8) < density_ * double(1u << 24);
  }
  int64_t block_;
  int per_list_;
  double density_;
};

class ListedAttentionTest : public ::testing::TestWithParam<IsaLevel> {
 protected:
  void SetUp() override { ASSERT_TRUE(set_active_isa(GetParam()).ok()); }
  void TearDown() override { ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok()); }
  ThreadPool pool_{2};
};

INSTANTIATE_TEST_SUITE_P(Levels, ListedAttentionTest, ::testing::ValuesIn(available_isa_levels()),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

std::vector<float> run_lists(const AttentionCase& c, ThreadPool& pool, const RowLists& lists, int64_t chunk,
                             PrefillPairs* pairs = nullptr) {
  std::vector<float> out(size_t(c.spec.rows * c.heads() * c.spec.dim_v), std::numeric_limits<float>::quiet_NaN());
  PrefillAttention attention(pool);
  for (int64_t first = 0; first < c.spec.rows; first += chunk) {
    const auto done = attention.run_listed(c.args(first, std::min(chunk, c.spec.rows - first), out.data()), lists);
    if (pairs != nullptr) {
      pairs->attended += done.attended;
      pairs->causal += done.causal;
    }
  }
  return out;
}

// The reference's weights with the rows outside the list taken out.
void expect_listed_reference(const AttentionCase& c, const RandomLists& lists, const std::vector<float>& out,
                             int64_t step) {
  for (int64_t position = 0; position < c.spec.rows; position += step) {
    for (int head = 0; head < c.heads(); ++head) {
      double error = 0, sum = 0;
      std::vector<double> w = c.weights(position, head, &error);
      for (int64_t row = 0; row < c.spec.rows; ++row) {
        if (!lists.attends(head, position, row)) w[size_t(row)] = 0;
        sum += w[size_t(row)];
      }
      const std::vector<double>& values = c.v[size_t(head / c.spec.group)].values;
      for (int64_t i = 0; i < c.spec.dim_v; ++i) {
        double expected = 0, largest = 0;
        for (int64_t row = 0; row <= position; ++row) {
          const double value = values[size_t(row * c.spec.dim_v + i)];
          expected += w[size_t(row)] / sum * value;
          if (w[size_t(row)] > 0) largest = std::max(largest, std::fabs(value));
        }
        ASSERT_NEAR(out[size_t((position * c.heads() + head) * c.spec.dim_v + i)], expected, error * largest)
            << "position " << position << " head " << head << " channel " << i << " of " << c.spec.rows << " rows";
      }
    }
  }
}

TEST_P(ListedAttentionTest, RandomListsEqualMaskedReference) {
  for (int64_t rows : {1, 63, 64, 65, 127, 128, 129, 300, 700}) {
    for (int group : {1, 4}) {
      for (int per_list : {1, group}) {
        AttentionCase c(
            {.rows = rows, .kv_heads = 2, .group = group, .dim_k = 32, .dim_v = 24, .k_type = KvType::kF16});
        const RandomLists lists(per_list == 1 ? 64 : 128, per_list, rows > 256 ? 0.7 : 0.3);
        PrefillPairs pairs;
        const auto out = run_lists(c, pool_, lists, 200, &pairs);
        expect_listed_reference(c, lists, out, rows > 200 ? 17 : 3);
        int64_t attended = 0;
        for (int head = 0; head < c.heads(); ++head) {
          for (int64_t q = 0; q < rows; ++q) {
            for (int64_t row = 0; row <= q; ++row) attended += lists.attends(head, q, row);
          }
        }
        EXPECT_EQ(pairs.attended, attended);
        EXPECT_EQ(pairs.causal, c.heads() * rows * (rows + 1) / 2);
      }
    }
  }
}

TEST_P(ListedAttentionTest, WideHeadsGroupsOfEightAndSoftCap) {
  AttentionCase c({.rows = 333,
                   .kv_heads = 1,
                   .group = 8,
                   .dim_k = 192,
                   .dim_v = 128,
                   .k_type = KvType::kQ8_0,
                   .v_type = KvType::kQ4_0,
                   .softcap = 20,
                   .amplitude = 3});
  for (int per_list : {1, 8}) {
    const RandomLists lists(64, per_list, 0.4);
    expect_listed_reference(c, lists, run_lists(c, pool_, lists, 333), 41);
  }
}

TEST_P(ListedAttentionTest, ListOfAllRowsGivesTheBitsOfDense) {
  for (int64_t rows : {1, 64, 65, 257, 1000}) {
    AttentionCase c({.rows = rows, .kv_heads = 2, .group = 3, .dim_k = 64, .dim_v = 64, .k_type = KvType::kF16});
    const auto dense = c.run(pool_, rows);
    for (int per_list : {1, 3}) {
      for (int64_t chunk : {1000, 256, 77}) {
        ASSERT_EQ(run_lists(c, pool_, RandomLists(128, per_list, 2.0), chunk), dense) << rows << " " << chunk;
      }
    }
  }
}

TEST_P(ListedAttentionTest, ChunksAndThreadsGiveTheSameBits) {
  AttentionCase c({.rows = 900, .kv_heads = 2, .group = 3, .dim_k = 32, .dim_v = 32});
  const RandomLists lists(64, 1, 0.2);
  const auto whole = run_lists(c, pool_, lists, 900);
  for (int64_t chunk : {64, 100, 333}) ASSERT_EQ(run_lists(c, pool_, lists, chunk), whole) << "chunks of " << chunk;
  for (int threads : {1, 3, 16}) {
    ThreadPool pool(threads);
    ASSERT_EQ(run_lists(c, pool, lists, 300), whole) << threads << " threads";
  }
}

SampleArgs sample_args(const AttentionCase& c, int64_t queries, int64_t end, int kv_head) {
  SampleArgs args;
  const int64_t stride = int64_t(c.heads()) * c.spec.dim_k;
  args.q = c.q.data() + (end - queries) * stride + kv_head * c.spec.group * c.spec.dim_k;
  args.q_stride = stride;
  args.queries = queries;
  args.row = end - queries;
  args.group = c.spec.group;
  args.kv = c.views[size_t(kv_head)];
  args.params = {c.spec.scale, c.spec.softcap};
  return args;
}

TEST_P(ListedAttentionTest, SampleEqualsReferenceByColumnAndDiagonal) {
  struct Shape {
    int64_t rows, queries;
    int group;
    float softcap;
  };
  for (const Shape& s : {Shape{5, 5, 1, 0}, {70, 64, 3, 0}, {300, 64, 4, 30}, {2048, 17, 1, 0}, {2300, 128, 2, 0}}) {
    AttentionCase c({.rows = s.rows,
                     .kv_heads = 2,
                     .group = s.group,
                     .dim_k = 32,
                     .dim_v = 32,
                     .k_type = KvType::kF16,
                     .softcap = s.softcap,
                     .amplitude = 3});
    AttentionSample sample;
    sample_attention(sample_args(c, s.queries, s.rows, 1), pool_, sample);
    ASSERT_EQ(sample.rows, s.rows);
    for (int j = 0; j < s.group; ++j) {
      std::vector<double> columns(size_t(s.rows), 0.0), distances(size_t(s.rows), 0.0);
      double error = 0;
      for (int64_t q = s.rows - s.queries; q < s.rows; ++q) {
        double e = 0;
        const auto w = c.weights(q, s.group + j, &e);
        error = std::max(error, e);
        for (int64_t row = 0; row <= q; ++row) {
          columns[size_t(row)] += w[size_t(row)];
          distances[size_t(q - row)] += w[size_t(row)];
        }
      }
      for (int64_t i = 0; i < s.rows; ++i) {
        // 2^-126 and below count as nothing.
        ASSERT_NEAR(sample.columns[size_t(j * s.rows + i)], columns[size_t(i)], error * columns[size_t(i)] + 1e-36);
        ASSERT_NEAR(sample.distances[size_t(j * s.rows + i)], distances[size_t(i)],
                    error * distances[size_t(i)] + 1e-36)
            << "distance " << i << " of " << s.rows;
      }
    }
  }
}

TEST_P(ListedAttentionTest, SampleIsTheSameForEveryThreadCount) {
  AttentionCase c({.rows = 5000, .kv_heads = 1, .group = 2, .dim_k = 16, .dim_v = 16});
  AttentionSample one, many;
  ThreadPool single(1), crowd(5);
  sample_attention(sample_args(c, 64, 5000, 0), single, one);
  sample_attention(sample_args(c, 64, 5000, 0), crowd, many);
  EXPECT_EQ(one.columns, many.columns);
  EXPECT_EQ(one.distances, many.distances);
}

// Sums of antidiagonals by definition, softmax in double. Chunks begin and end anywhere.
TEST_P(ListedAttentionTest, AntidiagonalSharesEqualDefinition) {
  struct Shape {
    int64_t row, queries, stride;
  };
  for (const Shape& s : {Shape{0, 1, 16}, {0, 128, 16}, {0, 300, 8}, {256, 256, 16}, {200, 333, 16}, {37, 700, 8}}) {
    const int64_t end = s.row + s.queries, block = 128;
    AttentionCase c({.rows = end, .kv_heads = 2, .group = 3, .dim_k = 16, .dim_v = 16, .amplitude = 4});
    AntidiagonalArgs args;
    const int64_t stride = int64_t(c.heads()) * c.spec.dim_k;
    args.q = c.q.data() + s.row * stride + c.spec.group * c.spec.dim_k;
    args.q_stride = stride;
    args.queries = s.queries;
    args.row = s.row;
    args.group = c.spec.group;
    args.kv = c.views[1];
    args.scale = c.spec.scale;
    args.stride = s.stride;
    BlockShares shares;
    antidiagonal_shares(args, pool_, shares);
    ASSERT_EQ(shares.key_blocks, (end + block - 1) / block);
    ASSERT_EQ(shares.first_block, s.row / block);
    ASSERT_EQ(shares.query_blocks, shares.key_blocks - shares.first_block);
    const std::vector<double>& keys = c.k[1].values;
    for (int j = 0; j < c.spec.group; ++j) {
      for (int64_t b = 0; b < shares.query_blocks; ++b) {
        std::vector<double> expected(size_t(shares.key_blocks), 0.0);
        int64_t squares = 0;
        for (int64_t a = (shares.first_block + b) * block / s.stride;
             a < (shares.first_block + b + 1) * block / s.stride; ++a) {
          const int64_t from = std::max(s.row, a * s.stride), to = std::min(end, (a + 1) * s.stride);
          if (from >= to) continue;
          ++squares;
          std::vector<double> score(size_t(a + 1), 0.0);
          for (int64_t k = 0; k <= a; ++k) {
            for (int64_t q = from; q < to; ++q) {
              const int64_t row = k * s.stride + s.stride - 1 - q % s.stride;
              if (row >= end) continue;
              for (int64_t i = 0; i < c.spec.dim_k; ++i) {
                score[size_t(k)] +=
                    double(args.q[(q - s.row) * stride + j * c.spec.dim_k + i]) * keys[size_t(row * c.spec.dim_k + i)];
              }
            }
            score[size_t(k)] *= double(args.scale) / double(to - from);
          }
          const double top = *std::max_element(score.begin(), score.end());
          double sum = 0;
          for (double& x : score) sum += x = std::exp(x - top);
          for (int64_t k = 0; k <= a; ++k) expected[size_t(k * s.stride / block)] += score[size_t(k)] / sum;
        }
        for (int64_t k = 0; k < shares.key_blocks; ++k) {
          const float got = shares.shares[size_t((j * shares.query_blocks + b) * shares.key_blocks + k)];
          ASSERT_NEAR(got, expected[size_t(k)] / double(squares), 2e-5)
              << "rows " << s.row << "+" << s.queries << " head " << j << " block " << b << " keys " << k;
        }
      }
    }
  }
}

TEST_P(ListedAttentionTest, PooledMeansAndShares) {
  AttentionCase c({.rows = 150, .kv_heads = 1, .group = 1, .dim_k = 24, .dim_v = 8, .k_type = KvType::kBf16});
  std::vector<float> means, mean(24), shares(3);
  pool_keys(c.views[0], 150, 64, pool_, means);
  ASSERT_EQ(means.size(), size_t(3 * 24));
  pool_queries(c.q.data() + 10 * 24, 24, 30, 24, mean.data());
  mean_shares(mean.data(), means.data(), 3, 24, 2.0f, shares.data());
  std::vector<double> expected(3, 0.0);
  double sum = 0;
  for (int64_t b = 0; b < 3; ++b) {
    const int64_t begin = b * 64, end = std::min<int64_t>(150, begin + 64);
    for (int64_t i = 0; i < 24; ++i) {
      double key = 0, query = 0;
      for (int64_t r = begin; r < end; ++r) key += c.k[0].values[size_t(r * 24 + i)] / double(end - begin);
      for (int64_t r = 10; r < 40; ++r) query += c.q[size_t(r * 24 + i)] / 30.0;
      EXPECT_NEAR(means[size_t(b * 24 + i)], key, 1e-6);
      expected[size_t(b)] += 2 * key * query;
    }
    sum += std::exp(expected[size_t(b)]);
  }
  for (size_t b = 0; b < 3; ++b) EXPECT_NEAR(shares[b], std::exp(expected[b]) / sum, 1e-5);
}

}  // namespace
}  // namespace longkv::testing
