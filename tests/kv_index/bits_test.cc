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

Estimate estimate(const Vec& q, const Vec& k, double tile_magnitude, bool unbiased = false) {
  Estimate e;
  double largest = 0;
  for (size_t c = 0; c < q.size(); c += 4) {
    double nibble = 0;
    for (size_t i = c; i < std::min(q.size(), c + 4); ++i) nibble += std::abs(q[i]);
    largest = std::max(largest, nibble);
  }
  const double step = largest / kBitsBias;
  for (size_t g = 0; g < q.size(); g += 32) {
    const size_t end = std::min(q.size(), g + 32);
    double magnitude = 0, square = 0, sum = 0, size = 0;
    for (size_t c = g; c < end; ++c) magnitude += std::abs(k[c]) / double(end - g);
    for (size_t c = g; c < end; ++c) square += k[c] * k[c];
    if (unbiased) magnitude = square / (magnitude * double(end - g));
    for (size_t c = g; c < end; ++c) {
      sum += k[c] >= 0 ? q[c] : -q[c];
      size += std::abs(q[c]);
      if (std::abs(k[c]) < 1e-5) e.bound += 2 * magnitude * std::abs(q[c]);
    }
    e.score += magnitude * sum;
    e.bound += magnitude * (8 * 0.5 * step + size * (0x1p-11 + 1e-5)) + step * tile_magnitude / 32;
  }
  return e;
}

// The largest magnitude of any group in the tile of row r.
double tile_magnitude(const Keys& keys, int64_t r, int64_t n, bool turn, bool unbiased) {
  double largest = 0;
  for (int64_t t = r / 64 * 64; t < std::min(n, r / 64 * 64 + 64); ++t) {
    const Vec k = rotate(keys.row(t), turn);
    for (size_t g = 0; g < k.size(); g += 32) {
      double sum = 0, square = 0;
      const size_t end = std::min(k.size(), g + 32);
      for (size_t c = g; c < end; ++c) sum += std::abs(k[c]), square += k[c] * k[c];
      largest = std::max(largest, unbiased ? square / sum : sum / double(end - g));
    }
  }
  return largest;
}

TEST(Bits, TokenScoresStayWithinTheTableError) {
  for (const IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (const int dim : {64, 128, 80, 40, 288, 544}) {
      for (const bool turn : {false, true}) {
        const bool unbiased = turn && dim != 64;
        const int group = dim == 80 ? 7 : dim == 40 ? 3 : dim > 256 ? 1 : 4;
        const int64_t n = 150;  // two tiles and an open one
        const Keys keys(KvType::kF16, n, dim, 71);
        const IndexSpec spec{.kind = IndexKind::kBits, .block = 1, .rotate = turn, .unbiased = unbiased};
        auto index = build_index(spec, index_shape(2, group, dim), n);
        index->append(1, keys.view(n), 0, n);
        const auto q = normal_values(group * dim, 12);
        const auto scores = scores_of(*index, 1, q, group, 0, n);
        double used = 0;
        for (int64_t r = 0; r < n; ++r) {
          const double tile = tile_magnitude(keys, r, n, turn, unbiased);
          for (int j = 0; j < group; ++j) {
            const Vec turned = rotate(Vec(q.begin() + j * dim, q.begin() + (j + 1) * dim), turn);
            const Estimate e = estimate(turned, rotate(keys.row(r), turn), tile, unbiased);
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

TEST(Bits, UnbiasedMagnitudesEstimateTheProductOnAverage) {
  // Over random keys of one direction class the mean error of the unbiased estimate vanishes, that of the closest
  // approximation is (2 / pi - 1) of the product. 4 standard errors: a chance below 1e-4 of a false alarm.
  const int dim = 128;
  const int64_t n = 6000;
  Keys keys(KvType::kF32, n, dim, 77);
  const auto q = normal_values(dim, 16);
  for (int64_t r = 0; r < n; ++r) {  // keys that lean towards q, so that products are not zero on average
    std::vector<float> key(size_t(dim), 0.0f);
    const Vec k = keys.row(r);
    for (int c = 0; c < dim; ++c) key[size_t(c)] = float(k[size_t(c)]) + 0.5f * q[size_t(c)];
    keys.set_row(r, key);
  }
  // Mean errors of the closest codes of a normal value: one, two and four bits. The last are levels of even steps up to
  // the largest of 32 values.
  const double shrinks[] = {2 / M_PI - 1, -0.118, -0.008};
  for (int i = 0; i < 6; ++i) {
    const bool unbiased = i % 2 == 0;
    const int width = i / 2;
    SCOPED_TRACE(testing::Message() << (1 << width) << " bits" << (unbiased ? ", unbiased" : ""));
    const IndexSpec spec{.kind = IndexKind::kBits, .block = 1, .width = width, .unbiased = unbiased};
    auto index = build_index(spec, index_shape(1, 1, dim), n);
    index->append(0, keys.view(n), 0, n);
    const auto s = scores_of(*index, 0, q, 1, 0, n);
    double mean = 0, square = 0, product = 0;
    for (int64_t r = 0; r < n; ++r) {
      const Vec k = keys.row(r);
      double t = 0;
      for (int c = 0; c < dim; ++c) t += double(q[size_t(c)]) * k[size_t(c)];
      const double error = double(s[size_t(r)]) - t;
      mean += error / double(n);
      square += error * error / double(n);
      product += t / double(n);
    }
    const double standard_error = std::sqrt(square / double(n));
    if (unbiased) {
      // What is left of order 1 / dim: the rotation is one, not an average over all.
      EXPECT_LE(std::abs(mean), 4 * standard_error + (width == 0 ? 0.05 : 0.02) * product);
    } else {
      EXPECT_NEAR(mean, shrinks[width] * product, (width == 0 ? 0.08 : 0.02) * product);
    }
  }
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

TEST(Bits, BlockScoreIsTheLogOfItsTokensMassOrTheirMaximum) {
  for (const IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (const float size : {1.0f, 0.01f, 30.0f}) {  // of queries: from nearly uniform to one token alone
      const int dim = 64, group = 5;
      const int64_t n = 401;
      const Keys keys(KvType::kF16, n, dim, 73);
      auto q = normal_values(group * dim, 14);
      for (float& x : q) x *= size;
      const KvShape shape = index_shape(1, group, dim);
      auto tokens = build_index({.kind = IndexKind::kBits, .block = 1}, shape, n);
      tokens->append(0, keys.view(n), 0, n);
      const auto s = scores_of(*tokens, 0, q, group, 0, n);
      for (const bool max : {false, true}) {
        for (const int64_t block : {2, 3, 7, 16, 48, 64, 128, 600}) {
          auto index = build_index({.kind = IndexKind::kBits, .block = block, .pool_max = max}, shape, n);
          index->append(0, keys.view(n), 0, n);
          const int64_t blocks = index->blocks(0);
          const auto scores = scores_of(*index, 0, q, group, 0, blocks);
          for (int j = 0; j < group; ++j) {
            for (int64_t b = 0; b < blocks; ++b) {
              double peak = -INFINITY, sum = 0;
              for (int64_t r = b * block; r < std::min(n, (b + 1) * block); ++r) {
                peak = std::max(peak, double(s[size_t(j * n + r)]));
              }
              for (int64_t r = b * block; r < std::min(n, (b + 1) * block); ++r) {
                sum += std::exp((s[size_t(j * n + r)] - peak) / 8.0);
              }
              const double want = max ? peak : peak + 8.0 * std::log(sum);
              // Units of 16 use the half-precision exponential: 6.2% of the mass, and the integer step of its argument.
              const double bound = 1e-5 * (1 + std::abs(peak)) + (max ? 0 : block % 16 == 0 ? 8 * 0.07 : 2e-4);
              ASSERT_NEAR(scores[size_t(j * blocks + b)], want, bound)
                  << "block " << block << " b " << b << " " << size;
            }
          }
          for (int64_t begin = 0; begin < blocks; begin += 5) {
            const int64_t end = std::min(blocks, begin + 3);
            const auto part = scores_of(*index, 0, q, group, begin, end);
            for (int64_t b = begin; b < end; ++b) ASSERT_EQ(part[size_t(b - begin)], scores[size_t(b)]);
          }
        }
      }
    }
  }
  ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok());
}

TEST(Bits, OnlyTokensThatAreNotFiniteScoreSo) {
  for (const float value : {NAN, -NAN, INFINITY, -INFINITY}) {
    for (const int64_t block : {1, 4, 16, 32}) {
      Keys keys(KvType::kF32, 200, 64, 78);
      std::vector<float> bad(64, 1.0f);
      bad[5] = value;
      keys.set_row(70, bad);
      auto index = build_index({.kind = IndexKind::kBits, .block = block}, index_shape(1, 2, 64), 200);
      index->append(0, keys.view(200), 0, 200);
      const auto q = normal_values(128, 17);
      const int64_t blocks = index->blocks(0);
      const auto s = scores_of(*index, 0, q, 2, 0, blocks);
      for (int64_t i = 0; i < 2 * blocks; ++i) {
        EXPECT_EQ(std::isfinite(s[size_t(i)]), i % blocks != 70 / block)
            << value << " block " << block << " place " << i << " score " << s[size_t(i)];
      }
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
  for (const float x : scores_of(*index, 0, std::vector<float>(64, NAN), 1, 0, 2)) EXPECT_TRUE(std::isnan(x));
}

}  // namespace
}  // namespace longkv::test
