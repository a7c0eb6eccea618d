// The tensors of a model by their role. Fused tensors (q, k and v in one; gate and up in one) become row slices, so the
// graph sees one shape for every family.
#pragma once

#include <cstdint>
#include <vector>

#include "gguf/gguf.h"
#include "longkv/status.h"
#include "model/config.h"
#include "ops/weight.h"

namespace longkv {

// Norm weights and biases, decoded to fp32. Empty: the model has none.
using Vector = std::vector<float>;

struct LayerWeights {
  Vector attn_norm;  // [dim]
  Weight q, k, v;    // [heads * head_dim][dim]
  Vector q_bias, k_bias, v_bias;
  Vector q_norm, k_norm;  // [head_dim_k], per head, before RoPE
  Weight o;               // [dim][heads * head_dim_v]
  Vector o_bias;          // [dim]
  Vector post_attn_norm;  // [dim], on the attention output before it is added
  Vector ffn_norm;        // [dim]
  Weight gate, up;        // [ff_dim][dim]
  Weight down;            // [dim][ff_dim]
  Vector post_ffn_norm;   // [dim]
};

struct ModelWeights {
  Weight embedding;  // [vocab][dim]
  Weight output;     // [vocab][dim]; the embedding itself when the file has no output tensor
  Vector output_norm;
  std::vector<LayerWeights> layers;
  std::vector<float> rope_freqs;         // [rope dim / 2], Llama-3 divisors
  std::vector<float> rope_factors_long;  // [rope dim / 2], longrope
  std::vector<float> rope_factors_short;

  // Bytes that one decoded token reads: every matrix once, of the embedding only a row unless it is the output too.
  uint64_t bytes_per_token() const;
  // The matrices that a decoded token meets, in all layers and behind them; in the first `count` layers where that is
  // not negative.
  std::vector<Weight*> products(int count = -1);
};

// Finds every tensor, checks its shape against the configuration, and fills config.vocab. A tensor that nothing uses is
// reported. Errors: kCorrupt (missing tensor, wrong shape), kUnsupported.
Result<ModelWeights> bind_weights(const GgufFile& file, ModelConfig& config);

}  // namespace longkv
