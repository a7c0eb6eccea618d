// y = x W^T for every weight type: the only place where weights meet activations.
#pragma once

#include <cstdint>
#include <span>

#include "base/threads.h"
#include "ops/quantize_rows.h"
#include "ops/weight.h"

namespace longkv {

// Up to this many tokens a product is bound by reading the weights, and the matrix-vector kernels win.
inline constexpr int64_t kFewTokens = 4;

// Input of one or several products: fp32 rows and, made on first need, their int8 form.
class MatmulInput {
 public:
  // x: [tokens][cols], contiguous; must outlive the object's use. Cheap: nothing is rounded yet.
  // `apart`: the rows are decoded tokens of several sequences and go to the matrix-vector kernels however many they
  // are, so that a row's result is the one it has alone, bit for bit.
  // `fine_from`: which groups get a second term when the rows are rounded, kFineFrom or kFineEverywhere.
  void reset(const float* x, int64_t tokens, int64_t cols, bool apart = false, double fine_from = kFineFrom);
  bool few() const { return apart_ || tokens_ <= kFewTokens; }
  const float* x() const { return x_; }
  int64_t tokens() const { return tokens_; }
  int64_t cols() const { return cols_; }
  const QuantizedRows& quantized(ThreadPool& pool);

 private:
  const float* x_ = nullptr;
  int64_t tokens_ = 0;
  int64_t cols_ = 0;
  bool apart_ = false;
  bool rounded_ = false;
  double fine_from_ = kFineFrom;
  QuantizedRows rows_;
};

// One of several products of the same input.
struct MatmulOutput {
  const Weight* w;
  float* y;  // [tokens][y_stride]
  int64_t y_stride;
};

// What prompts are multiplied in where nobody asks: bf16 on AMX, which is both faster there and closer to fp32, else
// int8. By the instruction-set level alone, so that runs repeat.
ProductType default_products();
// "int8", "f32", "bf16".
const char* product_name(ProductType type);

class Matmul {
 public:
  // Where `type` is not supported, a notice is printed and fp32 takes its place (see type()).
  Matmul(ThreadPool& pool, ProductType type);

  // Whether this build and the active instruction-set level have the product; false only for kBf16.
  static bool supports(ProductType type);

  // y[t][r] = sum_c w[r][c] * x[t][c] for all tokens of `in`; y has a row stride of `y_stride` values.
  // A few tokens go to the memory-bound matrix-vector kernels, many to the tiled prompt kernels; the result of a token
  // does not depend on the thread count. In kF32 it does not depend on how many tokens come together beyond fp32
  // rounding.
  void run(const Weight& w, MatmulInput& in, float* y, int64_t y_stride);
  // The same for several weights. A few tokens make one job of all of them: a decode step of a small model is so short
  // that handing out jobs is a sizeable part of it.
  void run(std::span<const MatmulOutput> outputs, MatmulInput& in);

  ProductType type() const { return type_; }
  // One line for `longkv version` and the run header: which kernel serves this weight type.
  static const char* kernel_name(TensorType type, ProductType product, int64_t tokens);

 private:
  ThreadPool& pool_;
  ProductType type_;
};

// Parts, also called by benchmarks and tests:

// Decode: every row of w against a few int8 rows (1 to 8). Weight types with an int8 form only (all quantised ones).
void matvec_int8(const Weight& w, const QuantizedRows& x, float* y, int64_t y_stride, ThreadPool& pool);
void matvec_int8(std::span<const MatmulOutput> outputs, const QuantizedRows& x, ThreadPool& pool);
// Decode with weights decoded to fp32 in registers or small tiles; every type. x: [tokens][cols].
void matvec_f32(const Weight& w, const float* x, int64_t tokens, float* y, int64_t y_stride, ThreadPool& pool);
// Prompt: tiled int8 products. Weight types with an int8 form only.
void matmul_int8(const Weight& w, const QuantizedRows& x, float* y, int64_t y_stride, ThreadPool& pool);
// True when the type has an int8 form.
bool has_int8_form(TensorType type);

}  // namespace longkv
