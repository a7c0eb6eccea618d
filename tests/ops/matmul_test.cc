#include "ops/matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/cpu.h"
#include "base/float16.h"
#include "base/log.h"
#include "ops/made_matrix.h"
#include "ops/matmul_f32.h"
#include "ops/packed_rows.h"
#include "quant/tensor_type.h"

namespace longkv {
namespace {

// Activations that two int8 terms hold exactly, so that only the products are under test. A share of the groups has a
// second term: none, about a third, or all.
struct Rows {
  std::vector<float> values;  // scale * (q + fine / 254), and what `rows` keeps as its source
  QuantizedRows rows;
};

enum class Fine { kNone, kSome, kAll };

Rows make_rows(int64_t tokens, int64_t cols, bool extreme, Fine fine, Random& random) {
  Rows out;
  QuantizedRows& x = out.rows;
  const int64_t groups = cols / 32;
  x.tokens = tokens;
  x.cols = cols;
  std::normal_distribution<float> normal;
  const auto push_sums = [](const int8_t* q, std::vector<int16_t>& sums) {
    for (int h = 0; h < 2; ++h) {
      int sum = 0;
      for (int k = 0; k < 16; ++k) sum += q[16 * h + k];
      sums.push_back(int16_t(sum));
    }
  };
  const auto level = [&](int64_t i) {
    const int sign = (random() & 1) != 0 ? 1 : -1;
    if (!extreme) return int8_t(int(random() % 255) - 127);
    return int8_t(i / cols % 3 == 0 ? 127 : i / cols % 3 == 1 ? -127 : 127 * sign);
  };
  for (int64_t i = 0; i < tokens * cols; ++i) x.q.push_back(level(i));
  // Powers of two times 254: both scales and all values are exact.
  for (int64_t i = 0; i < tokens * groups; ++i) {
    const float unit = fine == Fine::kNone ? 1.0f : 254.0f;
    x.scale.push_back(extreme ? unit : std::ldexp(254.0f, int(random() % 5) - 12));
    push_sums(x.q.data() + 32 * i, x.sum16);
  }
  for (int64_t i = 0; i < tokens * cols; ++i) out.values.push_back(x.scale[size_t(i / 32)] * float(x.q[size_t(i)]));
  x.fine_term.assign(size_t(tokens * groups), -1);
  for (int64_t g = 0; g < groups; ++g) {
    x.fine_first.push_back(int32_t(x.fine_token.size()));
    for (int64_t t = 0; t < tokens; ++t) {
      if (fine == Fine::kNone || (fine == Fine::kSome && random() % 3 != 0)) continue;
      const int64_t at = t * groups + g;
      x.fine_term[size_t(at)] = int32_t(x.fine_token.size());
      x.fine_token.push_back(int32_t(t));
      x.fine_scale.push_back(x.scale[size_t(at)] / 254.0f);
      for (int64_t i = 32 * at; i < 32 * (at + 1); ++i) {
        x.fine_q.push_back(level(i));
        out.values[size_t(i)] += x.fine_scale.back() * float(x.fine_q.back());
      }
      push_sums(x.fine_q.data() + x.fine_q.size() - 32, x.fine_sum16);
    }
  }
  x.fine_first.push_back(int32_t(x.fine_token.size()));
  x.source = out.values.data();
  x.source_stride = cols;
  return out;
}

// Compares y with the product in double. Each term of a group of 32 adds a few roundings of sums no larger than the
// group's greatest decoded value (offsets and levels may cancel) times its activations; sums that are integers below
// 2^24 in every partial result must be exact.
void expect_product(const Matrix& m, const std::vector<float>& x, int64_t tokens, const std::vector<float>& y,
                    int64_t y_stride, bool integers) {
  const int64_t rows = m.weight.rows, cols = m.weight.cols;
  const int64_t span = std::min<int64_t>(cols, tensor_type_info(m.weight.type)->block_values == 256 ? 256 : 32);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t r = 0; r < rows; ++r) {
      double sum = 0, bound = 0;
      for (int64_t c0 = 0; c0 < cols; c0 += span) {
        double greatest = 0, activations = 0;
        for (int64_t c = c0; c < c0 + span; ++c) {
          const double w = m.decoded[size_t(r * cols + c)], v = x[size_t(t * cols + c)];
          sum += w * v;
          greatest = std::max(greatest, std::abs(w));
          activations += std::abs(v);
        }
        bound += 3 * greatest * activations;
      }
      const bool exact = integers && bound < 0x1p24;
      const double tolerance = exact ? 0 : (double(cols) / 16 + 8) * 0x1p-24 * bound;
      ASSERT_NEAR(y[size_t(t * y_stride + r)], sum, tolerance)
          << tensor_type_info(m.weight.type)->name << " row " << r << " of " << rows << ", token " << t << " of "
          << tokens << ", " << cols << " columns, " << isa_name(active_isa());
    }
  }
}

class EveryLevel : public ::testing::Test {
 protected:
  void TearDown() override { ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok()); }
};
using MatmulInt8 = EveryLevel;
using MatmulF32 = EveryLevel;
using MatmulRun = EveryLevel;

std::vector<float> product_int8(const Matrix& m, const QuantizedRows& x, int64_t y_stride, int threads) {
  std::vector<float> y(size_t(x.tokens * y_stride), std::numeric_limits<float>::quiet_NaN());
  ThreadPool pool(threads);
  matmul_int8(m.weight, x, y.data(), y_stride, pool);
  if (reads_packed(m.weight.type)) {
    std::vector<uint8_t> bytes(static_cast<size_t>(packed_bytes(m.weight)));
    pack_rows(m.weight, bytes.data(), pool);
    Weight packed = m.weight;
    packed.packed = bytes.data();
    std::vector<float> same(y.size(), std::numeric_limits<float>::quiet_NaN());
    matmul_int8(packed, x, same.data(), y_stride, pool);
    EXPECT_EQ(std::memcmp(same.data(), y.data(), y.size() * sizeof(float)), 0)
        << tensor_type_info(m.weight.type)->name << " packed, " << m.weight.rows << " rows, " << isa_name(active_isa());
  }
  return y;
}

TEST_F(MatmulInt8, EqualsDoubleReference) {
  Random random(1);
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (TensorType type : kInt8Types) {
      const bool super = tensor_type_info(type)->block_values == 256;
      for (int64_t cols : super ? std::vector<int64_t>{256, 768, 2048} : std::vector<int64_t>{32, 96, 576, 2048}) {
        for (int64_t rows : {1, 15, 16, 33, 56}) {
          const Matrix m = make_matrix(type, rows, cols, Fill::kRandom, random);
          const int64_t tokens = 1 + int64_t(random() % 50), stride = rows + int64_t(random() % 3);
          for (Fine fine : {Fine::kNone, Fine::kSome, Fine::kAll}) {
            const Rows x = make_rows(tokens, cols, false, fine, random);
            expect_product(m, x.values, tokens, product_int8(m, x.rows, stride, 2), stride, false);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST_F(MatmulInt8, EveryTokenCount) {
  Random random(2);
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (TensorType type : kInt8Types) {
      const Matrix m = make_matrix(type, 17, 256, Fill::kRandom, random);
      for (int64_t tokens = 1; tokens <= 33; ++tokens) {
        const Rows x = make_rows(tokens, 256, false, Fine::kSome, random);
        expect_product(m, x.values, tokens, product_int8(m, x.rows, 17, 1), 17, false);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(MatmulInt8, ExtremesNeitherSaturateNorWrap) {
  Random random(3);
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (TensorType type : kInt8Types) {
      for (Fill fill : {Fill::kLowest, Fill::kHighest, Fill::kUnit}) {
        const int64_t cols = tensor_type_info(type)->block_values;
        const Matrix m = make_matrix(type, 20, cols, fill, random);
        for (Fine fine : {Fine::kNone, Fine::kAll}) {
          const Rows x = make_rows(9, cols, true, fine, random);
          // 16-bit activations have steps of 1 / 254, which is not exact.
          const bool wide = type == TensorType::kQ8_0 || type == TensorType::kIQ4_NL || type == TensorType::kIQ4_XS;
          expect_product(m, x.values, 9, product_int8(m, x.rows, 20, 1), 20, !wide);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// From 1024 rows on, tasks are wider.
TEST_F(MatmulInt8, ManyRows) {
  Random random(7);
  const Matrix m = make_matrix(TensorType::kQ4_1, 1063, 96, Fill::kRandom, random);
  const Rows x = make_rows(7, 96, false, Fine::kSome, random);
  expect_product(m, x.values, 7, product_int8(m, x.rows, 1064, 3), 1064, false);
}

// Bits depend neither on the thread count nor on the tokens that come along.
TEST_F(MatmulInt8, BitsDependOnTheTokenAlone) {
  Random random(4);
  std::normal_distribution<float> normal;
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (TensorType type : kInt8Types) {
      const int64_t rows = 72, cols = 1536, tokens = 201;
      const Matrix m = make_matrix(type, rows, cols, Fill::kRandom, random);
      // Outliers in places that differ between tokens, so that second terms are mixed.
      std::vector<float> values(size_t(tokens * cols));
      for (float& v : values) v = normal(random) * (random() % 64 == 0 ? 20.0f : 1.0f);
      ThreadPool pool(2);
      QuantizedRows x;
      x.assign(values.data(), tokens, cols, cols, pool);
      ASSERT_GT(x.fine_first[size_t(cols / 32)], tokens);
      const std::vector<float> all = product_int8(m, x, rows, 1);
      for (int threads : {2, 3, 8}) {
        const std::vector<float> y = product_int8(m, x, rows, threads);
        ASSERT_EQ(std::memcmp(y.data(), all.data(), y.size() * 4), 0) << tensor_type_info(type)->name << threads;
      }
      for (int64_t n : {1, 2, 7, 49}) {
        const int64_t first = tokens - n;
        QuantizedRows part;
        part.assign(values.data() + first * cols, n, cols, cols, pool);
        const std::vector<float> y = product_int8(m, part, rows, 2);
        ASSERT_EQ(std::memcmp(y.data(), all.data() + first * rows, y.size() * 4), 0)
            << tensor_type_info(type)->name << ", " << n << " tokens, " << isa_name(level);
      }
    }
  }
}

TEST_F(MatmulF32, EqualsDoubleReference) {
  Random random(5);
  std::normal_distribution<float> normal;
  std::vector<TensorType> types(std::begin(kFloatTypes), std::end(kFloatTypes));
  types.insert(types.end(), std::begin(kInt8Types), std::end(kInt8Types));
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (TensorType type : types) {
      const int64_t block = tensor_type_info(type)->block_values;
      for (int64_t cols : {block == 256 ? 256 : 32, block == 256 ? 1280 : block == 1 ? 387 : 416}) {
        for (int64_t rows : {1, 16, 31, 70}) {
          const Matrix m = make_matrix(type, rows, cols, Fill::kRandom, random);
          const int64_t tokens = 1 + int64_t(random() % 60), stride = rows + 1;
          std::vector<float> x(size_t(tokens * cols));
          for (float& v : x) v = normal(random);
          std::vector<float> one(size_t(tokens * stride), std::numeric_limits<float>::quiet_NaN());
          ThreadPool pool(1);
          matmul_f32(m.weight, x.data(), tokens, one.data(), stride, pool);
          // Sums of 32 products in fp32 instead of integers: one more rounding per product, within the same bound
          // taken per column.
          const int64_t rounding_steps = cols + 8;
          for (int64_t t = 0; t < tokens; ++t) {
            for (int64_t r = 0; r < rows; ++r) {
              double sum = 0, magnitude = 0;
              for (int64_t c = 0; c < cols; ++c) {
                const double product = double(m.decoded[size_t(r * cols + c)]) * x[size_t(t * cols + c)];
                sum += product;
                magnitude += std::abs(product);
              }
              ASSERT_NEAR(one[size_t(t * stride + r)], sum, double(rounding_steps) * 0x1p-24 * magnitude)
                  << tensor_type_info(type)->name << " row " << r << ", token " << t << ", " << isa_name(level);
            }
          }
          std::vector<float> three(one.size(), std::numeric_limits<float>::quiet_NaN());
          ThreadPool pool3(3);
          matmul_f32(m.weight, x.data(), tokens, three.data(), stride, pool3);
          ASSERT_EQ(std::memcmp(one.data(), three.data(), one.size() * 4), 0);
        }
      }
    }
  }
}

// Matmul picks a kernel by product type, weight type and token count; each must give the product of the fp32 input up
// to the rounding that its product type stands for: 8 bits per group of 32 activations, or 8 bits of mantissa for bf16.
TEST_F(MatmulRun, EveryProductTypeAndTokenCount) {
  Random random(6);
  std::normal_distribution<float> normal;
  std::vector<TensorType> types(std::begin(kFloatTypes), std::end(kFloatTypes));
  types.insert(types.end(), std::begin(kInt8Types), std::end(kInt8Types));
  ThreadPool pool(2);
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (ProductType product : {ProductType::kInt8, ProductType::kF32, ProductType::kBf16}) {
      if (!Matmul::supports(product)) continue;
      Matmul matmul(pool, product);
      ASSERT_EQ(matmul.type(), product);
      for (TensorType type : types) {
        const int64_t rows = 70, cols = 512;
        const Matrix m = make_matrix(type, rows, cols, Fill::kRandom, random);
        for (int64_t tokens : {1, 2, 4, 5, 8, 9, 40}) {
          std::vector<float> x(size_t(tokens * cols));
          for (float& v : x) v = normal(random);
          MatmulInput in;
          in.reset(x.data(), tokens, cols);
          std::vector<float> y(size_t(tokens * rows), std::numeric_limits<float>::quiet_NaN());
          matmul.run(m.weight, in, y.data(), rows);
          double error = 0, size = 0;
          for (int64_t t = 0; t < tokens; ++t) {
            for (int64_t r = 0; r < rows; ++r) {
              double sum = 0;
              for (int64_t c = 0; c < cols; ++c) {
                sum += double(m.decoded[size_t(r * cols + c)]) * x[size_t(t * cols + c)];
              }
              const double difference = y[size_t(t * rows + r)] - sum;
              error += difference * difference;
              size += sum * sum;
            }
          }
          // Relative rounding of one factor, times a small constant for offsets that cancel.
          const bool int8 = product == ProductType::kInt8 && has_int8_form(type);
          const double tolerance = int8 ? 4.0 / 254 : product == ProductType::kBf16 ? 4 * 0x1p-8 : 1e-5;
          ASSERT_LT(std::sqrt(error), tolerance * std::sqrt(size))
              << tensor_type_info(type)->name << ", " << tokens << " tokens, "
              << Matmul::kernel_name(type, product, tokens) << ", " << isa_name(level);
        }
      }
    }
  }
}

// Several weights at once, of mixed types and more than one job holds, give the bits that each gives alone.
TEST_F(MatmulRun, SeveralWeightsEqualEachAlone) {
  Random random(7);
  std::normal_distribution<float> normal;
  const int64_t cols = 512;
  std::vector<Matrix> quantised, mixed;
  for (int64_t rows : {576, 192, 1, 333, 70, 8}) {
    const size_t n = quantised.size();
    quantised.push_back(make_matrix(kInt8Types[n % std::size(kInt8Types)], rows, cols, Fill::kRandom, random));
    mixed.push_back(make_matrix(n == 1 ? kFloatTypes[0] : kInt8Types[0], rows, cols, Fill::kRandom, random));
  }
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (const auto* matrices : {&quantised, &mixed}) {
      for (int64_t tokens : {1, 3, 9}) {
        std::vector<float> x(size_t(tokens * cols));
        for (float& v : x) v = normal(random);
        for (int threads : {1, 2, 5}) {
          ThreadPool pool(threads);
          Matmul matmul(pool, ProductType::kInt8);
          MatmulInput in;
          in.reset(x.data(), tokens, cols);
          std::vector<std::vector<float>> together(matrices->size());
          std::vector<MatmulOutput> outputs;
          for (size_t i = 0; i < matrices->size(); ++i) {
            const Weight& w = (*matrices)[i].weight;
            together[i].assign(size_t(tokens * w.rows), std::numeric_limits<float>::quiet_NaN());
            outputs.push_back({&w, together[i].data(), w.rows});
          }
          matmul.run(outputs, in);
          for (size_t i = 0; i < matrices->size(); ++i) {
            const Weight& w = (*matrices)[i].weight;
            std::vector<float> alone(together[i].size());
            matmul.run(w, in, alone.data(), w.rows);
            ASSERT_EQ(std::memcmp(alone.data(), together[i].data(), alone.size() * 4), 0)
                << tensor_type_info(w.type)->name << ", " << w.rows << " rows, " << tokens << " tokens, " << threads
                << " threads, " << isa_name(level);
          }
        }
      }
    }
  }
}

TEST_F(MatmulRun, UnsupportedTypeIsNoticedAndReplaced) {
  ASSERT_TRUE(set_active_isa(available_isa_levels().front()).ok());
  ASSERT_FALSE(Matmul::supports(ProductType::kBf16));
  ThreadPool pool(1);
  const int64_t before = notice_count();
  EXPECT_EQ(Matmul(pool, ProductType::kBf16).type(), ProductType::kF32);
  EXPECT_EQ(notice_count(), before + 1);
}

}  // namespace
}  // namespace longkv
