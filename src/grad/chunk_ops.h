// The heavy operators of a chunk's passes, which are all that differs between learning on the CPU and on a card:
// products with the model's weights, their transposes, and attention. All rows lie in memory, fp32, [tokens][width]
// without gaps.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/threads.h"
#include "grad/channel_gram.h"
#include "grad/chunk_attention.h"
#include "longkv/status.h"
#include "ops/weight.h"

namespace longkv {

class ChunkOps {
 public:
  struct Product {
    const Weight* w;
    float* y;  // [tokens][w->rows]
  };
  struct Gradient {
    const Weight* w;
    const float* dy;  // [tokens][w->rows]
  };
  virtual ~ChunkOps() = default;

  // y[t][r] = x[t] . w[r] for matrices that share the input x [tokens][w->cols].
  virtual Status multiply(std::span<const Product> products, const float* x, int64_t tokens) = 0;
  // dx[t][c] += sum over r of dy[t][r] * w[r][c], over all of these matrices.
  virtual Status multiply_backward(std::span<const Gradient> gradients, int64_t tokens, float* dx) = 0;
  // As attend_chunk and attend_chunk_backward.
  virtual Status attend(const ChunkAttention& a, float* out, float* lse) = 0;
  virtual Status attend_backward(const ChunkAttention& a, const float* out, const float* lse, const float* dout,
                                 const ChunkAttentionGradient& gradient) = 0;
  // As channel_grams (grad/channel_gram.h).
  virtual Status channel_grams(const ChunkAttention& a, const ChannelGramInputs& inputs, double* grams) = 0;
  // The rows of a prompt's id are no more.
  virtual void forget(uint64_t prompt_id) { (void)prompt_id; }
};

// On the CPU. `products` are those of multiply(); gradients are fp32. Never fails.
std::unique_ptr<ChunkOps> make_cpu_chunk_ops(ThreadPool& pool, ProductType products);

}  // namespace longkv
