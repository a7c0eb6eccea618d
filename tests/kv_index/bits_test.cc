// The one-bit index against its definition in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>

#include "base/cpu.h"
#include "kv/index/bits_layout.h"
#include "kv_index/harness.h"

namespace longkv::test {
namespace {

using Vec = std::vector<double>;

// Hadamard by its matrix: entry (i, j) is (-1)^popcount(i & j) / sqrt(run), in runs of the largest power of two.
Vec rotate(const Vec& x, bool on) {
  if (!on) return x;
  const size_t run = x.size() & (~x.size() + 1);
  Vec y(x.size(), 0.0);
  for (size_t first = 0; first < x.size(); first += run) {
    for (size_t i = 0; i < run; ++i) {
      for (size_t j = 0; j < run; ++j) {
        y[first + i] += (std::popcount(i & j) % 2 == 0 ? 1.0 : -1.0) * x[first + j] / std::sqrt(double(run));
      }
    }
  }
  return y;
}

struct Estimate {
  double score = 0;
  double bound = 0;  // of what tables, half-precision magnitudes and signs of near-zero channels may change
};

Estimate estimate(const Vec& q, const Vec& k) {
  Estimate e;
  for (size_t g = 0; g < q.size(); g += 32) {
    const size_t end = std::min(q.size(), g + 32);
    double magnitude = 0, sum = 0, size = 0, largest = 0;
    for (size_t c = g; c < end; ++c) magnitude += std::abs(k[c]) / double(end - g);
    for (size_t c = g; c < end; c += 4) {
      double nibble = 0;
      for (size_t i = c; i < std::min(end, c + 4); ++i) nibble += std::abs(q[i]);
      largest = std::max(largest, nibble);
    }
    for (size_t c = g; c < end; ++c) {
      sum += k[c] >= 0 ? q[c] : -q[c];
      size += std::abs(q[c]);
      if (std::abs(k[c]) < 1e-5) e.bound += 2 * magnitude * std::abs(q[c]);
    }
    e.score += magnitude * sum;
    e.bound += magnitude * (8 * 0.5 * largest / kBitsBias + size * (0x1p-11 + 1e-5));
  }
  return e;
}

TEST(Bits, TokenScoresStayWithinTheTableError) {
  for (const IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (const int dim : {64, 128, 80, 40}) {
      for (const bool turn : {false, true}) {
        const int group = dim == 80 ? 7 : dim == 40 ? 3 : 4;
        const int64_t n = 150;  // two tiles and an open one
        const Keys keys(KvType::kF16, n, dim, 71);
        auto index = build_index({.kind = IndexKind::kBits, .block = 1, .rotate = turn}, index_shape(2, group, dim), n);
        index->append(1, keys.view(n), 0, n);
        const auto q = normal_values(group * dim, 12);
        const auto scores = scores_of(*index, 1, q, group, 0, n);
        double used = 0;
        for (int j = 0; j < group; ++j) {
          const Vec turned = rotate(Vec(q.begin() + j * dim, q.begin() + (j + 1) * dim), turn);
          for (int64_t r = 0; r < n; ++r) {
            const Estimate e = estimate(turned, rotate(keys.row(r), turn));
            const double error = std::abs(scores[size_t(j * n + r)] - e.score);
            ASSERT_LE(error, e.bound) << isa_name(level) << " dim " << dim << " head " << j << " row " << r;
            used = std::max(used, error / e.bound);
          }
        }
        EXPECT_GT(used, 0.02);  // the bound means something
      }
    }
  }
  ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok());
}

TEST(Bits, EstimatesFollowTheTrueProducts) {
  // For normal keys the sign keeps sqrt(2 / pi) = 0.798 of the correlation.
  const int dim = 128;
  const int64_t n = 4000;
  const Keys keys(KvType::kF16, n, dim, 72);
  auto index = build_index({.kind = IndexKind::kBits, .block = 1}, index_shape(1, 1, dim), n);
  index->append(0, keys.view(n), 0, n);
  const auto q = normal_values(dim, 13);
  const auto s = scores_of(*index, 0, q, 1, 0, n);
  double ss = 0, tt = 0, st = 0;
  for (int64_t r = 0; r < n; ++r) {
    const auto k = keys.row(r);
    double t = 0;
    for (int c = 0; c < dim; ++c) t += double(q[size_t(c)]) * k[size_t(c)];
    ss += double(s[size_t(r)]) * s[size_t(r)];
    tt += t * t;
    st += s[size_t(r)] * t;
  }
  EXPECT_NEAR(st / std::sqrt(ss * tt), 0.798, 0.03);
}

TEST(Bits, BlockScoreIsTheLogOfItsTokensMass) {
  const int dim = 64, group = 3;
  const int64_t n = 401;
  const Keys keys(KvType::kF16, n, dim, 73);
  const auto q = normal_values(group * dim, 14);
  const KvShape shape = index_shape(1, group, dim);
  auto tokens = build_index({.kind = IndexKind::kBits, .block = 1}, shape, n);
  tokens->append(0, keys.view(n), 0, n);
  const auto s = scores_of(*tokens, 0, q, group, 0, n);
  for (const int64_t block : {2, 3, 7, 16, 64, 128, 600}) {
    auto index = build_index({.kind = IndexKind::kBits, .block = block}, shape, n);
    index->append(0, keys.view(n), 0, n);
    const int64_t blocks = index->blocks(0);
    const auto scores = scores_of(*index, 0, q, group, 0, blocks);
    for (int j = 0; j < group; ++j) {
      for (int64_t b = 0; b < blocks; ++b) {
        double sum = 0;
        for (int64_t r = b * block; r < std::min(n, (b + 1) * block); ++r) sum += std::exp(s[size_t(j * n + r)] / 8.0);
        ASSERT_NEAR(scores[size_t(j * blocks + b)], 8.0 * std::log(sum), 2e-4) << "block " << block << " b " << b;
      }
    }
    for (int64_t begin = 0; begin < blocks; begin += 5) {
      const int64_t end = std::min(blocks, begin + 3);
      const auto part = scores_of(*index, 0, q, group, begin, end);
      for (int64_t b = begin; b < end; ++b) ASSERT_EQ(part[size_t(b - begin)], scores[size_t(b)]);
    }
  }
}

TEST(Bits, RowByRowEqualsAtOnceEqualsRebuiltAfterTruncate) {
  const int dim = 64;
  const Keys keys(KvType::kQ8_0, 200, dim, 74), other(KvType::kQ8_0, 200, dim, 75);
  const auto q = normal_values(2 * dim, 15);
  for (const int64_t block : {1, 16, 48}) {
    for (const int64_t n : {int64_t{1}, block, block + 1, int64_t{63}, int64_t{64}, int64_t{65}, int64_t{199}}) {
      const IndexSpec spec{.kind = IndexKind::kBits, .block = block};
      const KvShape shape = index_shape(1, 2, dim);
      auto once = build_index(spec, shape, 200), single = build_index(spec, shape, 200);
      auto cut = build_index(spec, shape, 200);
      once->append(0, keys.view(n), 0, n);
      for (int64_t r = 0; r < n; ++r) single->append(0, keys.view(r + 1), r, r + 1);
      cut->append(0, other.view(200), 0, 200);  // other rows first: nothing of them may stay
      cut->truncate(0, other.view(0), 0);
      cut->append(0, keys.view(200), 0, 200);
      cut->truncate(0, keys.view(n), n);
      const int64_t blocks = once->blocks(0);
      const auto want = scores_of(*once, 0, q, 2, 0, blocks);
      EXPECT_EQ(scores_of(*single, 0, q, 2, 0, blocks), want);
      ASSERT_EQ(cut->blocks(0), blocks);
      EXPECT_EQ(scores_of(*cut, 0, q, 2, 0, blocks), want);
    }
  }
}

TEST(Bits, BytesAndDegenerateQueries) {
  const Keys keys(KvType::kF16, 20, 64, 76);
  auto index = build_index({.kind = IndexKind::kBits, .block = 16}, index_shape(1, 1, 64), 64);
  index->append(0, keys.view(20), 0, 20);
  EXPECT_EQ(index->bytes_scored(3), 3 * 16 * 12);
  EXPECT_EQ(index->bytes_held(), 64 * 12);
  const auto zero = scores_of(*index, 0, std::vector<float>(64, 0.0f), 1, 0, 2);
  EXPECT_NEAR(zero[0], 8 * std::log(16.0), 1e-4);
  EXPECT_NEAR(zero[1], 8 * std::log(4.0), 1e-4);
  scores_of(*index, 0, std::vector<float>(64, NAN), 1, 0, 2);  // must not crash; selection ranks NaN last
}

}  // namespace
}  // namespace longkv::test
