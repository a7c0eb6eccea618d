// What the graph must know of a model, read from metadata and checked. Families only fill in this structure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gguf/gguf.h"
#include "kv/types.h"
#include "longkv/status.h"
#include "model/rope.h"
#include "ops/elementwise.h"

namespace longkv {

// Overrides of the file's RoPE settings by the user; each change is printed with the old value.
struct RopeOverrides {
  std::optional<RopeScaling> scaling;
  std::optional<double> factor;
  std::optional<double> base;
  std::optional<int64_t> original_context;
};

struct ModelConfig {
  std::string family;
  std::string name;
  int layers = 0;
  int64_t dim = 0;  // width of the residual stream
  int64_t vocab = 0;
  int64_t ff_dim = 0;
  int heads = 0;
  int kv_heads = 0;
  int head_dim_k = 0;
  int head_dim_v = 0;
  int64_t context = 0;  // tokens the model was trained for
  float norm_eps = 1e-5f;
  float attn_scale = 0.0f;  // multiplies q.k
  float attn_softcap = 0.0f;
  float final_softcap = 0.0f;
  float embedding_scale = 1.0f;
  Activation activation = Activation::kSilu;
  RopeConfig rope;
  std::optional<RopeConfig> rope_window;  // sliding-window layers, where they differ
  std::vector<int64_t> window;            // per layer, 0 = all; empty = no sliding windows

  KvShape kv_shape() const;
};

// Errors: kUnsupported (unknown family, experts, layers of different shape), kCorrupt (missing or contradictory
// values), kInvalidArgument (overrides).
Result<ModelConfig> read_model_config(const GgufFile& file, const RopeOverrides& overrides);

}  // namespace longkv
