#include "grad/chunk_ops.h"
#include "grad/products.h"
#include "ops/matmul.h"

namespace longkv {

namespace {

class CpuChunkOps final : public ChunkOps {
 public:
  CpuChunkOps(ThreadPool& pool, ProductType products) : pool_(pool), matmul_(pool, products) {}

  Status multiply(std::span<const Product> products, const float* x, int64_t tokens) override {
    if (products.empty()) return {};
    input_.reset(x, tokens, products.front().w->cols);
    for (const Product& p : products) matmul_.run(*p.w, input_, p.y, p.w->rows);
    return {};
  }
  Status multiply_backward(std::span<const Gradient> gradients, int64_t tokens, float* dx) override {
    for (const Gradient& g : gradients) matmul_backward(*g.w, g.dy, tokens, dx, pool_);
    return {};
  }
  Status attend(const ChunkAttention& a, float* out, float* lse) override {
    attend_chunk(a, out, lse, pool_);
    return {};
  }
  Status attend_backward(const ChunkAttention& a, const float* out, const float* lse, const float* dout,
                         const ChunkAttentionGradient& gradient) override {
    attend_chunk_backward(a, out, lse, dout, gradient, pool_);
    return {};
  }
  Status channel_grams(const ChunkAttention& a, const ChannelGramInputs& inputs, double* grams) override {
    longkv::channel_grams(a, inputs, grams, pool_);
    return {};
  }

 private:
  ThreadPool& pool_;
  Matmul matmul_;
  MatmulInput input_;
};

}  // namespace

std::unique_ptr<ChunkOps> make_cpu_chunk_ops(ThreadPool& pool, ProductType products) {
  return std::make_unique<CpuChunkOps>(pool, products);
}

}  // namespace longkv
