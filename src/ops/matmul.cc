#include "ops/matmul.h"

#include <algorithm>

#include "base/cpu.h"
#include "base/log.h"
#include "ops/matmul_bf16.h"
#include "ops/matmul_f32.h"

namespace longkv {

namespace {

bool uses_int8(TensorType weight, ProductType product, bool few) {
  return has_int8_form(weight) && (product == ProductType::kInt8 || (product == ProductType::kBf16 && few));
}

}  // namespace

void MatmulInput::reset(const float* x, int64_t tokens, int64_t cols, bool apart, double fine_from) {
  fine_from_ = fine_from;
  apart_ = apart;
  x_ = x;
  tokens_ = tokens;
  cols_ = cols;
  rounded_ = false;
}

const QuantizedRows& MatmulInput::quantized(ThreadPool& pool) {
  if (!rounded_) {
    rows_.assign(x_, tokens_, cols_, cols_, pool, fine_from_);
    rounded_ = true;
  }
  return rows_;
}

ProductType default_products() { return active_isa() == IsaLevel::kAmx ? ProductType::kBf16 : ProductType::kInt8; }

const char* product_name(ProductType type) {
  return type == ProductType::kInt8 ? "int8" : type == ProductType::kBf16 ? "bf16" : "f32";
}

bool Matmul::supports(ProductType type) { return type != ProductType::kBf16 || has_matmul_bf16(); }

Matmul::Matmul(ThreadPool& pool, ProductType type) : pool_(pool), type_(type) {
  if (!supports(type)) {
    (void)notice("bf16 products need a CPU with AMX, or with AVX-512 and oneDNN; prompts are multiplied in fp32");
    type_ = ProductType::kF32;
  }
}

void Matmul::run(const Weight& w, MatmulInput& in, float* y, int64_t y_stride) {
  const int64_t tokens = in.tokens();
  if (uses_int8(w.type, type_, in.few())) {
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
  const bool one_job = in.few() && std::ranges::all_of(outputs, [&](const MatmulOutput& o) {
                         return uses_int8(o.w->type, type_, true);
                       });
  if (one_job) return matvec_int8(outputs, in.quantized(pool_), pool_);
  for (const MatmulOutput& o : outputs) run(*o.w, in, o.y, o.y_stride);
}

const char* Matmul::kernel_name(TensorType type, ProductType product, int64_t tokens) {
  const bool few = tokens <= kFewTokens;
  if (uses_int8(type, product, few)) return few ? "int8 matrix-vector" : "int8 tiles";
  if (few) return "fp32 matrix-vector";
  return product == ProductType::kBf16 && has_matmul_bf16() ? matmul_bf16_name() : "fp32 tiles";
}

}  // namespace longkv
