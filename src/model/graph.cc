#include "model/graph.h"

#include <utility>

#include "base/error.h"
#include "ops/elementwise.h"
#include "ops/norm.h"

namespace longkv {

Graph::Graph(std::shared_ptr<const LoadedModel> model, int64_t context, ProductType products, ThreadPool& pool)
    : model_(std::move(model)), pool_(pool), matmul_(pool, products), rope_(model_->rope_for(context), context) {
  const auto& window = model_->config().rope_window;
  if (window) rope_window_ = RopeTable(*window, context);
}

int64_t Graph::scratch_bytes(const ModelConfig& c, int64_t tokens) {
  const int64_t values = 2 * c.dim + int64_t(c.heads) * (c.head_dim_k + c.head_dim_v) +
                         int64_t(c.kv_heads) * (c.head_dim_k + c.head_dim_v) + 2 * c.ff_dim;
  return values * tokens * int64_t(sizeof(float));
}

void Graph::reserve(int64_t tokens) {
  const ModelConfig& c = model_->config();
  auto grow = [&](std::vector<float>& v, int64_t per_token) {
    if (v.size() < size_t(per_token * tokens)) v.resize(size_t(per_token * tokens));
  };
  grow(s_.norm, c.dim);
  grow(s_.q, int64_t(c.heads) * c.head_dim_k);
  grow(s_.k, int64_t(c.kv_heads) * c.head_dim_k);
  grow(s_.v, int64_t(c.kv_heads) * c.head_dim_v);
  grow(s_.attn, int64_t(c.heads) * c.head_dim_v);
  grow(s_.proj, c.dim);
  grow(s_.gate, c.ff_dim);
  grow(s_.up, c.ff_dim);
}

Status Graph::embed(const int32_t* ids, int64_t tokens, float* hidden) {
  const ModelConfig& c = model_->config();
  const Weight& e = model_->weights().embedding;
  for (int64_t t = 0; t < tokens; ++t) {
    if (ids[t] < 0 || ids[t] >= c.vocab) {
      return fail(Code::kInvalidArgument, "token id {} is outside the vocabulary of {}", ids[t], c.vocab);
    }
  }
  constexpr int64_t kTokensPerTask = 16;
  pool_.run((tokens + kTokensPerTask - 1) / kTokensPerTask, [&](int64_t task, int) {
    const int64_t end = std::min(tokens, (task + 1) * kTokensPerTask);
    for (int64_t t = task * kTokensPerTask; t < end; ++t) {
      dequantize(e.type, e.row(ids[t]), hidden + t * c.dim, c.dim);
    }
  });
  if (c.embedding_scale != 1.0f) scale_in_place(hidden, c.embedding_scale, tokens * c.dim, pool_);
  return {};
}

void Graph::project_qkv(const LayerWeights& l, const float* hidden, int64_t tokens, bool apart) {
  const ModelConfig& c = model_->config();
  reserve(tokens);
  rms_norm(hidden, c.dim, l.attn_norm.data(), c.norm_eps, tokens, c.dim, s_.norm.data(), c.dim, pool_);
  input_.reset(s_.norm.data(), tokens, c.dim, apart);

  const MatmulOutput projections[] = {
      {&l.q, s_.q.data(), l.q.rows}, {&l.k, s_.k.data(), l.k.rows}, {&l.v, s_.v.data(), l.v.rows}};
  matmul_.run(projections, input_);
  auto bias = [&](const Weight& w, const Vector& values, std::vector<float>& y) {
    if (!values.empty()) add_bias(y.data(), values.data(), tokens, w.rows, pool_);
  };
  auto norm_heads = [&](const Vector& weight, std::vector<float>& y, int heads) {
    if (weight.empty()) return;
    rms_norm(y.data(), c.head_dim_k, weight.data(), c.norm_eps, tokens * heads, c.head_dim_k, y.data(), c.head_dim_k,
             pool_);
  };
  bias(l.q, l.q_bias, s_.q);
  bias(l.k, l.k_bias, s_.k);
  bias(l.v, l.v_bias, s_.v);
  norm_heads(l.q_norm, s_.q, c.heads);
  norm_heads(l.k_norm, s_.k, c.kv_heads);
}

// RoPE of projected rows [first_row, first_row + tokens), which are consecutive tokens.
void Graph::rotate(int layer, int64_t first_row, int64_t tokens, int64_t first_position) {
  const ModelConfig& c = model_->config();
  const RopeTable& rope = c.rope_window && !c.window.empty() && c.window[size_t(layer)] > 0 ? rope_window_ : rope_;
  float* q = s_.q.data() + first_row * c.heads * c.head_dim_k;
  float* k = s_.k.data() + first_row * c.kv_heads * c.head_dim_k;
  apply_rope(rope, q, tokens, c.heads, c.head_dim_k, first_position, pool_);
  apply_rope(rope, k, tokens, c.kv_heads, c.head_dim_k, first_position, pool_);
}

void Graph::finish_layer(const LayerWeights& l, float* hidden, int64_t tokens, bool apart) {
  const ModelConfig& c = model_->config();
  // Adds a block's output to the residual stream, normalised first where the family does so.
  auto add_residual = [&](const Vector& post_norm) {
    if (!post_norm.empty()) {
      rms_norm(s_.proj.data(), c.dim, post_norm.data(), c.norm_eps, tokens, c.dim, s_.proj.data(), c.dim, pool_);
    }
    add_in_place(hidden, s_.proj.data(), tokens * c.dim, pool_);
  };

  input_.reset(s_.attn.data(), tokens, int64_t(c.heads) * c.head_dim_v, apart);
  matmul_.run(l.o, input_, s_.proj.data(), c.dim);
  if (!l.o_bias.empty()) add_bias(s_.proj.data(), l.o_bias.data(), tokens, c.dim, pool_);
  add_residual(l.post_attn_norm);

  rms_norm(hidden, c.dim, l.ffn_norm.data(), c.norm_eps, tokens, c.dim, s_.norm.data(), c.dim, pool_);
  input_.reset(s_.norm.data(), tokens, c.dim, apart);
  const MatmulOutput gate_and_up[] = {{&l.gate, s_.gate.data(), c.ff_dim}, {&l.up, s_.up.data(), c.ff_dim}};
  matmul_.run(gate_and_up, input_);
  gate_mul(c.activation, s_.gate.data(), s_.up.data(), tokens * c.ff_dim, pool_);
  input_.reset(s_.gate.data(), tokens, c.ff_dim, apart);
  matmul_.run(l.down, input_, s_.proj.data(), c.dim);
  add_residual(l.post_ffn_norm);
}

Status Graph::prefill_layer(int layer, KvSession& kv, float* hidden, int64_t tokens, int64_t first_position,
                            int64_t prompt_end, const std::atomic<bool>* cancel) {
  const LayerWeights& l = model_->weights().layers[size_t(layer)];
  project_qkv(l, hidden, tokens);
  rotate(layer, 0, tokens, first_position);
  LONGKV_TRY(kv.prefill(layer, s_.q.data(), s_.k.data(), s_.v.data(), tokens, prompt_end, s_.attn.data(), cancel));
  finish_layer(l, hidden, tokens);
  return {};
}

Status Graph::decode_layer(int layer, KvSession& kv, float* hidden, int64_t position) {
  const LayerWeights& l = model_->weights().layers[size_t(layer)];
  project_qkv(l, hidden, 1);
  rotate(layer, 0, 1, position);
  LONGKV_TRY(kv.decode(layer, s_.q.data(), s_.k.data(), s_.v.data(), s_.attn.data()));
  finish_layer(l, hidden, 1);
  return {};
}

void Graph::decode_rows(int layer, std::span<KvSession* const> kvs, float* hidden, std::span<const int64_t> positions,
                        std::span<Status> results) {
  const ModelConfig& c = model_->config();
  const LayerWeights& l = model_->weights().layers[size_t(layer)];
  const auto rows = int64_t(kvs.size());
  project_qkv(l, hidden, rows, /*apart=*/true);
  for (int64_t i = 0; i < rows; ++i) {
    if (!results[size_t(i)].ok()) continue;
    rotate(layer, i, 1, positions[size_t(i)]);
    results[size_t(i)] = kvs[size_t(i)]->decode(
        layer, s_.q.data() + i * c.heads * c.head_dim_k, s_.k.data() + i * c.kv_heads * c.head_dim_k,
        s_.v.data() + i * c.kv_heads * c.head_dim_v, s_.attn.data() + i * c.heads * c.head_dim_v);
  }
  finish_layer(l, hidden, rows, /*apart=*/true);
}

void Graph::logits(const float* hidden, int64_t tokens, float* out, bool apart) {
  const ModelConfig& c = model_->config();
  reserve(tokens);
  rms_norm(hidden, c.dim, model_->weights().output_norm.data(), c.norm_eps, tokens, c.dim, s_.norm.data(), c.dim,
           pool_);
  // What is rounded here meets no later layer that could even it out: half of all divergence from fp32 products.
  input_.reset(s_.norm.data(), tokens, c.dim, apart, kFineEverywhere);
  matmul_.run(model_->weights().output, input_, out, c.vocab);
  if (c.final_softcap > 0.0f) softcap_in_place(out, c.final_softcap, tokens * c.vocab, pool_);
}

}  // namespace longkv
