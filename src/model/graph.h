// The transformer block, written once over operators for every family.
//
// The graph knows neither a device nor a family: what differs between families is in the configuration and in which
// tensors are present; attention and everything about the KV cache is behind KvSession.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/threads.h"
#include "kv/session.h"
#include "longkv/status.h"
#include "model/model.h"
#include "ops/matmul.h"

namespace longkv {

// Scratch for a chunk of tokens; grows to the largest chunk seen.
struct GraphScratch {
  std::vector<float> norm;  // [chunk][dim]
  std::vector<float> q;     // [chunk][heads * head_dim_k]
  std::vector<float> k;     // [chunk][kv_heads * head_dim_k]
  std::vector<float> v;     // [chunk][kv_heads * head_dim_v]
  std::vector<float> attn;  // [chunk][heads * head_dim_v]
  std::vector<float> proj;  // [chunk][dim]
  std::vector<float> gate;  // [chunk][ff_dim]
  std::vector<float> up;    // [chunk][ff_dim]
};

class Graph {
 public:
  // `context`: positions that will ever be asked for lie below it.
  Graph(std::shared_ptr<const LoadedModel> model, int64_t context, ProductType products, ThreadPool& pool);

  // hidden[t] = embedding of ids[t], for `tokens` tokens: [tokens][dim]. Errors: kInvalidArgument for an id outside the
  // vocabulary.
  Status embed(const int32_t* ids, int64_t tokens, float* hidden);

  // One layer over a chunk of prompt tokens, hidden states [tokens][dim] replaced in place.
  Status prefill_layer(int layer, KvSession& kv, float* hidden, int64_t tokens, int64_t first_position,
                       int64_t prompt_end, const std::atomic<bool>* cancel);
  // One layer for one decoded token.
  Status decode_layer(int layer, KvSession& kv, float* hidden, int64_t position);

  // One layer for one decoded token of each of several sequences: hidden [rows][dim], row i at positions[i] of kvs[i].
  // A row's result is that of decode_layer() alone, bit for bit. Sequences whose results[i] is an error already are
  // left out; what fails in one sequence is noted there and does not disturb the others.
  void decode_rows(int layer, std::span<KvSession* const> kvs, float* hidden, std::span<const int64_t> positions,
                   std::span<Status> results);

  // Final norm and output matrix: logits [tokens][vocab] of the given hidden rows; `apart`: of several sequences.
  void logits(const float* hidden, int64_t tokens, float* out, bool apart = false);

  const LoadedModel& model() const { return *model_; }
  const std::shared_ptr<const LoadedModel>& model_pointer() const { return model_; }

  // Bytes of scratch for chunks of `tokens`, the plan's figure.
  static int64_t scratch_bytes(const ModelConfig& config, int64_t tokens);

 private:
  void project_qkv(const LayerWeights& l, const float* hidden, int64_t tokens, bool apart = false);
  void rotate(int layer, int64_t first_row, int64_t tokens, int64_t first_position);
  void finish_layer(const LayerWeights& l, float* hidden, int64_t tokens, bool apart = false);
  void reserve(int64_t tokens);

  std::shared_ptr<const LoadedModel> model_;
  ThreadPool& pool_;
  Matmul matmul_;
  MatmulInput input_;
  RopeTable rope_;
  RopeTable rope_window_;  // for sliding-window layers; equals rope_ unless the family says otherwise
  GraphScratch s_;
};

}  // namespace longkv
