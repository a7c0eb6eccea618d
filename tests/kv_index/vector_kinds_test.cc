// The kinds that keep a few vectors per block, against brute force in double precision.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/cpu.h"
#include "kv_index/harness.h"

namespace longkv::test {
namespace {

using Rows = std::vector<std::vector<double>>;

double dot(const float* q, const std::vector<double>& k) {
  double sum = 0;
  for (size_t c = 0; c < k.size(); ++c) sum += double(q[c]) * k[c];
  return sum;
}

// The score of a block by its definition, from the decoded rows.
double brute_score(const IndexSpec& spec, const float* q, const Rows& rows) {
  const size_t dim = rows[0].size();
  std::vector<double> mean(dim, 0.0), upper(rows[0]), lower(rows[0]);
  for (const auto& r : rows) {
    for (size_t c = 0; c < dim; ++c) {
      mean[c] += r[c] / double(rows.size());
      upper[c] = std::max(upper[c], r[c]);
      lower[c] = std::min(lower[c], r[c]);
    }
  }
  double score = -INFINITY;
  switch (spec.kind) {
    case IndexKind::kMean: return dot(q, mean);
    case IndexKind::kMax: return dot(q, upper);
    case IndexKind::kMinMax:
      score = 0;
      for (size_t c = 0; c < dim; ++c) score += std::max(q[c] * upper[c], q[c] * lower[c]);
      return score;
    case IndexKind::kMeanDev:
    case IndexKind::kCuboid:
      score = 0;
      for (size_t c = 0; c < dim; ++c) {
        const bool cuboid = spec.kind == IndexKind::kCuboid;
        const double centre = cuboid ? (upper[c] + lower[c]) / 2 : mean[c];
        double width = 0;
        for (const auto& r : rows) {
          const double d = std::abs(r[c] - centre);
          width += (cuboid ? d : d * d) / double(rows.size());
        }
        score += q[c] * centre + std::abs(q[c]) * (cuboid ? width : spec.deviation * std::sqrt(width));
      }
      return score;
    default:
      for (int i = 0; i < spec.reps; ++i) {
        const size_t r = size_t(i * spec.block / spec.reps);
        if (r < rows.size()) score = std::max(score, dot(q, rows[r]));
      }
      return score;
  }
}

Rows block_rows(const Keys& keys, int64_t block, int64_t b, int64_t n) {
  Rows rows;
  for (int64_t r = b * block; r < std::min(n, (b + 1) * block); ++r) rows.push_back(keys.row(r));
  return rows;
}

double norm1(const float* q, int64_t n) {
  double sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += std::abs(double(q[c]));
  return sum;
}

std::vector<IndexSpec> vector_specs(int64_t block) {
  std::vector<IndexSpec> specs;
  for (const IndexKind kind : {IndexKind::kMean, IndexKind::kMax, IndexKind::kMinMax}) {
    specs.push_back({.kind = kind, .block = block});
  }
  for (const bool eight : {false, true}) {
    specs.push_back({.kind = IndexKind::kMeanDev, .block = block, .eight = eight, .deviation = 1.5});
    specs.push_back({.kind = IndexKind::kCuboid, .block = block, .eight = eight});
  }
  specs.push_back({.kind = IndexKind::kMinMax, .block = block, .eight = true});
  for (const int reps : {1, 2, 3}) {
    if (reps <= block) specs.push_back({.kind = IndexKind::kFixed, .block = block, .reps = reps});
  }
  return specs;
}

// Keys of unit variance stay below 6, so a half's rounding error is below 6 * 2^-11 per channel, twice that for the
// mean.
constexpr double kHalfError = 6.0 * 0x1p-11 * 1.01;
// In 8 bits a centre below 6 is off by half of 6 / 127, and a width, which then grows by as much and is rounded up to
// the next 255th of at most 6.1, by twice that.
constexpr double kByteError = 3 * 6.0 / 254;

TEST(VectorKinds, MatchBruteForceForEveryGroupAndBlockSize) {
  for (const IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (const int group : {1, 3, 4, 7, 8}) {
      for (const int64_t block : {int64_t{1}, int64_t{3}, int64_t{16}, int64_t{33}}) {
        const int dim = group == 7 ? 80 : 64;
        const int64_t n = 17 * block + block / 2 + 1;  // one tile of 16 blocks, two blocks more, the last one open
        const Keys keys(KvType::kF32, n, dim, 11 + uint64_t(group));
        const auto q = normal_values(group * dim, 5);
        for (const IndexSpec& spec : vector_specs(block)) {
          auto index = build_index(spec, index_shape(2, group, dim), n + 5);
          index->append(1, keys.view(n), 0, n);
          const int64_t blocks = index->blocks(1);
          ASSERT_EQ(blocks, (n + block - 1) / block);
          EXPECT_EQ(index->blocks(0), 0);
          const auto scores = scores_of(*index, 1, q, group, 0, blocks);
          for (int64_t b = 0; b < blocks; ++b) {
            const Rows rows = block_rows(keys, block, b, n);
            for (int j = 0; j < group; ++j) {
              const double want = brute_score(spec, q.data() + j * dim, rows);
              const double error = (spec.eight ? kByteError : 2 * kHalfError) * norm1(q.data() + j * dim, dim);
              ASSERT_NEAR(scores[size_t(j * blocks + b)], want, error)
                  << isa_name(level) << " kind " << int(spec.kind) << " block " << block << " b " << b << " head " << j;
            }
          }
        }
      }
    }
  }
  ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok());
}

// Where queries are rounded to 16 bits, 8-bit summaries score as they do in fp32, but for half a step of every channel
// with a centre and a step with a width.
TEST(VectorKinds, ByteSummariesScoreAlikeAtEveryLevel) {
  for (const int dim : {64, 80, 256, 6}) {
    const int group = 6;
    const int64_t n = 37 * 16;
    const Keys keys(KvType::kF32, n, dim, 21);
    auto q = normal_values(group * dim, 6);
    const float kept = q[3];
    for (int c = 0; c < dim; ++c) q[size_t(dim + c)] *= 1e-3f;  // heads of unlike size
    q[size_t(2 * dim + 1)] = 50.0f;
    for (const IndexKind kind : {IndexKind::kMinMax, IndexKind::kMeanDev}) {
      auto index = build_index({.kind = kind, .block = 16, .eight = true}, index_shape(1, group, dim), n);
      index->append(0, keys.view(n), 0, n);
      const int64_t blocks = index->blocks(0);
      std::vector<float> want;
      for (const IsaLevel level : available_isa_levels()) {
        ASSERT_TRUE(set_active_isa(level).ok());
        const auto scores = scores_of(*index, 0, q, group, 0, blocks);
        if (want.empty()) want = scores;
        for (int j = 0; j < group; ++j) {
          double largest = 0;
          for (int c = 0; c < dim; ++c) largest = std::max(largest, std::abs(double(q[size_t(j * dim + c)])));
          const double step = largest / 32512, sums = 12 * norm1(q.data() + j * dim, dim) * dim * 0x1p-24;
          for (int64_t b = 0; b < blocks; ++b) {
            const double more = double(scores[size_t(j * blocks + b)]) - double(want[size_t(j * blocks + b)]);
            ASSERT_LE(std::abs(more), dim * step * (2 * 0.51 * 6 + 6) + sums) << isa_name(level) << " dim " << dim;
            if (kind == IndexKind::kMinMax) {
              ASSERT_GE(more, -sums) << isa_name(level);
            }
          }
        }
        q[3] = NAN;
        const auto bad = scores_of(*index, 0, q, group, 0, blocks);
        for (int64_t b = 0; b < blocks; ++b) ASSERT_TRUE(std::isnan(bad[size_t(b)])) << isa_name(level);
        ASSERT_EQ(std::vector<float>(bad.begin() + blocks, bad.end()),
                  std::vector<float>(scores.begin() + blocks, scores.end()));
        q[3] = kept;
        const std::vector<float> zeros(size_t(group * dim), 0.0f);
        for (const float x : scores_of(*index, 0, zeros, group, 0, blocks)) ASSERT_EQ(x, 0.0f);
      }
      ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok());
    }
  }
}

// Heads scored as one: the sum of their scores, and of boxes still a bound of the sum of their products.
TEST(VectorKinds, FoldedScoresAreTheSumsOfHeads) {
  for (const IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (const int dim : {64, 80, 6, 7}) {
      const int group = 5;
      const int64_t block = 3, n = 35 * block + 1;
      const Keys keys(KvType::kF16, n, dim, 31);
      const auto q = normal_values(group * dim, 9);
      for (const IndexSpec& spec : vector_specs(block)) {
        auto index = build_index(spec, index_shape(1, group, dim), n);
        index->append(0, keys.view(n), 0, n);
        if (spec.kind == IndexKind::kFixed && spec.reps > 1) {
          EXPECT_FALSE(index->adds_up());
          continue;
        }
        ASSERT_TRUE(index->adds_up());
        std::vector<float> folded(size_t(2 * dim));
        index->fold(q.data(), group, folded.data());
        const int64_t blocks = index->blocks(0);
        const auto single = scores_of(*index, 0, q, group, 0, blocks);
        std::vector<float> sums(static_cast<size_t>(blocks));
        index->score_folded(0, folded.data(), 0, blocks, {}, sums.data());
        double size = 0, largest = 0;  // of the queries
        for (int j = 0; j < group; ++j) size += norm1(q.data() + j * dim, dim);
        for (const float x : folded) largest = std::max(largest, std::abs(double(x)));
        for (const float x : q) largest = std::max(largest, std::abs(double(x)));
        for (int64_t b = 0; b < blocks; ++b) {
          double want = 0;
          for (int j = 0; j < group; ++j) want += double(single[size_t(j * blocks + b)]);
          // Centres and sides stay below 6 and 12; steps of queries of 16 bits as above.
          const double steps = spec.eight ? (group + 1) * dim * (2 * 0.51 * 6 + 12) * largest / 32512 : 0.0;
          ASSERT_NEAR(sums[size_t(b)], want, size * 18 * (dim + group) * 0x1p-24 + steps)
              << isa_name(level) << " kind " << int(spec.kind) << " dim " << dim << " block " << b;
          if (spec.kind != IndexKind::kMinMax) continue;
          for (const auto& key : block_rows(keys, block, b, n)) {
            double exact = 0;
            for (int64_t c = 0; c < group * dim; ++c) exact += double(q[size_t(c)]) * key[size_t(c % dim)];
            ASSERT_GE(double(sums[size_t(b)]), exact - size * 6 * (dim + group) * 0x1p-24) << isa_name(level);
          }
        }
        for (int64_t begin = 0; begin < blocks; begin += 7) {
          const int64_t end = std::min(blocks, begin + 20);
          std::vector<float> part(static_cast<size_t>(end - begin));
          index->score_folded(0, folded.data(), begin, end, {0, begin / 2}, part.data());
          for (int64_t b = begin; b < end; ++b) ASSERT_EQ(part[size_t(b - begin)], sums[size_t(b)]);
        }
      }
    }
  }
  ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok());
}

TEST(VectorKinds, RowByRowEqualsAtOnceEqualsRebuiltAfterTruncate) {
  const int dim = 64;
  for (const KvType type : {KvType::kF16, KvType::kQ8_0}) {
    for (const int64_t block : {int64_t{1}, int64_t{4}, int64_t{16}}) {
      const Keys keys(type, 300, dim, 21);
      const auto q = normal_values(3 * dim, 6);
      for (const IndexSpec& spec : vector_specs(block)) {
        for (const int64_t n : {int64_t{1}, block - 1, block, block + 1, 16 * block - 1, 16 * block, 16 * block + 1}) {
          if (n < 1) continue;
          const KvShape shape = index_shape(1, 3, dim);
          auto once = build_index(spec, shape, 300), single = build_index(spec, shape, 300);
          auto cut = build_index(spec, shape, 300);
          once->append(0, keys.view(n), 0, n);
          for (int64_t r = 0; r < n; ++r) single->append(0, keys.view(r + 1), r, r + 1);
          cut->append(0, keys.view(300), 0, 300);
          cut->truncate(0, keys.view(n), n);
          const int64_t blocks = once->blocks(0);
          ASSERT_EQ(cut->blocks(0), blocks);
          const auto want = scores_of(*once, 0, q, 3, 0, blocks);
          EXPECT_EQ(scores_of(*single, 0, q, 3, 0, blocks), want) << "kind " << int(spec.kind) << " n " << n;
          EXPECT_EQ(scores_of(*cut, 0, q, 3, 0, blocks), want) << "kind " << int(spec.kind) << " n " << n;
          // Continued after the cut, it equals one that never was longer.
          cut->append(0, keys.view(300), n, 300);
          once->append(0, keys.view(300), n, 300);
          EXPECT_EQ(scores_of(*cut, 0, q, 3, 0, cut->blocks(0)), scores_of(*once, 0, q, 3, 0, once->blocks(0)));
        }
      }
    }
  }
}

TEST(VectorKinds, ABlocksScoreDoesNotDependOnTheRange) {
  const int dim = 32;
  constexpr int64_t n = 1200, blocks = n / 4;  // more tiles of blocks than are scanned together
  const Keys keys(KvType::kF32, n, dim, 31);
  const auto q = normal_values(9 * dim, 7);  // more query heads than one pass takes
  for (const IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (const IndexSpec& spec : vector_specs(4)) {
      auto index = build_index(spec, index_shape(1, 9, dim), n);
      index->append(0, keys.view(n), 0, n);
      const auto all = scores_of(*index, 0, q, 9, 0, blocks);
      for (int64_t begin = 0; begin < blocks; begin += 37) {
        for (int64_t end = begin + 1; end <= blocks; end += 53) {
          const auto part = scores_of(*index, 0, q, 9, begin, end);
          for (int j = 0; j < 9; ++j) {
            for (int64_t b = begin; b < end; ++b) {
              ASSERT_EQ(part[size_t(j * (end - begin) + b - begin)], all[size_t(j * blocks + b)]);
            }
          }
        }
      }
    }
  }
}

TEST(MinMax, CheckVector) {
  // q and the keys of a page with box hi = (0.9, 1, 2, 3), lo = (-0.4, -0.5, -1, -7): the score is 2.9.
  Keys keys(KvType::kF32, 3, 4, 1);
  keys.set_row(0, {0.2f, 1.0f, -1.0f, 3.0f});
  keys.set_row(1, {-0.4f, -0.5f, 2.0f, 1.0f});
  keys.set_row(2, {0.9f, 0.1f, 0.0f, -7.0f});
  auto index = build_index({.kind = IndexKind::kMinMax, .block = 3}, index_shape(1, 1, 4), 3);
  index->append(0, keys.view(3), 0, 3);
  const auto s = scores_of(*index, 0, {1.0f, -2.0f, 0.5f, 0.0f}, 1, 0, 1);
  EXPECT_NEAR(s[0], 2.9, 1e-3);
}

TEST(MinMax, BoundsEveryKeyInEveryStoredTypeAndForm) {
  const std::pair<KvType, bool> cases[] = {{KvType::kF32, false},  {KvType::kF16, false},  {KvType::kBf16, false},
                                           {KvType::kQ8_0, false}, {KvType::kQ4_0, false}, {KvType::kF32, true},
                                           {KvType::kQ8_0, true}};
  for (const IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (const auto& [type, eight] : cases) {
      const int dim = 64;
      const int64_t n = 333;
      Keys keys(type, n, dim, 41);
      keys.set_row(77, std::vector<float>(size_t(dim), 60000.0f));
      auto index = build_index({.kind = IndexKind::kMinMax, .block = 16, .eight = eight}, index_shape(1, 4, dim), n);
      index->append(0, keys.view(n), 0, n);
      const auto q = normal_values(4 * dim, 8);
      const int64_t blocks = index->blocks(0);
      const auto scores = scores_of(*index, 0, q, 4, 0, blocks);
      for (int64_t r = 0; r < n; ++r) {
        const auto k = keys.row(r);
        for (int j = 0; j < 4; ++j) {
          double exact = 0, size = 0;
          for (int c = 0; c < dim; ++c) {
            exact += double(q[size_t(j * dim + c)]) * k[size_t(c)];
            size += std::abs(double(q[size_t(j * dim + c)]) * k[size_t(c)]);
          }
          // Only the fp32 sum of the scan may fall below the bound.
          ASSERT_GE(double(scores[size_t(j * blocks + r / 16)]), exact - size * dim * 0x1p-24) << kv_type_name(type);
        }
      }
    }
  }
  ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok());
}

// Queries that 16 bits round down in every channel, over keys that 8 bits hold exactly.
TEST(MinMax, BoundsWhatRoundedQueriesLose) {
  const int dim = 64;
  Keys keys(KvType::kF32, 1, dim, 1);
  keys.set_row(0, std::vector<float>(size_t(dim), 1.0f));
  std::vector<float> q(size_t(dim), 1.0f);
  for (int c = 1; c < dim; ++c) q[size_t(c)] = (float(100 + c) + 0.49f) / 32512.0f;
  double exact = 0;
  for (const float x : q) exact += x;
  for (const IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    auto index = build_index({.kind = IndexKind::kMinMax, .block = 1, .eight = true}, index_shape(1, 1, dim), 1);
    index->append(0, keys.view(1), 0, 1);
    std::vector<float> folded(size_t(2 * dim));
    index->fold(q.data(), 1, folded.data());
    float sum = 0;
    index->score_folded(0, folded.data(), 0, 1, {}, &sum);
    for (const float score : {scores_of(*index, 0, q, 1, 0, 1)[0], sum}) {
      EXPECT_GE(double(score), exact * (1 - dim * 0x1p-24)) << isa_name(level);
      EXPECT_LE(double(score), exact + dim * 1.1 / 32512) << isa_name(level);
    }
  }
  ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok());
}

TEST(MinMax, KeysBeyondHalfRangeStayFinite) {
  Keys keys(KvType::kF32, 2, 8, 1);
  keys.set_row(0, std::vector<float>(8, 3e38f));
  keys.set_row(1, std::vector<float>(8, -3e38f));
  auto index = build_index({.kind = IndexKind::kMinMax, .block = 2}, index_shape(1, 1, 8), 2);
  index->append(0, keys.view(2), 0, 2);
  EXPECT_EQ(scores_of(*index, 0, std::vector<float>(8, 0.0f), 1, 0, 1)[0], 0.0f);
}

TEST(Max, ChannelsThatAreAlwaysNegativeStayNegative) {
  const Keys keys(KvType::kF32, 8, 32, 51, -20.0f);
  auto index = build_index({.kind = IndexKind::kMax, .block = 8}, index_shape(1, 1, 32), 8);
  index->append(0, keys.view(8), 0, 8);
  EXPECT_LT(scores_of(*index, 0, std::vector<float>(32, 1.0f), 1, 0, 1)[0], -32 * 10.0f);
}

TEST(Mean, OpenBlockDividesByItsRows) {
  Keys keys(KvType::kF32, 3, 32, 1);
  for (int r = 0; r < 3; ++r) keys.set_row(r, std::vector<float>(32, float(r + 1)));
  auto index = build_index({.kind = IndexKind::kMean, .block = 16}, index_shape(1, 1, 32), 16);
  index->append(0, keys.view(3), 0, 3);
  EXPECT_EQ(scores_of(*index, 0, std::vector<float>(32, 1.0f), 1, 0, 1)[0], 64.0f);
}

TEST(Dynamic, KeepsTheKeysWithMostMassPerKvHead) {
  const int dim = 32, group = 2;
  const int64_t block = 8, n = 37;
  const Keys keys(KvType::kF32, 64, dim, 61);
  const IndexSpec spec{.kind = IndexKind::kDynamic, .block = block, .reps = 2};
  auto index = build_index(spec, index_shape(2, group, dim), 64);
  index->append(1, keys.view(n), 0, n);
  std::vector<float> mass = normal_values(group * 40, 9);
  for (float& m : mass) m = std::abs(m);
  mass[3] = NAN;            // counts as nothing
  mass[10] = mass[12] = 5;  // a tie: the lower row first
  mass[11] = 5;
  mass[40 + 10] = mass[40 + 11] = mass[40 + 12] = 0;
  index->set_importance(1, keys.view(n), mass.data(), 40, n);
  const auto q = normal_values(group * dim, 10);
  const auto check = [&](int64_t rows, int64_t voted) {
    const int64_t blocks = index->blocks(1);
    const auto scores = scores_of(*index, 1, q, group, 0, blocks);
    for (int64_t b = 0; b < blocks; ++b) {
      std::vector<int64_t> order;
      for (int64_t r = b * block; r < std::min(rows, (b + 1) * block); ++r) order.push_back(r);
      if (b < voted) {
        const auto total = [&](int64_t r) {
          return (mass[size_t(r)] > 0 ? mass[size_t(r)] : 0) + mass[size_t(40 + r)];
        };
        std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) { return total(x) > total(y); });
        order.resize(2);
      } else {  // blocks filled later: evenly spaced keys
        order = order.size() > 4 ? std::vector<int64_t>{b * block, b * block + 4} : std::vector<int64_t>{b * block};
      }
      for (int j = 0; j < group; ++j) {
        double want = -INFINITY;
        for (const int64_t r : order) want = std::max(want, dot(q.data() + j * dim, keys.row(r)));
        ASSERT_NEAR(scores[size_t(j * blocks + b)], want, kHalfError * norm1(q.data() + j * dim, dim)) << b;
      }
    }
  };
  check(n, 4);
  for (int64_t r = n; r < 50; ++r) index->append(1, keys.view(r + 1), r, r + 1);
  check(50, 4);
  index->truncate(1, keys.view(20), 20);  // blocks 0 and 1 keep theirs, block 2 is open again
  check(20, 2);
  index->append(1, keys.view(64), 20, 64);
  check(64, 2);
}

TEST(MakeIndex, RefusesWhatCannotBe) {
  const KvShape shape = index_shape(1, 1, 32);
  EXPECT_EQ(make_index({}, shape, 10).status().code(), Code::kInvalidArgument);
  EXPECT_FALSE(make_index({.kind = IndexKind::kMean, .block = 0}, shape, 10).ok());
  EXPECT_FALSE(make_index({.kind = IndexKind::kFixed, .block = 4, .reps = 5}, shape, 10).ok());
  EXPECT_FALSE(make_index({.kind = IndexKind::kDynamic, .block = 4, .reps = 0}, shape, 10).ok());
  EXPECT_FALSE(make_index({.kind = IndexKind::kMean}, shape, INT64_MAX / 4).ok());
}

}  // namespace
}  // namespace longkv::test
