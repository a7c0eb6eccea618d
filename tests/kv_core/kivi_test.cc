#include "kv/codec/kivi.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/cpu.h"
#include "kv/attend.h"
#include "kv/attend_blocks.h"
#include "kv/layout.h"
#include "support/attention_ref.h"
#include "support/half.h"

namespace longkv {
namespace {

using test::half_value;
using test::nearest_half;
using test::random_floats;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr KvType kTypes[] = {KvType::kKivi2, KvType::kKivi4};

class Kivi : public ::testing::TestWithParam<IsaLevel> {
 protected:
  void SetUp() override { ASSERT_TRUE(set_active_isa(GetParam()).ok()); }
  void TearDown() override { ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok()); }
};
INSTANTIATE_TEST_SUITE_P(Isa, Kivi, ::testing::ValuesIn(available_isa_levels()),
                         [](const auto& info) { return isa_name(info.param); });

// One group by the method's definition, in double with the scale and minimum as stored: x ~ code * scale + minimum.
struct GroupRef {
  double scale, minimum;
  std::vector<int> codes;
};
GroupRef group_ref(const std::vector<float>& x, int bits) {
  const auto [lo, hi] = std::minmax_element(x.begin(), x.end());
  const int levels = (1 << bits) - 1;
  GroupRef g;
  g.scale = half_value(nearest_half((double(*hi) - double(*lo)) / levels));
  g.minimum = half_value(nearest_half(*lo));
  for (float v : x) {
    const double q = g.scale > 0 ? (double(v) - g.minimum) / g.scale : 0.0;
    g.codes.push_back(int(std::nearbyint(std::clamp(q, 0.0, double(levels)))));
  }
  return g;
}

// A head of whole blocks and its rows decoded one by one.
struct BlockHead {
  BlockHead(KvType k_type, KvType v_type, int dim_k, int dim_v, int64_t blocks, uint32_t seed) {
    const int64_t rows = blocks * kKiviRows;
    view.k_type = k_type;
    view.v_type = v_type;
    view.dim_k = dim_k;
    view.dim_v = dim_v;
    view.k_stride = kivi_block_bytes(k_type, dim_k);
    view.v_stride = kivi_block_bytes(v_type, dim_v);
    view.rows = rows;
    k.resize(size_t(blocks * view.k_stride));
    v.resize(size_t(blocks * view.v_stride));
    auto keys = random_floats(rows * dim_k, seed);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] *= i % size_t(dim_k) == 5 ? 12.0f : 1.0f;  // an outlier channel
    const auto values = random_floats(rows * dim_v, seed + 1);
    for (int64_t b = 0; b < blocks; ++b) {
      kivi_encode_keys(k_type, keys.data() + b * kKiviRows * dim_k, dim_k, dim_k, k.data() + b * view.k_stride);
      kivi_encode_values(v_type, values.data() + b * kKiviRows * dim_v, dim_v, dim_v, v.data() + b * view.v_stride);
    }
    point();
    decode();
  }
  void point() {
    view.k = k.data();
    view.v = v.data();
  }
  // As f32 rows, for the reference.
  void decode() {
    plain = view;
    plain.k_type = plain.v_type = KvType::kF32;
    plain.k_stride = 4 * view.dim_k;
    plain.v_stride = 4 * view.dim_v;
    k32.resize(size_t(view.rows * view.dim_k));
    v32.resize(size_t(view.rows * view.dim_v));
    for (int64_t r = 0; r < view.rows; ++r) {
      kivi_decode_key(view.k_type, view.k + r / 32 * view.k_stride, r % 32, view.dim_k, k32.data() + r * view.dim_k);
      kivi_decode_value(view.v_type, view.v + r / 32 * view.v_stride, r % 32, view.dim_v, v32.data() + r * view.dim_v);
    }
    plain.k = reinterpret_cast<const uint8_t*>(k32.data());
    plain.v = reinterpret_cast<const uint8_t*>(v32.data());
  }
  KvHeadView view, plain;
  std::vector<uint8_t> k, v;
  std::vector<float> k32, v32;
};

// Largest errors of a score from rounding folded queries to int8, and of a channel of the output from rounding folded
// weights to int16: half a step of the largest in the block, times codes of at most `levels`.
struct Rounding {
  double score = 0.0, out = 0.0;
};
Rounding rounding_of(const BlockHead& head, const float* q, double scale, const test::AttentionRef& ref,
                     std::span<const RowRange> ranges) {
  Rounding r;
  const KvHeadView& kv = head.view;
  const auto half_at = [](const uint8_t* p, int64_t i) { return half_value(uint16_t(p[2 * i] | p[2 * i + 1] << 8)); };
  const int k_levels = kv.k_type == KvType::kKivi2 ? 3 : 15, v_levels = kv.v_type == KvType::kKivi2 ? 3 : 15;
  double top = -kInf, sum = 0.0;
  for (double s : ref.scores) top = std::max(top, s);
  for (double s : ref.scores) sum += std::exp(s - top);
  std::vector<double> p(size_t(kv.rows), 0.0);
  size_t at = 0;
  for (const RowRange& range : ranges) {
    for (int64_t row = range.begin; row < range.end; ++row) p[size_t(row)] = std::exp(ref.scores[at++] - top);
  }
  for (int64_t b = 0; b < kv.rows / 32; ++b) {
    const uint8_t* k_scales = kv.k + b * kv.k_stride + kv.k_stride - 4 * kv.dim_k;
    double largest = 0.0;
    for (int c = 0; c < kv.dim_k; ++c) largest = std::max(largest, std::abs(q[c] * half_at(k_scales, c) * scale));
    r.score = std::max(r.score, 0.501 * largest / 127.0 * k_levels * kv.dim_k);
    const uint8_t* v_scales = kv.v + b * kv.v_stride + kv.v_stride - 4 * kv.dim_v;
    double weight = 0.0;
    for (int64_t i = 0; i < kv.dim_v; ++i) {
      weight = std::max(weight, p[size_t(b * 32 + i % 32)] * std::abs(half_at(v_scales, i)));
    }
    r.out += 0.501 * weight / 32767.0 * v_levels * 32 / sum;
  }
  return r;
}

// Outputs by the scores that were returned: what rounding queries does to those is not allowed for again.
void expect_sums_of(const BlockHead& head, const float* q, const std::vector<float>& scores, const float* out,
                    std::span<const RowRange> ranges, double scale, const std::string& what) {
  test::AttentionRef own;
  own.scores.assign(scores.begin(), scores.end());
  const double top = *std::max_element(own.scores.begin(), own.scores.end());
  const int dim = head.view.dim_v;
  std::vector<double> sums(static_cast<size_t>(dim), 0.0);
  double sum = 0.0, largest = 0.0;
  size_t at = 0;
  for (const RowRange& range : ranges) {
    for (int64_t row = range.begin; row < range.end; ++row) {
      const double p = std::exp(own.scores[at++] - top);
      sum += p;
      for (int c = 0; c < dim; ++c) {
        const double v = head.v32[size_t(row * dim + c)];
        sums[size_t(c)] += p * v;
        largest = std::max(largest, std::abs(v));
      }
    }
  }
  constexpr double kEps = std::numeric_limits<float>::epsilon();
  const double tolerance =
      rounding_of(head, q, scale, own, ranges).out + kEps * (64.0 + 2.0 * double(scores.size())) * largest;
  for (int c = 0; c < dim; ++c) ASSERT_NEAR(out[c], sums[size_t(c)] / sum, tolerance) << what << " channel " << c;
}

void expect_equals_decoded(const BlockHead& head, const float* q, int n_q, std::span<const RowRange> ranges,
                           const AttendParams& params, ThreadPool& pool, const std::string& what) {
  const int dim_k = head.view.dim_k, dim_v = head.view.dim_v;
  const int64_t rows = count_rows(ranges);
  std::vector<float> out(size_t(n_q * dim_v), NAN), lse(size_t(n_q), NAN), scores(size_t(n_q) * size_t(rows), NAN);
  AttendUnit unit{q, n_q, head.view, ranges, out.data(), lse.data()};
  AttendScratch scratch;
  attend({&unit, 1}, params, scratch, pool);
  attend_scores(unit, params, scores.data(), pool);
  const bool rounds = active_isa() >= IsaLevel::kAvx2 && active_isa() < IsaLevel::kNeon;
  for (int h = 0; h < n_q; ++h) {
    auto ref = test::attention_ref(q + h * dim_k, head.plain, ranges, params);
    if (rounds) {
      const Rounding r = rounding_of(head, q + h * dim_k, params.scale, ref, ranges);
      double largest = 0.0;
      for (float v : head.v32) largest = std::max(largest, std::abs(double(v)));
      ref.score_tolerance += r.score;
      ref.out_tolerance += r.out + 2.0 * r.score * largest;
    }
    ASSERT_NEAR(lse[size_t(h)], ref.lse, ref.score_tolerance) << what << " head " << h;
    for (int64_t i = 0; i < rows; ++i) {
      ASSERT_NEAR(scores[size_t(h * rows + i)], ref.scores[size_t(i)], ref.score_tolerance) << what << " row " << i;
    }
    for (int c = 0; c < dim_v; ++c) {
      ASSERT_NEAR(out[size_t(h * dim_v + c)], ref.out[size_t(c)], ref.out_tolerance) << what << " channel " << c;
    }
    if (rounds) {
      expect_sums_of(head, q + h * dim_k, {scores.begin() + h * rows, scores.begin() + (h + 1) * rows},
                     out.data() + h * dim_v, ranges, params.scale, what);
    }
  }
}

// The published packing, 2 bits low first in 32-bit words, of x_i = i.
TEST_P(Kivi, GoldenVector) {
  const int64_t dim = 32;
  std::vector<float> x(32 * 32), row(32);
  for (int64_t r = 0; r < 32; ++r) std::fill_n(x.begin() + r * dim, dim, float(r));
  std::vector<uint8_t> block(size_t(kivi_block_bytes(KvType::kKivi2, dim)));
  const float scale = float(half_value(nearest_half(31.0 / 3.0)));
  EXPECT_NEAR(scale, 10.3333, 0.004);
  uint64_t words = 0;
  kivi_encode_keys(KvType::kKivi2, x.data(), dim, dim, block.data());
  for (int64_t r = 0; r < 32; ++r) {
    kivi_decode_key(KvType::kKivi2, block.data(), r, dim, row.data());
    words |= uint64_t(std::lround(row[7] / scale)) << (2 * r);
  }
  EXPECT_EQ(words, 0xFFFAAAAA55555000ull);
  for (int64_t r = 0; r < 32; ++r) {
    for (int64_t c = 0; c < dim; ++c) x[size_t(r * dim + c)] = float(c);
  }
  words = 0;
  kivi_encode_values(KvType::kKivi2, x.data(), dim, dim, block.data());
  kivi_decode_value(KvType::kKivi2, block.data(), 19, dim, row.data());
  for (int64_t c = 0; c < 32; ++c) words |= uint64_t(std::lround(row[size_t(c)] / scale)) << (2 * c);
  EXPECT_EQ(words, 0xFFFAAAAA55555000ull);
}

// Every value is the nearest level of its own group of 32: bits are what they are billed as, and so is the error.
TEST_P(Kivi, GroupsAndBits) {
  for (KvType type : kTypes) {
    const int bits = kivi_bits(type);
    for (int64_t dim : {32, 64, 96, 128, 256}) {
      ASSERT_EQ(kivi_block_bytes(type, dim) * 8, 32 * dim * bits + 32 * dim);  // bits + 1 per value with g = 32
      ASSERT_EQ(kivi_block_bytes(type, dim), 32 * kv_row_bytes(type, dim));
      auto x = random_floats(32 * dim, uint32_t(dim));
      for (int64_t r = 0; r < 32; ++r) x[size_t(r * dim + 3)] = -2.5f;  // a constant channel
      std::fill_n(x.begin() + 4 * dim, dim, 0.0f);                      // a zero row
      x[size_t(7 * dim + 9)] = 65504.0f;
      x[size_t(9 * dim + 9)] = -65504.0f;
      std::vector<uint8_t> keys(size_t(kivi_block_bytes(type, dim)), 0xee), values(keys);
      kivi_encode_keys(type, x.data(), dim, dim, keys.data());
      kivi_encode_values(type, x.data(), dim, dim, values.data());
      std::vector<float> k(size_t(32 * dim)), v(size_t(32 * dim));
      for (int64_t r = 0; r < 32; ++r) {
        kivi_decode_key(type, keys.data(), r, dim, k.data() + r * dim);
        kivi_decode_value(type, values.data(), r, dim, v.data() + r * dim);
      }
      double error = 0.0, steps = 0.0;
      const auto expect_group = [&](const std::vector<float>& source, const std::vector<float>& got, const char* what) {
        const GroupRef ref = group_ref(source, bits);
        for (size_t i = 0; i < source.size(); ++i) {
          const double expected = ref.codes[i] * ref.scale + ref.minimum;
          // The code of a value within rounding of a tie may be its neighbour.
          const double q = (double(source[i]) - ref.minimum) / ref.scale;
          const bool tie = ref.scale > 0 && std::abs(q - std::floor(q) - 0.5) < 1e-4;
          ASSERT_NEAR(got[i], expected, (tie ? 1.001 * ref.scale : 0.0) + std::abs(expected) * 1e-6) << what << i;
          if (std::abs(source[i]) < 100.0f && ref.scale < 100.0) {
            error += (got[i] - source[i]) * (got[i] - source[i]);
            steps += ref.scale * ref.scale / 12.0;
          }
        }
      };
      for (int64_t c = 0; c < dim; ++c) {
        std::vector<float> source(32), got(32);
        for (size_t r = 0; r < 32; ++r)
          source[r] = x[r * size_t(dim) + size_t(c)], got[r] = k[r * size_t(dim) + size_t(c)];
        expect_group(source, got, "key ");
      }
      for (int64_t r = 0; r < 32; ++r) {
        for (int64_t g = 0; g < dim; g += 32) {
          const auto at = r * dim + g;
          expect_group({x.begin() + at, x.begin() + at + 32}, {v.begin() + at, v.begin() + at + 32}, "value ");
        }
      }
      // Errors of a uniform grid: neither more nor (a group of one would be exact) much less.
      EXPECT_LT(error, 1.3 * steps);
      EXPECT_GT(error, 0.6 * steps);
    }
  }
}

TEST_P(Kivi, ValuesThatAreNotFiniteStayVisible) {
  ThreadPool pool(1);
  for (KvType type : kTypes) {
    for (float bad : {NAN, kInf, -kInf}) {
      const int64_t dim = 64;
      auto x = random_floats(32 * dim, 5);
      x[size_t(11 * dim + 40)] = bad;
      BlockHead head(type, type, int(dim), int(dim), 2, 6);
      kivi_encode_keys(type, x.data(), dim, dim, head.k.data());
      kivi_encode_values(type, x.data(), dim, dim, head.v.data() + head.view.v_stride);
      head.decode();
      for (int64_t r = 0; r < 32; ++r) {
        for (int64_t c = 0; c < dim; ++c) {
          ASSERT_EQ(std::isnan(head.k32[size_t(r * dim + c)]), c == 40);
          ASSERT_EQ(std::isnan(head.v32[size_t((32 + r) * dim + c)]), r == 11 && c >= 32);
        }
      }
      const auto q = random_floats(dim, 7);
      std::vector<float> out(static_cast<size_t>(dim)), lse(1);
      const RowRange first{0, 32}, second{32, 64};
      AttendScratch scratch;
      AttendUnit unit{q.data(), 1, head.view, {&first, 1}, out.data(), lse.data()};
      attend({&unit, 1}, {0.125f, 0.0f}, scratch, pool);
      EXPECT_TRUE(std::isnan(lse[0]));
      unit.ranges = {&second, 1};
      attend({&unit, 1}, {0.125f, 0.0f}, scratch, pool);
      EXPECT_TRUE(std::isfinite(lse[0]));
      for (size_t c = 0; c < size_t(dim); ++c) EXPECT_EQ(std::isnan(out[c]), c >= 32) << c;
      // A row that was not chosen does not count, whatever it holds.
      const RowRange without[] = {{32, 43}, {44, 64}};
      expect_equals_decoded(head, q.data(), 1, without, {0.125f, 0.0f}, pool, "without the row");
    }
  }
}

// No encoder writes them, but a block of a file may hold them.
TEST_P(Kivi, NegativeScales) {
  ThreadPool pool(1);
  for (KvType type : kTypes) {
    for (int dim : {32, 128}) {
      BlockHead head(type, type, dim, dim, 3, 9);
      for (int i : {1, 40 % dim, dim - 1}) {
        head.k[size_t(2 * head.view.k_stride - 4 * dim + 2 * i + 1)] ^= 0x80;  // the sign of scale i of block 1
        head.v[size_t(2 * head.view.v_stride - 4 * dim + 2 * i + 1)] ^= 0x80;
      }
      head.decode();
      const auto q = random_floats(3 * dim, 10);
      const RowRange range{0, 96};
      expect_equals_decoded(head, q.data(), 3, {&range, 1}, {1.0f / std::sqrt(float(dim)), 0.0f}, pool, "signs");
    }
  }
}

TEST_P(Kivi, EqualsDecodeThenDense) {
  ThreadPool pool(2);
  for (KvType k : kTypes) {
    for (KvType v : kTypes) {
      for (int dim : {8, 24, 32, 40, 64, 96, 128, 192, 256, 576}) {
        for (int n_q : {1, 2, 3, 4, 5, 9}) {
          if (dim > 128 && n_q > 3) continue;
          const int dim_v = dim == 96 || dim % 32 != 0 ? 64 : dim;
          const BlockHead head(k, v, dim, dim_v, 7, uint32_t(dim + n_q));
          const auto q = random_floats(n_q * dim, 8);
          const RowRange ranges[] = {{0, 1}, {3, 64}, {70, 75}, {80, 91}, {95, 224}};
          const AttendParams params{1.0f / std::sqrt(float(dim)), n_q == 3 ? 15.0f : 0.0f};
          expect_equals_decoded(head, q.data(), n_q, ranges, params, pool,
                                std::string(kv_type_name(k)) + "/" + kv_type_name(v) + " dim " + std::to_string(dim) +
                                    " heads " + std::to_string(n_q));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(Kivi, EveryRowCountAndStart) {
  ThreadPool pool(2);
  const BlockHead head(KvType::kKivi2, KvType::kKivi2, 64, 64, 5, 20);
  const auto q = random_floats(2 * 64, 21);
  for (int64_t begin : {0, 1, 31, 32, 33, 64}) {
    for (int64_t end = begin + 1; end <= 160; end += end < 100 ? 1 : 13) {
      const RowRange range{begin, end};
      expect_equals_decoded(head, q.data(), 2, {&range, 1}, {0.125f, 0.0f}, pool,
                            std::to_string(begin) + " to " + std::to_string(end));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Kivi, SameBitsForAnyThreadsRangesAndGroups) {
  constexpr int kDim = 64, kHeads = 5;
  const BlockHead head(KvType::kKivi2, KvType::kKivi4, kDim, kDim, 200, 30);
  const auto q = random_floats(kHeads * kDim, 31);
  const AttendParams params{0.125f, 0.0f};
  const RowRange all{0, 6400};
  const RowRange cut[] = {{0, 1}, {1, 77}, {77, 1000}, {1000, 1001}, {1001, 6400}};
  const auto run = [&](const float* from, int n_q, std::span<const RowRange> ranges, ThreadPool& pool) {
    std::vector<float> out(size_t(n_q * kDim) + size_t(n_q));
    AttendUnit unit{from, n_q, head.view, ranges, out.data(), out.data() + n_q * kDim};
    AttendScratch scratch;
    attend({&unit, 1}, params, scratch, pool);
    return out;
  };
  ThreadPool one(1);
  const auto expected = run(q.data(), kHeads, {&all, 1}, one);
  for (int threads = 1; threads <= 3; ++threads) {
    ThreadPool pool(threads);
    EXPECT_EQ(run(q.data(), kHeads, {&all, 1}, pool), expected);
    EXPECT_EQ(run(q.data(), kHeads, cut, pool), expected);
  }
  for (int h = 0; h < kHeads; ++h) {
    const auto alone = run(q.data() + h * kDim, 1, {&all, 1}, one);
    EXPECT_TRUE(std::equal(alone.begin(), alone.begin() + kDim, expected.begin() + h * kDim));
  }
}

#if defined(__x86_64__)
// Keys of an odd number of eights of channels: a query head says nothing about what lies behind it.
TEST_P(Kivi, KeyProductsReadTheirOwnHeadOnly) {
  const bool vnni = active_isa() >= IsaLevel::kAvx512Vnni;
  if (active_isa() < IsaLevel::kAvx2) GTEST_SKIP() << "no integer products";
  for (KvType type : kTypes) {
    for (int64_t dim : {8, 24, 40}) {
      const auto rows = random_floats(kKiviRows * dim, 31);
      std::vector<uint8_t> block(size_t(kivi_block_bytes(type, dim)));
      kivi_encode_keys(type, rows.data(), dim, dim, block.data());
      auto q = random_floats(2 * dim + 16, 32);
      std::fill(q.begin() + dim, q.end(), std::numeric_limits<float>::quiet_NaN());
      std::vector<float> s(2 * kKiviRows);
      const BlockKeys keys{type, block.data(), dim, q.data(), dim, 2, s.data(), kKiviRows};
      vnni ? avx512vnni::block_key_products(&keys, 1) : avx2::block_key_products(&keys, 1);
      for (int64_t t = 0; t < kKiviRows; ++t) {
        EXPECT_TRUE(std::isfinite(s[size_t(t)])) << dim << " channels, row " << t;
        EXPECT_TRUE(std::isnan(s[size_t(kKiviRows + t)])) << dim << " channels, row " << t;
      }
    }
  }
}
#endif

}  // namespace
}  // namespace longkv
