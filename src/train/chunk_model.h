// A chunk of tokens through the whole model behind a prompt whose keys and values do not change, and the gradient of a
// loss on the final hidden states with respect to what is learned: LeanK's alpha per K channel or DuoAttention's gate
// per KV head. Products in fp32. Nothing is propagated into the prompt: its rows do not depend on what is learned, so
// the gradient is exact where only the chunk's queries meet masked keys.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/threads.h"
#include "kv/cache.h"
#include "model/model.h"
#include "ops/matmul.h"
#include "train/chunk_attention.h"

namespace longkv {

enum class OldRows {
  kDense,     // count as they are: the teacher
  kChannels,  // values: alpha [layers][kv_heads][dim_k]
  kGates,     // values: gate [layers][kv_heads]; out = gate * teacher's out + (1 - gate) * out without old rows
};

// What a layer's forward pass leaves for its backward pass. All [tokens][width].
struct LayerTape {
  std::vector<float> x;             // input of the layer
  std::vector<float> q_raw, k_raw;  // before the norm of heads; empty without one
  std::vector<float> q, k, v;
  std::vector<float> attended, lse;  // as attention gave it, [query heads][dim_v] and [query heads]
  std::vector<float> projected;      // attention's output before its norm; empty without one
  std::vector<float> mid;            // hidden states between attention and feed-forward
  std::vector<float> gate, up;
  std::vector<float> down;  // feed-forward's output before its norm; empty without one
};

struct ChunkTape {
  int64_t tokens = 0;
  std::vector<LayerTape> layers;
  std::vector<float> last;   // hidden states after all layers
  std::vector<float> final;  // the same, normalised: [tokens][dim]
};

class ChunkModel {
 public:
  // Errors: kUnsupported for models whose attention caps its scores.
  static Result<std::unique_ptr<ChunkModel>> create(std::shared_ptr<const LoadedModel> model, int64_t context,
                                                    ThreadPool& pool);

  // `prompt` holds the prompt's rows in fp32, all of them but for sliding windows. Layers with a sliding window have no
  // old rows. `teacher`: for kGates, the tape of the same chunk under kDense.
  // Errors: kInvalidArgument (ids, prompt of another type).
  Status forward(const KvCache& prompt, RowRange middle, std::span<const int32_t> ids, OldRows kind,
                 const float* values, const ChunkTape* teacher, ChunkTape& tape);

  // dfinal: gradient of tape.final. Adds that of `values` to dvalues.
  void backward(const KvCache& prompt, RowRange middle, OldRows kind, const float* values, const ChunkTape* teacher,
                const ChunkTape& tape, const float* dfinal, float* dvalues);

  // A layer's attention with the teacher's queries under a mask of channels, [layers][kv_heads][dim_k].
  ChunkAttention masked_attention(int layer, const KvCache& prompt, RowRange middle, const float* mask,
                                  const LayerTape& tape, int64_t tokens) const {
    return attention_of(layer, prompt, middle, OldRows::kChannels, mask, tape, tokens);
  }

  const ModelConfig& config() const { return model_->config(); }
  // Values that `kind` learns per layer.
  int64_t values_per_layer(OldRows kind) const;
  bool learns(int layer) const { return config().window.empty() || config().window[size_t(layer)] == 0; }

 private:
  ChunkModel(std::shared_ptr<const LoadedModel> model, int64_t context, ThreadPool& pool);
  const RopeTable& rope_of(int layer) const;
  ChunkAttention attention_of(int layer, const KvCache& prompt, RowRange middle, OldRows kind, const float* values,
                              const LayerTape& tape, int64_t tokens) const;
  void product(const Weight& w, const float* x, int64_t tokens, float* y);
  void unturn(int layer, float* x, int64_t tokens, int heads, int64_t first_position);

  std::shared_ptr<const LoadedModel> model_;
  ThreadPool& pool_;
  Matmul matmul_;
  MatmulInput input_;
  RopeTable rope_, rope_window_;
};

}  // namespace longkv
