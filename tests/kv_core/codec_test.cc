#include "kv/codec/codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "base/cpu.h"
#include "base/float16.h"
#include "kv/layout.h"
#include "support/attention_ref.h"
#include "support/half.h"

namespace longkv {
namespace {

using test::decode_row_ref;
using test::kAllKvTypes;
using test::random_floats;

class Codec : public ::testing::TestWithParam<IsaLevel> {
 protected:
  void SetUp() override { ASSERT_TRUE(set_active_isa(GetParam()).ok()); }
  void TearDown() override { ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok()); }
};
INSTANTIATE_TEST_SUITE_P(Isa, Codec, ::testing::ValuesIn(available_isa_levels()),
                         [](const auto& info) { return isa_name(info.param); });

std::vector<uint8_t> encode(KvType type, const std::vector<float>& x) {
  std::vector<uint8_t> row(size_t(kv_row_bytes(type, int64_t(x.size()))));
  encode_row(type, x.data(), int64_t(x.size()), row.data());
  return row;
}

std::vector<float> decode(KvType type, const std::vector<uint8_t>& row, int64_t dim) {
  std::vector<float> x(static_cast<size_t>(dim));
  decode_row(type, row.data(), dim, x.data());
  return x;
}

TEST_P(Codec, DecodesByTheDefinition) {
  for (KvType type : kAllKvTypes) {
    for (int64_t dim : {1, 5, 16, 31, 32, 64, 80, 96, 256}) {
      if (kv_type_quantized(type) && dim % 32 != 0) continue;
      const auto row = encode(type, random_floats(dim, uint32_t(dim)));
      const auto expected = decode_row_ref(type, row.data(), dim);
      const auto got = decode(type, row, dim);
      for (int64_t i = 0; i < dim; ++i)
        ASSERT_EQ(got[size_t(i)], float(expected[size_t(i)])) << kv_type_name(type) << i;
    }
  }
}

TEST_P(Codec, RoundsToNearest) {
  const int64_t dim = 4096;
  auto x = random_floats(dim, 1, 3.0f);
  x[7] = 0.0f;
  x[9] = 1e-7f;
  x[11] = -6e-5f;
  for (KvType type : {KvType::kF32, KvType::kF16, KvType::kBf16}) {
    const auto y = decode(type, encode(type, x), dim);
    for (size_t i = 0; i < x.size(); ++i) {
      const float expected = type == KvType::kF32   ? x[i]
                             : type == KvType::kF16 ? float(test::half_value(test::nearest_half(x[i])))
                                                    : to_float(to_bf16(x[i]));
      ASSERT_EQ(y[i], expected) << kv_type_name(type) << " " << x[i];
    }
  }
  for (KvType type : {KvType::kQ8_0, KvType::kQ4_0}) {
    const double levels = type == KvType::kQ8_0 ? 127.0 : 8.0;
    const auto y = decode(type, encode(type, x), dim);
    for (size_t g = 0; g < x.size(); g += 32) {
      double largest = 0.0;
      for (size_t i = g; i < g + 32; ++i) largest = std::max(largest, std::abs(double(x[i])));
      // Half a step, a whole one at q4_0's short end (+8 does not exist), and the scale's own rounding to 11 bits.
      const double step = largest / levels;
      for (size_t i = g; i < g + 32; ++i) {
        const double limit = (type == KvType::kQ4_0 && std::abs(x[i]) > 7.4 * step ? 1.0 : 0.5) * step * 1.001;
        ASSERT_NEAR(y[i], x[i], limit + largest * 0x1p-11) << kv_type_name(type);
      }
    }
  }
}

TEST_P(Codec, Fp8RoundsToTheNearestCode) {
  std::vector<double> codes;
  for (int b = 0; b < 0x7f; ++b) codes.push_back(test::e4m3_value(uint8_t(b)));
  for (float magnitude : {1.0f, 1e-20f, 65504.0f, 1e30f}) {
    const int64_t dim = 509;  // no whole number of vectors
    auto x = random_floats(dim, 11, magnitude);
    for (size_t i = 0; i < 200; ++i) x[i] *= float(std::pow(0.9, double(i)));
    x[3] = 0.0f;
    const auto row = encode(KvType::kFp8, x);
    const uint32_t bits = uint32_t(row[size_t(dim)] | row[size_t(dim) + 1] << 8) << 16;
    float scale;
    std::memcpy(&scale, &bits, 4);
    double largest = 0.0;
    for (float v : x) largest = std::max(largest, std::abs(double(v)));
    EXPECT_NEAR(largest / scale, 448.0, 448.0 * 0x1p-8);  // the largest value fills the range: nothing saturates
    for (size_t i = 0; i < x.size(); ++i) {
      const double wanted = std::abs(double(x[i])) / scale, got = std::abs(test::e4m3_value(row[i]));
      double nearest = codes[0];
      for (double c : codes) nearest = std::abs(c - wanted) < std::abs(nearest - wanted) ? c : nearest;
      // The quotient is formed in fp32: a value within its rounding of a tie may go either way.
      ASSERT_LE(std::abs(got - wanted), std::abs(nearest - wanted) + wanted * 0x1p-22) << x[i];
      ASSERT_TRUE(x[i] == 0.0f || std::signbit(x[i]) == bool(row[i] & 0x80));
    }
  }
  const std::vector<float> zeros(40, 0.0f);
  EXPECT_EQ(decode(KvType::kFp8, encode(KvType::kFp8, zeros), 40), zeros);
}

TEST_P(Codec, ExtremeOfAGroupIsKept) {
  for (float extreme : {5.0f, -5.0f}) {
    std::vector<float> x(32, 0.25f);
    x[17] = extreme;
    EXPECT_NEAR(decode(KvType::kQ4_0, encode(KvType::kQ4_0, x), 32)[17], extreme, 5.0f * 0x1p-11f);
    EXPECT_NEAR(decode(KvType::kQ8_0, encode(KvType::kQ8_0, x), 32)[17], extreme, 5.0f * 0x1p-11f);
  }
  const std::vector<float> zeros(64, 0.0f);
  EXPECT_EQ(decode(KvType::kQ4_0, encode(KvType::kQ4_0, zeros), 64), zeros);
  EXPECT_EQ(decode(KvType::kQ8_0, encode(KvType::kQ8_0, zeros), 64), zeros);
}

TEST_P(Codec, ValuesThatAreNotFiniteStayVisible) {
  for (float bad : {NAN, std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    for (int64_t at : {0, 13, 31}) {
      auto x = random_floats(64, 3);
      x[size_t(at)] = bad;
      for (KvType type : kAllKvTypes) {
        const auto y = decode(type, encode(type, x), 64);
        if (kv_type_scaled(type)) {
          for (size_t i = 0; i < 32; ++i) EXPECT_TRUE(std::isnan(y[i])) << kv_type_name(type);
        } else {
          EXPECT_TRUE(std::isnan(bad) ? std::isnan(y[size_t(at)]) : y[size_t(at)] == bad) << kv_type_name(type);
        }
        EXPECT_EQ(std::isfinite(y[40]), type != KvType::kFp8) << kv_type_name(type);  // fp8: one scale per row
      }
    }
  }
  EXPECT_TRUE(std::isinf(decode(KvType::kF16, encode(KvType::kF16, std::vector<float>(16, 7e4f)), 16)[3]));
}

TEST_P(Codec, RowsAtAnyStride) {
  for (KvType type : kAllKvTypes) {
    const int64_t dim = 64, n = 5, bytes = kv_row_bytes(type, dim), stride = bytes + 12;
    const auto x = random_floats(n * 100, 4);
    std::vector<uint8_t> rows(size_t(n * stride), 0xee);
    encode_rows(type, x.data(), 100, n, dim, rows.data(), stride);
    KvHeadView view;
    view.k_type = view.v_type = type;
    view.dim_k = view.dim_v = int(dim);
    view.k = view.v = rows.data();
    view.k_stride = view.v_stride = stride;
    view.rows = n;
    std::vector<float> k(size_t(3 * dim)), v(size_t(3 * dim));
    decode_k_rows(view, 1, 4, k.data());
    decode_v_rows(view, 1, 4, v.data());
    EXPECT_EQ(k, v);
    for (int64_t r = 0; r < n; ++r) {
      const auto row = encode(type, std::vector<float>(x.begin() + r * 100, x.begin() + r * 100 + dim));
      ASSERT_TRUE(std::equal(row.begin(), row.end(), rows.begin() + r * stride));
      for (int64_t i = bytes; i < stride; ++i) ASSERT_EQ(rows[size_t(r * stride + i)], 0xee) << "wrote past the row";
      if (r < 1 || r >= 4) continue;
      const auto expected = decode(type, row, dim);
      ASSERT_TRUE(std::equal(expected.begin(), expected.end(), k.begin() + (r - 1) * dim));
    }
  }
}

TEST(KvType, NamesAndSizes) {
  for (KvType type : kAllKvTypes) EXPECT_EQ(parse_kv_type(kv_type_name(type)), type);
  EXPECT_FALSE(parse_kv_type("q5_0").has_value());
  EXPECT_EQ(kv_row_bytes(KvType::kF32, 64), 256);
  EXPECT_EQ(kv_row_bytes(KvType::kBf16, 64), 128);
  EXPECT_EQ(kv_row_bytes(KvType::kQ8_0, 64), 68);
  EXPECT_EQ(kv_row_bytes(KvType::kQ4_0, 64), 36);
  EXPECT_EQ(kv_row_bytes(KvType::kFp8, 65), 67);
}

TEST(Layout, BlocksAndRows) {
  for (int64_t block : {1, 3, 16, 128}) {
    for (int64_t rows = 0; rows < 300; ++rows) {
      int64_t covered = 0;
      for (int64_t b = 0; b < blocks_for(rows, block); ++b) {
        const RowRange r = rows_of(b, block, rows);
        ASSERT_EQ(r.begin, covered);
        ASSERT_GT(count_of(r), 0);
        ASSERT_EQ(b < full_blocks(rows, block), count_of(r) == block);
        ASSERT_EQ(block_of(r.begin, block), b);
        ASSERT_EQ(block_of(r.end - 1, block), b);
        covered = r.end;
      }
      ASSERT_EQ(covered, rows);
      ASSERT_EQ(blocks_of({0, rows}, block), (RowRange{0, blocks_for(rows, block)}));
    }
  }
  constexpr int64_t kFar = int64_t(1) << 40;
  EXPECT_EQ(rows_of(kFar, 16, kFar * 16 + 3), (RowRange{kFar * 16, kFar * 16 + 3}));
  EXPECT_EQ(row_offset(kFar, 128), kFar * 128);
  EXPECT_EQ(visible_rows(10, 0), (RowRange{0, 11}));
  EXPECT_EQ(visible_rows(10, 4), (RowRange{7, 11}));
  EXPECT_EQ(visible_rows(2, 4), (RowRange{0, 3}));
  EXPECT_EQ(first_visible_row(10, 4), 7);
}

TEST(Layout, RangeLists) {
  std::vector<RowRange> out;
  const int64_t blocks[] = {0, 1, 4, 6, 7};
  ranges_of_blocks(blocks, 16, 5, 120, out);
  EXPECT_EQ(out, (std::vector<RowRange>{{5, 32}, {64, 80}, {96, 120}}));
  EXPECT_EQ(count_rows(out), 67);
  EXPECT_TRUE(ranges_valid(out, {0, 120}));
  EXPECT_FALSE(ranges_valid(out, {0, 119}));
  EXPECT_FALSE(ranges_valid(std::vector<RowRange>{{3, 5}, {4, 9}}, {0, 10}));
  const RowRange forced[] = {{0, 4}, {70, 75}, {80, 90}, {119, 121}};
  std::vector<RowRange> all;
  unite_ranges(out, forced, all);
  EXPECT_EQ(all, (std::vector<RowRange>{{0, 4}, {5, 32}, {64, 90}, {96, 121}}));
  clip_ranges(all, {10, 100}, out);
  EXPECT_EQ(out, (std::vector<RowRange>{{10, 32}, {64, 90}, {96, 100}}));
}

}  // namespace
}  // namespace longkv
