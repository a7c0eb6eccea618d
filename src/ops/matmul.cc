#include "ops/matmul.h"

#include <algorithm>

#include "base/log.h"
#include "ops/matmul_bf16.h"
#include "ops/matmul_f32.h"

namespace longkv {

void MatmulInput::reset(const float* x, int64_t tokens, int64_t cols, bool apart) {
  apart_ = apart;
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

bool Matmul::supports(ProductType type) { return type != ProductType::kBf16 || has_matmul_bf16(); }

Matmul::Matmul(ThreadPool& pool, ProductType type) : pool_(pool), type_(type) {
  if (!supports(type)) {
    (void)notice("bf16 products need oneDNN and a CPU with AVX-512; prompts are multiplied in fp32");
    type_ = ProductType::kF32;
  }
}

void Matmul::run(const Weight& w, MatmulInput& in, float* y, int64_t y_stride) {
  const int64_t tokens = in.tokens();
  if (type_ == ProductType::kInt8 && has_int8_form(w.type)) {
    const QuantizedRows& x = in.quantized(pool_);
    return in.few() ? matvec_int8(w, x, y, y_stride, pool_) : matmul_int8(w, x, y, y_stride, pool_);
  }
  if (in.few()) return matvec_f32(w, in.x(), tokens, y, y_stride, pool_);
  if (type_ == ProductType::kBf16) {
    if (matmul_bf16(w, in.x(), tokens, y, y_stride, pool_)) return;
    (void)notice("oneDNN refused a bf16 product; prompts are multiplied in fp32 from here on");
    type_ = ProductType::kF32;
  }
  matmul_f32(w, in.x(), tokens, y, y_stride, pool_);
}

void Matmul::run(std::span<const MatmulOutput> outputs, MatmulInput& in) {
  const bool one_job = type_ == ProductType::kInt8 && in.few() &&
                       std::ranges::all_of(outputs, [](const MatmulOutput& o) { return has_int8_form(o.w->type); });
  if (one_job) return matvec_int8(outputs, in.quantized(pool_), pool_);
  for (const MatmulOutput& o : outputs) run(*o.w, in, o.y, o.y_stride);
}

const char* Matmul::kernel_name(TensorType type, ProductType product, int64_t tokens) {
  if (product == ProductType::kInt8 && has_int8_form(type)) {
    return tokens <= kFewTokens ? "int8 matrix-vector" : "int8 tiles";
  }
  if (tokens <= kFewTokens) return "fp32 matrix-vector";
  return product == ProductType::kBf16 && has_matmul_bf16() ? "bf16 oneDNN" : "fp32 tiles";
}

}  // namespace longkv
