// Kinds that know single tokens: SparQ's channels, low-bit keys, hash tables; against their definitions in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <numeric>

#include "base/cpu.h"
#include "kv/index/bits_layout.h"
#include "kv/index/lsh.h"
#include "kv_index/harness.h"

namespace longkv::test {
namespace {

double dot(const float* q, const std::vector<double>& k) {
  double sum = 0;
  for (size_t c = 0; c < k.size(); ++c) sum += double(q[c]) * k[c];
  return sum;
}

TEST(Channels, ScoreTheLargestChannelsOfTheGroupAtEveryLevel) {
  for (const IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (const int group : {1, 3, 7}) {
      for (const int r : {1, 9, 48}) {
        const int dim = 48;
        const int64_t n = 530;  // two tiles and an open one
        const Keys keys(KvType::kF16, n, dim, 81);
        auto index =
            build_index({.kind = IndexKind::kChannels, .block = 1, .channels = r}, index_shape(2, group, dim), n);
        index->append(1, keys.view(n), 0, n);
        const auto q = normal_values(group * dim, 82);
        const auto s = scores_of(*index, 1, q, group, 0, n);
        std::vector<double> size(static_cast<size_t>(dim));
        for (int i = 0; i < group * dim; ++i) size[size_t(i % dim)] += std::abs(double(q[size_t(i)]));
        std::vector<int> order(static_cast<size_t>(dim));
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return size[size_t(a)] > size[size_t(b)]; });
        for (int j = 0; j < group; ++j) {
          double all = 0, held = 0;
          for (int c = 0; c < dim; ++c) all += std::abs(double(q[size_t(j * dim + c)]));
          for (int i = 0; i < r; ++i) held += std::abs(double(q[size_t(j * dim + order[size_t(i)])]));
          for (int64_t t = 0; t < n; ++t) {
            const auto k = keys.row(t);
            double want = 0, magnitude = 0;
            for (int i = 0; i < r; ++i) {
              const double term = double(q[size_t(j * dim + order[size_t(i)])]) * k[size_t(order[size_t(i)])];
              want += term;
              magnitude += std::abs(term);
            }
            const double root = std::sqrt(held / all);
            ASSERT_NEAR(s[size_t(j * n + t)], want / root, (magnitude / root + 1e-3) * 64 * 0x1p-23);
          }
        }
        const auto part = scores_of(*index, 1, q, group, 250, 263);
        for (int64_t t = 0; t < 13; ++t) ASSERT_EQ(part[size_t(t)], s[size_t(250 + t)]);
        EXPECT_EQ(index->bytes_scored(10), 10 * r * 2);
      }
    }
  }
  ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok());
}

// The levels of a key as the layout says: codes from a first scale, the magnitude that fits them best.
std::vector<double> low_bit_key(const std::vector<double>& k, int width) {
  std::vector<double> out(k.size());
  const size_t per_group = size_t(32 >> width);
  const double middle = width == 1 ? 1.5 : 7.5;
  for (size_t g = 0; g < k.size(); g += per_group) {
    const size_t end = std::min(k.size(), g + per_group);
    double largest = 0, sum = 0;
    for (size_t c = g; c < end; ++c) largest = std::max(largest, std::abs(k[c])), sum += std::abs(k[c]);
    const double scale = width == 1 ? 1.248 * sum / double(end - g) : largest / middle;
    double product = 0, square = 0;
    for (size_t c = g; c < end; ++c) {
      const double level = std::clamp(std::nearbyint(k[c] / scale + middle), 0.0, 2 * middle) - middle;
      out[c] = level;
      product += level * k[c];
      square += level * level;
    }
    for (size_t c = g; c < end; ++c) out[c] *= product / square;
  }
  return out;
}

TEST(LowBits, ScoresFollowTheirLevels) {
  for (const IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (const int width : {1, 2}) {
      const int dim = 64, group = 3;
      const int64_t n = 131;
      const Keys keys(KvType::kF32, n, dim, 83);
      const IndexSpec spec{.kind = IndexKind::kBits, .block = 1, .rotate = false, .width = width};
      auto index = build_index(spec, index_shape(1, group, dim), n);
      index->append(0, keys.view(n), 0, n);
      EXPECT_EQ(index->bytes_scored(1), width == 1 ? 16 + 8 : 32 + 16);
      const auto q = normal_values(group * dim, 84);
      const auto s = scores_of(*index, 0, q, group, 0, n);
      double error2 = 0, exact2 = 0;
      for (int j = 0; j < group; ++j) {
        const float* own = q.data() + j * dim;
        double largest = 0;
        const int per_nibble = 4 >> width;
        for (int c = 0; c < dim; c += per_nibble) {
          double sum = 0;
          for (int i = 0; i < per_nibble; ++i) sum += std::abs(double(own[c + i])) * (width == 1 ? 1.5 : 7.5);
          largest = std::max(largest, sum);
        }
        for (int64_t r = 0; r < n; ++r) {
          const auto k = keys.row(r);
          const double want = dot(own, low_bit_key(k, width));
          // Half a step per nibble and group magnitude; magnitudes of normal keys stay below 2.
          const double step = largest / kBitsBias, groups = double(dim << width) / 32;
          ASSERT_NEAR(s[size_t(j * n + r)], want, groups * (4 * step + step / 32) * 2.0 + 0.02) << width;
          const double exact = dot(own, k);
          error2 += std::pow(s[size_t(j * n + r)] - exact, 2);
          exact2 += exact * exact;
        }
      }
      // Of normal keys two bits leave 12% of the energy, four bits about 1%.
      EXPECT_LT(error2 / exact2, width == 1 ? 0.16 : 0.03);
    }
  }
  ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok());
}

TEST(LowBits, KeysBeyondTheLargestAreRefused) {
  const auto code = [](const IndexSpec& spec, int dim) {
    return make_index(spec, index_shape(1, 1, dim), 8).status().code();
  };
  for (const int width : {0, 1, 2}) {
    const IndexSpec spec{.kind = IndexKind::kBits, .block = 1, .width = width};
    EXPECT_EQ(code(spec, 1024 >> width), Code::kOk);
    EXPECT_EQ(code(spec, (1024 >> width) + 1), Code::kInvalidArgument) << width;
  }
  EXPECT_EQ(code({.kind = IndexKind::kLabels, .block = 1, .channels = 256}, 1024), Code::kOk);
  EXPECT_EQ(code({.kind = IndexKind::kLabels, .block = 1, .channels = 257}, 1024), Code::kInvalidArgument);
}

// The largest keys that are not: sums of all groups stay within their 16 bits at every level.
TEST(LowBits, TheLargestKeysSumUpWithoutOverflow) {
  const int dim = 1024, n = 70;
  Keys keys(KvType::kF32, n, dim, 86);
  const std::vector<float> ones(size_t(dim), 1.0f), minus(size_t(dim), -1.0f);
  // Larger than all others of their tiles, with every channel's sign as the query's.
  keys.set_row(3, std::vector<float>(size_t(dim), 4.0f));
  keys.set_row(67, std::vector<float>(size_t(dim), -4.0f));
  for (const IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    const IndexSpec spec{.kind = IndexKind::kBits, .block = 1, .rotate = false};
    auto index = build_index(spec, index_shape(1, 2, dim), n);
    index->append(0, keys.view(n), 0, n);
    std::vector<float> q(ones);
    q.insert(q.end(), minus.begin(), minus.end());
    const auto s = scores_of(*index, 0, q, 2, 0, n);
    // Codes and tables are exact; 32 groups are off as bits_layout.h says.
    const double step = 4.0 / kBitsBias, allowed = 32 * step * 4.0 * 4 / 15;
    for (const auto& [row, sign] : {std::pair<int, int>{3, 1}, {67, -1}}) {
      EXPECT_NEAR(s[size_t(row)], sign * 4 * dim, allowed) << isa_name(level);
      EXPECT_NEAR(s[size_t(n + row)], -sign * 4 * dim, allowed) << isa_name(level);
    }
  }
  ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok());
}

TEST(Labels, TakeTheChannelsWithTheLargestProductsOfThePrompt) {
  const int dim = 64, group = 2;
  const int64_t n = 300;
  Keys keys(KvType::kF32, n, dim, 85);
  for (int64_t r = 0; r < n; ++r) {  // channels 3, 10, 40, 41 are large in keys
    auto k = keys.row(r);
    for (const size_t c : {3u, 10u, 40u, 41u}) k[c] *= 8;
    keys.set_row(r, {k.begin(), k.end()});
  }
  const IndexSpec spec{.kind = IndexKind::kLabels, .block = 1, .channels = 2};
  auto index = build_index(spec, index_shape(1, group, dim), n);
  auto q = normal_values(20 * group * dim, 86);
  for (size_t i = 0; i < q.size(); ++i) {
    if (i % 64 == 10 || i % 64 == 41) q[i] *= 5;  // and of these 10 and 41 in queries
  }
  index->observe_queries(0, q.data(), group, 20, group * dim);
  index->append(0, keys.view(250), 0, 250);
  EXPECT_EQ(index->covered(0), 0);  // nothing can be scored before the prompt ends
  index->finish_prompt(0, keys.view(250));
  EXPECT_EQ(index->covered(0), 250);
  for (int64_t r = 250; r < n; ++r) index->append(0, keys.view(r + 1), r, r + 1);
  const auto s = scores_of(*index, 0, q, group, 0, n);
  double st = 0, ss = 0, tt = 0;
  for (int64_t r = 0; r < n; ++r) {
    const auto k = keys.row(r);
    const double want = double(q[10]) * k[10] + double(q[41]) * k[41];
    st += want * s[size_t(r)];
    ss += double(s[size_t(r)]) * s[size_t(r)];
    tt += want * want;
  }
  EXPECT_GT(st / std::sqrt(ss * tt), 0.99);
  EXPECT_EQ(index->bytes_scored(1), 6);

  // Channels from a file; every complaint names the line.
  const std::string path = testing::TempDir() + "/channels.tsv";
  const auto with_file = [&](const std::string& text) {
    std::ofstream(path) << text;
    IndexSpec from = spec;
    from.file = path;
    return make_index(from, index_shape(1, group, dim), n);
  };
  auto given = with_file("# layer head channels\n0 0 10 41\n1 0 5 6\n");
  ASSERT_TRUE(given.ok()) << given.status().message();
  given.value()->append(0, keys.view(n), 0, n);
  EXPECT_EQ(scores_of(*given.value(), 0, q, group, 0, n), s);
  EXPECT_FALSE(with_file("0 0 10\n").ok());
  EXPECT_FALSE(with_file("0 0 10 64\n").ok());
  EXPECT_FALSE(with_file("0 1 10 41\n").ok());
  EXPECT_FALSE(with_file("0 0 10 x\n").ok());
  EXPECT_FALSE(with_file("1 0 10 41\n").ok());
  std::remove(path.c_str());
}

TEST(TokenKinds, RowByRowEqualsAtOnceEqualsRebuiltAfterTruncate) {
  const int dim = 32;
  const int64_t n = 700, prompt = 600;
  const Keys keys(KvType::kQ8_0, n, dim, 87), other(KvType::kQ8_0, n, dim, 88);
  const auto q = normal_values(2 * dim, 89);
  for (const IndexSpec& spec : {IndexSpec{.kind = IndexKind::kChannels, .block = 1, .channels = 8},
                                IndexSpec{.kind = IndexKind::kLabels, .block = 1, .channels = 8},
                                IndexSpec{.kind = IndexKind::kBits, .block = 1, .width = 2},
                                IndexSpec{.kind = IndexKind::kLsh, .block = 1, .hash_bits = 4, .tables = 20},
                                IndexSpec{.kind = IndexKind::kRepr, .block = 16, .reps = 3}}) {
    const KvShape shape = index_shape(1, 2, dim);
    auto once = build_index(spec, shape, n), steps = build_index(spec, shape, n), cut = build_index(spec, shape, n);
    const auto prompt_in = [&](BlockIndex& index, int64_t chunk) {
      for (int64_t r = 0; r < prompt; r += chunk) index.append(0, keys.view(r + chunk), r, r + chunk);
      index.finish_prompt(0, keys.view(prompt));
    };
    prompt_in(*once, prompt);
    prompt_in(*steps, 30);
    cut->append(0, other.view(n), 0, n);  // other rows first: nothing of them may stay
    cut->finish_prompt(0, other.view(n));
    cut->truncate(0, other.view(0), 0);
    prompt_in(*cut, 60);
    for (int64_t r = prompt; r < n; ++r) {
      for (BlockIndex* index : {once.get(), steps.get(), cut.get()}) index->append(0, keys.view(r + 1), r, r + 1);
    }
    cut->truncate(0, keys.view(650), 650);
    for (int64_t r = 650; r < n; ++r) cut->append(0, keys.view(r + 1), r, r + 1);
    const int64_t blocks = once->blocks(0);
    const auto want = scores_of(*once, 0, q, 2, 0, blocks);
    EXPECT_EQ(scores_of(*steps, 0, q, 2, 0, blocks), want) << int(spec.kind);
    EXPECT_EQ(scores_of(*cut, 0, q, 2, 0, blocks), want) << int(spec.kind);
    EXPECT_EQ(cut->covered(0), once->covered(0));
  }
}

TEST(Repr, IsTheMeanOfEachQueryHeadsHeaviestKeys) {
  const int dim = 16, group = 3;
  const int64_t block = 8, n = 44;
  const Keys keys(KvType::kF32, n, dim, 90);
  auto index = build_index({.kind = IndexKind::kRepr, .block = block, .reps = 3}, index_shape(1, group, dim), n);
  index->append(0, keys.view(n), 0, n);
  std::vector<float> mass = normal_values(group * n, 91);
  for (float& m : mass) m = std::abs(m);
  mass[5] = NAN;
  index->set_importance(0, keys.view(n), mass.data(), n, n);
  const auto q = normal_values(group * dim, 92);
  const auto s = scores_of(*index, 0, q, group, 0, 6);
  for (int j = 0; j < group; ++j) {
    for (int64_t b = 0; b < 6; ++b) {
      std::vector<int64_t> order;
      if (b < 5) {
        for (int64_t r = b * block; r < (b + 1) * block; ++r) order.push_back(r);
        const auto weight = [&](int64_t r) {
          const float m = mass[size_t(j * n + r)];
          return m > 0 ? m : 0.0f;
        };
        std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) { return weight(x) > weight(y); });
        order.resize(3);
      } else {
        order = {40, 42};  // evenly spaced places 0, 2, 5 of an open block of four
      }
      double want = 0;
      for (const int64_t r : order) want += dot(q.data() + j * dim, keys.row(r)) / double(order.size());
      ASSERT_NEAR(s[size_t(j * 6 + b)], want, 0.05) << "head " << j << " block " << b;
    }
  }
}

// Rows whose code equals the query's in at least two tables, from the tables' own scores.
TEST(Lsh, DrawsWhatCollidesTwiceInSortedAndOpenSegments) {
  const int dim = 16;
  const int64_t n = LshIndex::kSegment + 300;  // one sorted segment and an open one
  const Keys keys(KvType::kF32, n, dim, 93, 0.5f);
  const KvShape shape = index_shape(1, 2, dim);
  LshIndex index({.kind = IndexKind::kLsh, .block = 1, .hash_bits = 5, .tables = 12}, shape);
  index.append(0, keys.view(n), 0, n);
  index.finish_prompt(0, keys.view(n));
  const auto q = normal_values(2 * dim, 94);
  const auto counts = scores_of(index, 0, q, 2, 0, n);
  std::vector<double> mean(static_cast<size_t>(dim));
  for (int64_t r = 0; r < n; ++r) {
    const auto k = keys.row(r);
    for (int c = 0; c < dim; ++c) mean[size_t(c)] += k[size_t(c)] / double(n);
  }
  for (const RowRange range : {RowRange{0, n}, RowRange{4, n - 64}, RowRange{8190, 8200}, RowRange{7, 7}}) {
    for (int j = 0; j < 2; ++j) {
      std::vector<int64_t> drawn, want;
      std::vector<float> log_weight;
      index.draw(0, keys.view(n), q.data() + j * dim, range, drawn, log_weight);
      for (int64_t r = range.begin; r < range.end; ++r) {
        if (counts[size_t(j * n + r)] >= 2) want.push_back(r);
      }
      ASSERT_EQ(drawn, want);
      for (size_t i = 0; i < drawn.size(); i += 17) {
        const auto k = keys.row(drawn[i]);
        double product = 0, kk = 0, qq = 0;
        for (int c = 0; c < dim; ++c) {
          const double centred = k[size_t(c)] - mean[size_t(c)], x = q[size_t(j * dim + c)];
          product += centred * x;
          kk += centred * centred;
          qq += x * x;
        }
        ASSERT_NEAR(-log_weight[i], std::log(index.inclusion(product / std::sqrt(kk * qq))), 5e-3);
      }
      EXPECT_TRUE(range.end - range.begin < 100 || drawn.size() > 50);
    }
  }
}

TEST(Lsh, InclusionFollowsItsTableAndItsFrequency) {
  const KvShape shape = index_shape(1, 1, 16);
  struct Row {
    double cosine;
    int bits, tables;
    double chance;
  };
  for (const Row& row : {Row{-0.3, 10, 150, 0.000141}, Row{0, 10, 150, 0.009684}, Row{0.3, 10, 150, 0.213667},
                         Row{0.5, 10, 170, 0.795586}, Row{0.2, 11, 300, 0.106252}, Row{0.7, 8, 75, 0.995625}}) {
    const LshIndex index({.kind = IndexKind::kLsh, .hash_bits = row.bits, .tables = row.tables}, shape);
    EXPECT_NEAR(index.inclusion(row.cosine), row.chance, 1e-6);
  }
  // Many random directions against one set of projections: pairs at a fixed cosine are drawn as often as stated. The
  // bound is five standard deviations of a binomial count, doubled since pairs share the projections.
  const int dim = 64;
  const int64_t pairs = 3000;
  LshIndex index({.kind = IndexKind::kLsh, .block = 1, .hash_bits = 6, .tables = 30}, index_shape(1, 1, dim));
  for (const double cosine : {0.0, 0.4}) {
    int64_t hits = 0;
    for (int64_t i = 0; i < pairs; ++i) {
      const auto a = normal_values(dim, 1000 + uint64_t(i)), b = normal_values(dim, 900000 + uint64_t(i));
      double aa = 0, ab = 0, cc = 0;
      for (int c = 0; c < dim; ++c)
        aa += double(a[size_t(c)]) * a[size_t(c)], ab += double(a[size_t(c)]) * b[size_t(c)];
      std::vector<double> rest(static_cast<size_t>(dim));
      for (int c = 0; c < dim; ++c)
        rest[size_t(c)] = b[size_t(c)] - ab / aa * a[size_t(c)], cc += rest[size_t(c)] * rest[size_t(c)];
      std::vector<float> key(static_cast<size_t>(dim)), minus(static_cast<size_t>(dim));
      for (int c = 0; c < dim; ++c) {
        key[size_t(c)] = float(cosine * a[size_t(c)] / std::sqrt(aa) +
                               std::sqrt(1 - cosine * cosine) * rest[size_t(c)] / std::sqrt(cc));
        minus[size_t(c)] = -key[size_t(c)];
      }
      Keys two(KvType::kF32, 2, dim, 1);  // a key and its negative: their mean is zero, so centring changes nothing
      two.set_row(0, key);
      two.set_row(1, minus);
      index.truncate(0, two.view(0), 0);
      index.append(0, two.view(2), 0, 2);
      index.finish_prompt(0, two.view(2));
      hits += scores_of(index, 0, a, 1, 0, 1)[0] >= 2 ? 1 : 0;
    }
    const double p = index.inclusion(cosine);
    EXPECT_NEAR(double(hits) / double(pairs), p, 10 * std::sqrt(p * (1 - p) / double(pairs))) << cosine;
  }
}

TEST(TokenKinds, NoRowsAndOneRow) {
  for (const IndexKind kind : {IndexKind::kChannels, IndexKind::kLabels, IndexKind::kLsh, IndexKind::kBits}) {
    const Keys keys(KvType::kF32, 1, 32, 95);
    auto index = build_index({.kind = kind, .block = 1, .channels = 8}, index_shape(1, 1, 32), 8);
    index->finish_prompt(0, keys.view(0));
    EXPECT_EQ(index->blocks(0), 0);
    index->append(0, keys.view(1), 0, 1);
    index->finish_prompt(0, keys.view(1));
    EXPECT_EQ(index->blocks(0), 1);
    EXPECT_GE(index->covered(0), 1);
    const auto s = scores_of(*index, 0, normal_values(32, 96), 1, 0, 1);
    EXPECT_TRUE(std::isfinite(s[0]));
  }
}

}  // namespace
}  // namespace longkv::test
