#include "ops/matmul.h"

#include "ops/matmul_f32.h"
#include "ops/matmul_tile.h"

namespace longkv {

namespace {

// Up to this many tokens a product is bound by reading the weights, and the matrix-vector kernels win.
constexpr int64_t kMatvecTokens = 4;

}  // namespace

void MatmulInput::reset(const float* x, int64_t tokens, int64_t cols) {
  x_ = x;
  tokens_ = tokens;
  cols_ = cols;
  rounded_ = false;
}

const QuantizedRows& MatmulInput::quantized(ThreadPool& pool) {
  if (!rounded_) {
    rows_.assign(x_, tokens_, cols_, cols_, pool);
    rounded_ = true;
  }
  return rows_;
}

struct Matmul::Scratch {};

Matmul::Matmul(ThreadPool& pool, ProductType type) : pool_(pool), type_(type) {}
Matmul::~Matmul() = default;

void Matmul::run(const Weight& w, MatmulInput& in, float* y, int64_t y_stride) {
  const int64_t tokens = in.tokens();
  if (type_ == ProductType::kInt8 && has_int8_form(w.type)) {
    const QuantizedRows& x = in.quantized(pool_);
    return tokens <= kMatvecTokens ? matvec_int8(w, x, y, y_stride, pool_) : matmul_int8(w, x, y, y_stride, pool_);
  }
  if (tokens <= kMatvecTokens) return matvec_f32(w, in.x(), tokens, y, y_stride, pool_);
  matmul_f32(w, in.x(), tokens, y, y_stride, pool_);
}

const char* Matmul::kernel_name(TensorType type, ProductType product, int64_t tokens) {
  if (product == ProductType::kInt8 && has_int8_form(type)) {
    return tokens <= kMatvecTokens ? "int8 matrix-vector" : "int8 tiles";
  }
  return tokens <= kMatvecTokens ? "fp32 matrix-vector" : "fp32 tiles";
}

}  // namespace longkv
