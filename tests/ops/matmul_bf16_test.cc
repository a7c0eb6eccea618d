#include "ops/matmul_bf16.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "base/cpu.h"
#include "ops/made_matrix.h"
#include "ops/packed_rows.h"

namespace longkv {
namespace {

// The factors as products in bf16 see them: what is left is the error of fp32 sums.
float through_bf16(float v) { return to_float(to_bf16(v)); }

class MatmulBf16 : public ::testing::Test {
 protected:
  void TearDown() override { (void)set_active_isa(available_isa_levels().back()); }

  // Products of m by one thread, compared with sums in double of the rounded factors, and those of three threads with
  // them bit for bit.
  static void expect_product(const Matrix& m, int64_t tokens, Random& random) {
    const Weight& w = m.weight;
    std::normal_distribution<float> normal;
    const int64_t stride = w.rows + 3;
    std::vector<float> x(size_t(tokens * w.cols));
    for (float& v : x) v = normal(random);
    ThreadPool one(1), three(3);
    std::vector<float> y(size_t(tokens * stride), std::numeric_limits<float>::quiet_NaN()), again(y);
    ASSERT_TRUE(matmul_bf16(w, x.data(), tokens, y.data(), stride, one));
    ASSERT_TRUE(matmul_bf16(w, x.data(), tokens, again.data(), stride, three));
    ASSERT_EQ(std::memcmp(y.data(), again.data(), y.size() * sizeof(float)), 0) << "threads change bits";
    // A quantised weight is formed as scale * level + offset and may round the other way: half a unit of bf16 more.
    const bool whole = tensor_type_info(w.type)->block_values == 1;
    const double tolerance = (whole ? 0.0 : 0x1p-8) + double(w.cols + 8) * 0x1p-23;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t r = 0; r < w.rows; ++r) {
        double sum = 0, magnitude = 0;
        for (int64_t c = 0; c < w.cols; ++c) {
          const double product =
              double(through_bf16(m.decoded[size_t(r * w.cols + c)])) * through_bf16(x[size_t(t * w.cols + c)]);
          sum += product;
          magnitude += std::abs(product);
        }
        ASSERT_NEAR(y[size_t(t * stride + r)], sum, tolerance * magnitude)
            << tensor_type_info(w.type)->name << ", " << w.rows << " x " << w.cols << ", row " << r << ", token " << t
            << " of " << tokens << ", " << isa_name(active_isa());
      }
      for (int64_t r = w.rows; r < stride; ++r) ASSERT_TRUE(std::isnan(y[size_t(t * stride + r)])) << "between rows";
    }
  }
};

// Rows, columns and tokens around tiles of 16 and 32, tasks of up to 128 rows and chunks of 512 columns.
TEST_F(MatmulBf16, EqualsDoubleReferenceOfRoundedFactors) {
  Random random(11);
  int levels = 0;
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    if (!has_matmul_bf16()) continue;
    ++levels;
    const auto sweep = [&](TensorType type) {
      const int64_t block = tensor_type_info(type)->block_values;
      const std::vector<int64_t> widths = block == 256  ? std::vector<int64_t>{256, 768}
                                          : block == 32 ? std::vector<int64_t>{32, 544}
                                                        : std::vector<int64_t>{1, 33, 577};
      for (int64_t cols : widths) {
        for (int64_t rows : {1, 16, 33, 130}) {
          Matrix m = make_matrix(type, rows, cols, Fill::kRandom, random);
          for (int64_t tokens : {5, 16, 33, 70}) {
            expect_product(m, tokens, random);
            if (HasFatalFailure()) return;
          }
          if (!reads_packed(type)) continue;
          ThreadPool pool(1);
          std::vector<uint8_t> packed(size_t(packed_bytes(m.weight)));
          pack_rows(m.weight, packed.data(), pool);
          m.weight.packed = packed.data();
          expect_product(m, 40, random);
          if (HasFatalFailure()) return;
        }
      }
    };
    for (TensorType type : kFloatTypes) sweep(type);
    for (TensorType type : kInt8Types) sweep(type);
    if (HasFatalFailure()) return;
  }
  if (levels == 0) GTEST_SKIP() << "no level of this CPU and build multiplies bf16";
}

// A token's products are the same alone and among many, so that a prompt's chunks do not change a bit.
TEST_F(MatmulBf16, ATokenDoesNotDependOnTheOthers) {
  Random random(12);
  std::normal_distribution<float> normal;
  ThreadPool pool(2);
  int levels = 0;
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    if (level != IsaLevel::kAmx || !has_matmul_bf16()) continue;  // oneDNN promises nothing
    ++levels;
    const int64_t rows = 96, cols = 1056, tokens = 300;
    const Matrix m = make_matrix(TensorType::kQ4_1, rows, cols, Fill::kRandom, random);
    std::vector<float> x(size_t(tokens * cols)), all(size_t(tokens * rows)), part(all.size());
    for (float& v : x) v = normal(random);
    ASSERT_TRUE(matmul_bf16(m.weight, x.data(), tokens, all.data(), rows, pool));
    for (int64_t first = 0, n = 5; first < tokens; first += n, n = n * 2 + 1) {
      n = std::min(n, tokens - first);
      ASSERT_TRUE(matmul_bf16(m.weight, x.data() + first * cols, n, part.data() + first * rows, rows, pool));
    }
    ASSERT_EQ(std::memcmp(all.data(), part.data(), all.size() * sizeof(float)), 0);
  }
  if (levels == 0) GTEST_SKIP() << "this CPU has no AMX";
}

}  // namespace
}  // namespace longkv
