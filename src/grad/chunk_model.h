// A chunk of tokens through the whole model behind a prompt whose keys and values do not change, and the gradient of a
// loss on the final hidden states with respect to what is learned: LeanK's alpha per K channel or DuoAttention's gate
// per KV head. Products in fp32. Nothing is propagated into the prompt: its rows do not depend on what is learned, so
// the gradient is exact where only the chunk's queries meet masked keys. The gradient by the prompt's keys, in each
// layer, can be had too.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/threads.h"
#include "grad/chunk_attention.h"
#include "grad/chunk_ops.h"
#include "kv/cache.h"
#include "model/model.h"

namespace longkv {

enum class OldRows {
  kDense,  // count as they are: the teacher
  kMixed,  // values: [layers][kv_heads][dim_k][dim_k], what old keys are multiplied by
  kGates,  // values: gate [layers][kv_heads]; out = gate * teacher's out + (1 - gate) * out without old rows
};

// The document before a chunk: the first `rows` tokens of a cache, of which `middle` are old. Where rows were evicted
// or merged, all that a cache has left. Rows of other types than fp32 are decoded. Under an id, which no other rows may
// ever have, operators on a card may keep copies of the rows; 0: they may not.
struct ChunkPrompt {
  const KvCache& cache;
  int64_t rows;
  RowRange middle;
  uint64_t id = 0;
};

struct ChunkTape;

// How old rows count.
struct OldMask {
  OldRows kind = OldRows::kDense;
  const float* values = nullptr;
  bool compensate = false;             // kMixed, and `heads`: ChunkAttention
  std::span<const OldHead> heads;      // [layers][kv_heads] or empty
  const ChunkTape* teacher = nullptr;  // kGates: the tape of the same chunk under kDense
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
  // `ops` compute what is heavy; nullptr: the CPU, in fp32. They must take the weights of this very model.
  // Errors: kUnsupported for models whose attention caps its scores.
  static Result<std::unique_ptr<ChunkModel>> create(std::shared_ptr<const LoadedModel> model, int64_t context,
                                                    ThreadPool& pool, std::unique_ptr<ChunkOps> ops = nullptr);

  // Layers with a sliding window have no old rows.
  // Errors: kInvalidArgument (ids), and here and below those of the operators.
  Status forward(const ChunkPrompt& prompt, std::span<const int32_t> ids, const OldMask& mask, ChunkTape& tape);

  // dfinal: gradient of tape.final. Adds that of the mask's values to dvalues. With `keys`, which then gets a layer
  // each, also the gradient by the keys of full attention as they were attended, RoPE applied: [kv_heads][rows held,
  // then the chunk's][dim_k]; empty for layers with a sliding window.
  Status backward(const ChunkPrompt& prompt, const OldMask& mask, const ChunkTape& tape, const float* dfinal,
                  float* dvalues, std::vector<std::vector<float>>* keys = nullptr);

  // Mean cross-entropy of the chunk's tokens but the first, each predicted from the one before, and its gradient by
  // tape.final. NaN without two tokens.
  Result<double> next_token_loss(const ChunkTape& tape, std::span<const int32_t> ids, float* dfinal);

  // Mean over `rows` rows of KL(teacher || student) of the next token, from final hidden states [rows][dim]; its
  // gradient by the student's is written to dfinal unless that is nullptr.
  Result<double> divergence(const float* teacher, const float* student, int64_t rows, float* dfinal);

  // A layer's attention under a mask, with the queries, keys and values of a tape.
  ChunkAttention attention_of(int layer, const ChunkPrompt& prompt, const OldMask& mask, const LayerTape& tape,
                              int64_t tokens) const;

  // Rows [rows][head_dim_k] of a layer's queries or keys as they would be `distance` positions later.
  void move(int layer, double distance, float* x, int64_t rows) const;

  ChunkOps& ops() const { return *ops_; }
  const ModelConfig& config() const { return model_->config(); }
  // Values that `kind` learns per layer.
  int64_t values_per_layer(OldRows kind) const;
  bool learns(int layer) const { return config().window.empty() || config().window[size_t(layer)] == 0; }

 private:
  ChunkModel(std::shared_ptr<const LoadedModel> model, int64_t context, ThreadPool& pool,
             std::unique_ptr<ChunkOps> ops);
  const RopeTable& rope_of(int layer) const;
  Status product(const Weight& w, const float* x, int64_t tokens, float* y);
  void decode_rows_of(ChunkAttention& a) const;
  void unturn(int layer, float* x, int64_t tokens, int heads, int64_t first_position);

  std::shared_ptr<const LoadedModel> model_;
  ThreadPool& pool_;
  std::unique_ptr<ChunkOps> ops_;
  RopeTable rope_, rope_window_;
};

}  // namespace longkv
