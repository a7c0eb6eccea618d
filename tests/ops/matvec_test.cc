// Matrix-vector products against sums in double precision over the reference decode of the weights.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "ops/matmul.h"
#include "ops/packed_rows.h"
#include "quant/block_formats.h"

namespace longkv {
namespace {

constexpr TensorType kQuantised[] = {TensorType::kQ4_0, TensorType::kQ4_1,   TensorType::kQ5_0, TensorType::kQ5_1,
                                     TensorType::kQ8_0, TensorType::kIQ4_NL, TensorType::kQ2_K, TensorType::kQ3_K,
                                     TensorType::kQ4_K, TensorType::kQ5_K,   TensorType::kQ6_K, TensorType::kIQ4_XS};
constexpr TensorType kFloats[] = {TensorType::kF32, TensorType::kF16, TensorType::kBF16};

enum class Fill { kRandom, kOnes, kZeros, kLowBytes };

// Places of half-precision scales inside a block; everything else may be any byte.
std::vector<int> half_places(TensorType type) {
  switch (type) {
    case TensorType::kQ4_1:
    case TensorType::kQ5_1:
    case TensorType::kQ4_K:
    case TensorType::kQ5_K: return {0, 2};
    case TensorType::kQ2_K: return {80, 82};
    case TensorType::kQ3_K: return {108};
    case TensorType::kQ6_K: return {208};
    default: return {0};
  }
}

class Matrix {
 public:
  Matrix(TensorType type, int64_t rows, int64_t cols, Fill fill, uint32_t seed) {
    const TensorTypeInfo& info = *tensor_type_info(type);
    weight_ = {type, rows, cols, cols / info.block_values * info.block_bytes, nullptr};
    bytes_.resize(size_t(rows * weight_.row_bytes));
    std::mt19937 rng(seed);
    std::uniform_real_distribution<float> real(-1.0f, 1.0f);
    if (info.block_values == 1) {
      for (size_t i = 0; i < bytes_.size(); i += size_t(info.block_bytes)) put_float(type, &bytes_[i], real(rng));
    } else {
      for (auto& b : bytes_) b = fill_byte(fill, rng);
      for (size_t i = 0; i < bytes_.size(); i += size_t(info.block_bytes)) {
        for (int at : half_places(type)) {
          const f16_t h = to_f16(fill == Fill::kRandom ? 0.1f * real(rng) : 0.1f);
          std::memcpy(&bytes_[i + size_t(at)], &h, 2);
        }
      }
    }
    weight_.data = bytes_.data();
    if (!reads_packed(type)) return;
    packed_.resize(size_t(packed_bytes(weight_)));
    ThreadPool pool(2);
    pack_rows(weight_, packed_.data(), pool);
  }

  const Weight& weight() const { return weight_; }
  // The same with its packed form, for levels that read one.
  Weight packed() const {
    Weight w = weight_;
    w.packed = packed_.empty() ? nullptr : packed_.data();
    return w;
  }

  std::vector<float> decoded_row(int64_t r) const {
    std::vector<float> out(size_t(weight_.cols));
    dequantize(weight_.type, weight_.row(r), out.data(), weight_.cols);
    return out;
  }

 private:
  static uint8_t fill_byte(Fill fill, std::mt19937& rng) {
    switch (fill) {
      case Fill::kOnes: return 0xff;
      case Fill::kZeros: return 0;
      case Fill::kLowBytes: return 0x80;
      default: return uint8_t(rng());
    }
  }
  static void put_float(TensorType type, uint8_t* at, float v) {
    const f16_t h = to_f16(v);
    const bf16_t b = to_bf16(v);
    if (type == TensorType::kF32) std::memcpy(at, &v, 4);
    if (type == TensorType::kF16) std::memcpy(at, &h, 2);
    if (type == TensorType::kBF16) std::memcpy(at, &b, 2);
  }

  Weight weight_;
  std::vector<uint8_t> bytes_, packed_;
};

std::vector<float> random_rows(int64_t n, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  // Some outliers, so that some groups get a second term.
  for (auto& v : x) v = normal(rng) * (rng() % 64 == 0 ? 20.0f : 1.0f);
  return x;
}

// Sum of absolute products bounds the rounding of any order of summation; a term w * x passes a few roundings itself.
struct Reference {
  double value = 0;
  double magnitude = 0;
};

// Largest parts of the decoded value: q4_1 and the like subtract two terms that may cancel, which the kernels keep
// apart. 8 * |largest weight| bounds both terms for the scales that Matrix makes.
double term_bound(const std::vector<float>& w) {
  double largest = 0;
  for (float v : w) largest = std::max(largest, double(std::abs(v)));
  return largest;
}

class Matvec : public ::testing::Test {
 protected:
  void TearDown() override { ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok()); }

  static void check_int8(const Matrix& m, const QuantizedRows& x, const std::string& what) {
    const Weight& w = m.weight();
    const int64_t stride = w.rows + 3;
    std::vector<float> y(size_t(x.tokens * stride), 777.0f);
    ThreadPool pool(2);
    matvec_int8(w, x, y.data(), stride, pool);
    if (const Weight packed = m.packed(); packed.packed != nullptr) {
      std::vector<float> same(y.size(), 777.0f);
      matvec_int8(packed, x, same.data(), stride, pool);
      ASSERT_EQ(std::memcmp(same.data(), y.data(), y.size() * sizeof(float)), 0)
          << what << " packed " << w.rows << "x" << w.cols << "x" << x.tokens;
    }
    for (int64_t r = 0; r < w.rows; ++r) {
      const std::vector<float> row = m.decoded_row(r);
      const double bound = term_bound(row);
      for (int64_t t = 0; t < x.tokens; ++t) {
        Reference sum;
        for (int64_t c = 0; c < w.cols; ++c) {
          const int64_t at = t * w.cols + c, fine = x.fine_term[size_t(at / 32)];
          double xv = double(x.scale[size_t(at / 32)]) * x.q[size_t(at)];
          if (fine >= 0) xv += double(x.fine_scale[size_t(fine)]) * x.fine_q[size_t(32 * fine + c % 32)];
          sum.value += double(row[size_t(c)]) * xv;
          sum.magnitude += 4 * bound * std::abs(xv);
        }
        // Groups, and second terms, are added one by one per lane: at most cols / 16 + 8 roundings of partial sums
        // below the magnitude.
        const double tolerance = (double(w.cols) / 16 + 8) * 0x1p-24 * sum.magnitude;
        ASSERT_NEAR(y[size_t(t * stride + r)], sum.value, tolerance + 1e-30)
            << what << " row " << r << " token " << t << " of " << w.rows << "x" << w.cols << "x" << x.tokens;
      }
    }
    for (int64_t t = 0; t < x.tokens; ++t) {
      for (int64_t r = w.rows; r < stride; ++r) ASSERT_EQ(y[size_t(t * stride + r)], 777.0f) << what;
    }
  }

  static std::string describe(TensorType type) {
    return std::string(tensor_type_info(type)->name) + " at " + isa_name(active_isa());
  }
};

TEST_F(Matvec, Int8MatchesDoubleForEveryTypeLevelAndShape) {
  ThreadPool pool(1);
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (TensorType type : kQuantised) {
      const int64_t block = tensor_type_info(type)->block_values;
      uint32_t seed = 1;
      for (int64_t cols : {int64_t(32), int64_t(64), int64_t(96), int64_t(256), int64_t(576), int64_t(768),
                           int64_t(1536), int64_t(2048)}) {
        if (cols % block != 0) continue;
        for (int64_t rows = 1; rows <= 17; ++rows) {
          const int64_t tokens = 1 + (rows + cols / 32) % 8;
          const Matrix m(type, rows, cols, Fill::kRandom, ++seed);
          const auto x = random_rows(tokens * cols, seed);
          QuantizedRows quantized;
          quantized.assign(x.data(), tokens, cols, cols, pool);
          check_int8(m, quantized, describe(type));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(Matvec, Int8KeepsExactSumsAtTheLargestQuants) {
  ThreadPool pool(1);
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (TensorType type : kQuantised) {
      for (Fill fill : {Fill::kOnes, Fill::kZeros, Fill::kLowBytes}) {
        for (int sign : {1, -1, 0}) {  // 0: alternating
          const int64_t cols = 512;
          const Matrix m(type, 9, cols, fill, 1);
          std::vector<float> x(size_t(cols) * 5);
          for (size_t i = 0; i < x.size(); ++i) x[i] = sign != 0 ? float(sign) : (i % 2 == 0 ? 1.0f : -1.0f);
          QuantizedRows quantized;
          quantized.assign(x.data(), 5, cols, cols, pool);
          ASSERT_EQ(std::abs(quantized.q[0]), 127);
          check_int8(m, quantized, describe(type));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(Matvec, Int8OfZeroInputIsZeroAndOfNanIsNan) {
  ThreadPool pool(1);
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (TensorType type : kQuantised) {
      const Matrix m(type, 5, 256, Fill::kRandom, 5);
      std::vector<float> x(512, 0.0f);
      x[256 + 100] = std::numeric_limits<float>::quiet_NaN();
      QuantizedRows quantized;
      quantized.assign(x.data(), 2, 256, 256, pool);
      std::vector<float> y(10, 1.0f);
      matvec_int8(m.weight(), quantized, y.data(), 5, pool);
      for (int r = 0; r < 5; ++r) {
        EXPECT_EQ(y[size_t(r)], 0.0f) << describe(type);
        EXPECT_TRUE(std::isnan(y[size_t(5 + r)])) << describe(type);
      }
    }
  }
}

TEST_F(Matvec, ResultsDoNotDependOnThreadsOrOnTokensThatComeTogether) {
  const int64_t rows = 331, cols = 768, tokens = 7;
  const auto x = random_rows(tokens * cols, 9);
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    std::vector<TensorType> types(std::begin(kQuantised), std::end(kQuantised));
    types.insert(types.end(), std::begin(kFloats), std::end(kFloats));
    for (TensorType type : types) {
      const Matrix m(type, rows, cols, Fill::kRandom, 3);
      ThreadPool one(1);
      std::vector<float> single(size_t(rows * tokens)), single_f32(single);
      for (int64_t t = 0; t < tokens; ++t) {
        if (has_int8_form(type)) {
          QuantizedRows quantized;
          quantized.assign(x.data() + t * cols, 1, cols, cols, one);
          matvec_int8(m.weight(), quantized, single.data() + t * rows, rows, one);
        }
        matvec_f32(m.weight(), x.data() + t * cols, 1, single_f32.data() + t * rows, rows, one);
      }
      for (int threads : {1, 2, 3, 5}) {
        ThreadPool pool(threads);
        std::vector<float> together(single.size());
        if (has_int8_form(type)) {
          QuantizedRows quantized;
          quantized.assign(x.data(), tokens, cols, cols, pool);
          matvec_int8(m.weight(), quantized, together.data(), rows, pool);
          EXPECT_EQ(std::memcmp(together.data(), single.data(), single.size() * 4), 0) << describe(type) << threads;
        }
        matvec_f32(m.weight(), x.data(), tokens, together.data(), rows, pool);
        EXPECT_EQ(std::memcmp(together.data(), single_f32.data(), single.size() * 4), 0) << describe(type) << threads;
      }
    }
  }
}

TEST_F(Matvec, F32MatchesDoubleForEveryType) {
  std::vector<TensorType> types(std::begin(kQuantised), std::end(kQuantised));
  types.insert(types.end(), std::begin(kFloats), std::end(kFloats));
  ThreadPool pool(2);
  for (IsaLevel level : available_isa_levels()) {
    ASSERT_TRUE(set_active_isa(level).ok());
    for (TensorType type : types) {
      const int64_t block = tensor_type_info(type)->block_values;
      for (int64_t cols : {1, 7, 32, 33, 256, 576, 1280, 1536}) {
        if (cols % block != 0) continue;
        for (int64_t rows : {1, 2, 3, 5, 9, 17}) {
          const int64_t tokens = 1 + rows % 8, stride = rows + 2;
          const Matrix m(type, rows, cols, Fill::kRandom, uint32_t(rows * cols));
          const auto x = random_rows(tokens * cols, 21);
          std::vector<float> y(size_t(tokens * stride), 777.0f);
          matvec_f32(m.weight(), x.data(), tokens, y.data(), stride, pool);
          for (int64_t r = 0; r < rows; ++r) {
            const auto row = m.decoded_row(r);
            for (int64_t t = 0; t < tokens; ++t) {
              Reference sum;
              for (int64_t c = 0; c < cols; ++c) {
                const double term = double(row[size_t(c)]) * x[size_t(t * cols + c)];
                sum.value += term;
                sum.magnitude += std::abs(term);
              }
              // At least four lanes share the additions; without FMA each term is rounded once more.
              const double tolerance = (double(cols) / 4 + 8) * 0x1p-24 * sum.magnitude;
              ASSERT_NEAR(y[size_t(t * stride + r)], sum.value, tolerance)
                  << describe(type) << " " << rows << "x" << cols;
            }
          }
          for (int64_t t = 0; t < tokens; ++t) ASSERT_EQ(y[size_t(t * stride + rows)], 777.0f);
        }
      }
    }
  }
}

}  // namespace
}  // namespace longkv
