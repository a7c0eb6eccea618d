#include "grad/chunk_model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "grad/products.h"
#include "kv/codec/codec.h"
#include "kv/layout.h"
#include "ops/elementwise.h"
#include "ops/norm.h"

namespace longkv {

Result<std::unique_ptr<ChunkModel>> ChunkModel::create(std::shared_ptr<const LoadedModel> model, int64_t context,
                                                       ThreadPool& pool, std::unique_ptr<ChunkOps> ops) {
  if (model->config().attn_softcap > 0.0f) {
    return fail(Code::kUnsupported, "a gradient needs attention whose scores are not capped; {} caps them at {}",
                model->config().family, model->config().attn_softcap);
  }
  if (!ops) ops = make_cpu_chunk_ops(pool, ProductType::kF32);
  return std::unique_ptr<ChunkModel>(new ChunkModel(std::move(model), context, pool, std::move(ops)));
}

ChunkModel::ChunkModel(std::shared_ptr<const LoadedModel> model, int64_t context, ThreadPool& pool,
                       std::unique_ptr<ChunkOps> ops)
    : model_(std::move(model)), pool_(pool), ops_(std::move(ops)), rope_(model_->rope_for(context), context) {
  if (config().rope_window) rope_window_ = RopeTable(*config().rope_window, context);
}

int64_t ChunkModel::values_per_layer(OldRows kind) const {
  if (kind == OldRows::kDense) return 0;
  const int64_t dim = config().head_dim_k;
  return int64_t(config().kv_heads) * (kind == OldRows::kMixed ? dim * dim : 1);
}

const RopeTable& ChunkModel::rope_of(int layer) const {
  return config().rope_window && !learns(layer) ? rope_window_ : rope_;
}

Status ChunkModel::product(const Weight& w, const float* x, int64_t tokens, float* y) {
  const ChunkOps::Product one[] = {{&w, y}};
  return ops_->multiply(one, x, tokens);
}

void ChunkModel::move(int layer, double distance, float* x, int64_t rows) const {
  turn_rows(rope_of(layer), distance, x, int(rows), config().head_dim_k);
}

// The transposed rotation: gradients before RoPE from those after it.
void ChunkModel::unturn(int layer, float* x, int64_t tokens, int heads, int64_t first_position) {
  const RopeTable& rope = rope_of(layer);
  const int dim = config().head_dim_k;
  const float magnitude = float(rope.magnitude());
  pool_.run(tokens, [&](int64_t t, int) {
    float* row = x + t * heads * dim;
    turn_rows(rope, -double(first_position + t), row, heads, dim);
    if (magnitude == 1.0f) return;
    for (int h = 0; h < heads; ++h) {
      for (int c = 0; c < rope.dim(); ++c) row[h * dim + c] *= magnitude;
    }
  });
}

// Exchanges the rows of a prompt for fp32 copies of those that the chunk can see.
void ChunkModel::decode_rows_of(ChunkAttention& a) const {
  auto decoded = std::make_shared<std::vector<float>>();
  int64_t values = 0;
  const auto first_of = [&](const KvHeadView& view) {
    return std::max(view.first_row, first_visible_row(view.rows, a.window));
  };
  for (const KvHeadView& view : a.prompt) values += (view.rows - first_of(view)) * (a.dim_k + a.dim_v);
  decoded->resize(size_t(values));
  float* to = decoded->data();
  for (KvHeadView& view : a.prompt) {
    const int64_t first = first_of(view), rows = view.rows - first;
    decode_k_rows(view, first, view.rows, to);
    decode_v_rows(view, first, view.rows, to + rows * a.dim_k);
    // Where row 0 would lie; rows below `first` are never read. As numbers, since no pointer may leave its array.
    const auto row_at = [&](const float* x, int64_t dim) {
      // NOLINTNEXTLINE(performance-no-int-to-ptr)
      return reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(x) - uintptr_t(first * dim) * sizeof(float));
    };
    view.k = row_at(to, a.dim_k);
    view.v = row_at(to + rows * a.dim_k, a.dim_v);
    view.k_stride = int64_t(a.dim_k) * 4;
    view.v_stride = int64_t(a.dim_v) * 4;
    view.k_type = view.v_type = KvType::kF32;
    view.first_row = first;
    view.middle = nullptr;
    to += rows * (a.dim_k + a.dim_v);
  }
  a.decoded = std::move(decoded);
}

ChunkAttention ChunkModel::attention_of(int layer, const ChunkPrompt& prompt, const OldMask& mask,
                                        const LayerTape& tape, int64_t tokens) const {
  const ModelConfig& c = config();
  ChunkAttention a;
  a.kv_heads = c.kv_heads;
  a.group = c.heads / c.kv_heads;
  a.dim_k = c.head_dim_k;
  a.dim_v = c.head_dim_v;
  a.scale = c.attn_scale;
  a.window = c.window.empty() ? 0 : c.window[size_t(layer)];
  a.prompt_id = prompt.id;
  a.layer = layer;
  for (int h = 0; h < c.kv_heads; ++h) {
    a.prompt.push_back(prompt.cache.view(layer, h));
    a.held = a.prompt.back().rows;
    a.prompt.back().rows = std::min(a.prompt.back().rows, prompt.rows);
  }
  if (prompt.cache.types() != KvTypes{KvType::kF32, KvType::kF32}) {
    decode_rows_of(a);
    a.held = a.prompt.back().rows;
  }
  if (learns(layer) && mask.kind != OldRows::kDense) {
    a.middle = prompt.middle;
    a.without_middle = mask.kind == OldRows::kGates;
    a.compensate = mask.compensate;
    if (mask.kind == OldRows::kMixed) a.mix = mask.values + layer * values_per_layer(mask.kind);
    if (!mask.heads.empty()) a.heads = mask.heads.subspan(size_t(layer) * size_t(c.kv_heads), size_t(c.kv_heads));
  }
  a.tokens = tokens;
  a.q = tape.q.data();
  a.k = tape.k.data();
  a.v = tape.v.data();
  return a;
}

Status ChunkModel::forward(const ChunkPrompt& prompt, std::span<const int32_t> ids, const OldMask& mask,
                           ChunkTape& tape) {
  const ModelConfig& c = config();
  const int64_t tokens = int64_t(ids.size()), first = prompt.rows;
  const ModelWeights& weights = model_->weights();
  tape.tokens = tokens;
  tape.layers.resize(size_t(c.layers));
  std::vector<float> hidden(size_t(tokens * c.dim)), norm(hidden.size()), out(hidden.size()), mixed, product_of_gates;
  for (int64_t t = 0; t < tokens; ++t) {
    const int32_t id = ids[size_t(t)];
    if (id < 0 || id >= c.vocab)
      return fail(Code::kInvalidArgument, "token id {} is outside the vocabulary of {}", id, c.vocab);
    dequantize(weights.embedding.type, weights.embedding.row(id), hidden.data() + t * c.dim, c.dim);
  }
  if (c.embedding_scale != 1.0f) scale_in_place(hidden.data(), c.embedding_scale, tokens * c.dim, pool_);

  for (int layer = 0; layer < c.layers; ++layer) {
    const LayerWeights& l = weights.layers[size_t(layer)];
    LayerTape& y = tape.layers[size_t(layer)];
    y.x = hidden;
    rms_norm(hidden.data(), c.dim, l.attn_norm.data(), c.norm_eps, tokens, c.dim, norm.data(), c.dim, pool_);
    y.q.resize(size_t(tokens * l.q.rows));
    y.k.resize(size_t(tokens * l.k.rows));
    y.v.resize(size_t(tokens * l.v.rows));
    const ChunkOps::Product projections[] = {{&l.q, y.q.data()}, {&l.k, y.k.data()}, {&l.v, y.v.data()}};
    LONGKV_TRY(ops_->multiply(projections, norm.data(), tokens));
    const auto bias = [&](const Weight& w, const Vector& values, std::vector<float>& to) {
      if (!values.empty()) add_bias(to.data(), values.data(), tokens, w.rows, pool_);
    };
    bias(l.q, l.q_bias, y.q);
    bias(l.k, l.k_bias, y.k);
    bias(l.v, l.v_bias, y.v);
    const auto norm_heads = [&](const Vector& weight, std::vector<float>& x, std::vector<float>& raw, int heads) {
      if (weight.empty()) return;
      raw = x;
      rms_norm(raw.data(), c.head_dim_k, weight.data(), c.norm_eps, tokens * heads, c.head_dim_k, x.data(),
               c.head_dim_k, pool_);
    };
    norm_heads(l.q_norm, y.q, y.q_raw, c.heads);
    norm_heads(l.k_norm, y.k, y.k_raw, c.kv_heads);
    apply_rope(rope_of(layer), y.q.data(), tokens, c.heads, c.head_dim_k, first, pool_);
    apply_rope(rope_of(layer), y.k.data(), tokens, c.kv_heads, c.head_dim_k, first, pool_);

    const ChunkAttention a = attention_of(layer, prompt, mask, y, tokens);
    y.attended.resize(size_t(tokens * c.heads * c.head_dim_v));
    y.lse.resize(size_t(tokens * c.heads));
    LONGKV_TRY(ops_->attend(a, y.attended.data(), y.lse.data()));
    const float* attended = y.attended.data();
    if (mask.kind == OldRows::kGates && learns(layer)) {
      const float* gate = mask.values + layer * values_per_layer(mask.kind);
      const float* full = mask.teacher->layers[size_t(layer)].attended.data();
      mixed.resize(y.attended.size());
      const int64_t head_values = int64_t(a.group) * c.head_dim_v;
      for (int64_t i = 0; i < int64_t(mixed.size()); ++i) {
        const float g = gate[i / head_values % c.kv_heads];
        mixed[size_t(i)] = g * full[i] + (1.0f - g) * attended[i];
      }
      attended = mixed.data();
    }
    const auto add_block = [&](const Vector& post_norm, std::vector<float>& raw) {
      if (!post_norm.empty()) {
        raw = out;
        rms_norm(raw.data(), c.dim, post_norm.data(), c.norm_eps, tokens, c.dim, out.data(), c.dim, pool_);
      }
      add_in_place(hidden.data(), out.data(), tokens * c.dim, pool_);
    };
    LONGKV_TRY(product(l.o, attended, tokens, out.data()));
    if (!l.o_bias.empty()) add_bias(out.data(), l.o_bias.data(), tokens, c.dim, pool_);
    add_block(l.post_attn_norm, y.projected);
    y.mid = hidden;

    rms_norm(hidden.data(), c.dim, l.ffn_norm.data(), c.norm_eps, tokens, c.dim, norm.data(), c.dim, pool_);
    y.gate.resize(size_t(tokens * c.ff_dim));
    y.up.resize(size_t(tokens * c.ff_dim));
    const ChunkOps::Product both[] = {{&l.gate, y.gate.data()}, {&l.up, y.up.data()}};
    LONGKV_TRY(ops_->multiply(both, norm.data(), tokens));
    product_of_gates = y.gate;
    gate_mul(c.activation, product_of_gates.data(), y.up.data(), tokens * c.ff_dim, pool_);
    LONGKV_TRY(product(l.down, product_of_gates.data(), tokens, out.data()));
    add_block(l.post_ffn_norm, y.down);
  }
  tape.last = hidden;
  tape.final.resize(hidden.size());
  rms_norm(hidden.data(), c.dim, weights.output_norm.data(), c.norm_eps, tokens, c.dim, tape.final.data(), c.dim,
           pool_);
  return {};
}

Result<double> ChunkModel::divergence(const float* teacher, const float* student, int64_t rows, float* dfinal) {
  const ModelConfig& c = config();
  const Weight& output = model_->weights().output;
  std::vector<float> wanted(size_t(rows * c.vocab)), found(wanted.size());
  LONGKV_TRY(product(output, teacher, rows, wanted.data()));
  LONGKV_TRY(product(output, student, rows, found.data()));
  if (c.final_softcap > 0) {
    softcap_in_place(wanted.data(), c.final_softcap, rows * c.vocab, pool_);
    softcap_in_place(found.data(), c.final_softcap, rows * c.vocab, pool_);
  }
  std::vector<double> lost(size_t(rows), 0.0);
  pool_.run(rows, [&](int64_t t, int) {
    float *a = wanted.data() + t * c.vocab, *b = found.data() + t * c.vocab;
    const auto log_sum = [&](const float* x) {
      const float top = *std::max_element(x, x + c.vocab);
      double sum = 0;
      for (int64_t i = 0; i < c.vocab; ++i) sum += std::exp(double(x[i] - top));
      return top + std::log(sum);
    };
    const double sum_a = log_sum(a), sum_b = log_sum(b);
    for (int64_t i = 0; i < c.vocab; ++i) {
      const double p = std::exp(a[i] - sum_a), q = std::exp(b[i] - sum_b);
      lost[size_t(t)] += p * ((a[i] - sum_a) - (b[i] - sum_b));
      double d = (q - p) / double(rows);
      if (c.final_softcap > 0) d *= 1.0 - std::pow(double(b[i]) / c.final_softcap, 2);
      a[i] = float(d);
    }
  });
  if (dfinal != nullptr) {
    std::fill_n(dfinal, rows * c.dim, 0.0f);
    const ChunkOps::Gradient one[] = {{&output, wanted.data()}};
    LONGKV_TRY(ops_->multiply_backward(one, rows, dfinal));
  }
  double sum = 0;
  for (double x : lost) sum += x / double(rows);
  return sum;
}

Result<double> ChunkModel::next_token_loss(const ChunkTape& tape, std::span<const int32_t> ids, float* dfinal) {
  constexpr int64_t kRowsAtOnce = 64;
  const ModelConfig& c = config();
  const Weight& output = model_->weights().output;
  const int64_t predicted = tape.tokens - 1;
  std::fill_n(dfinal, tape.tokens * c.dim, 0.0f);
  if (predicted < 1) return std::numeric_limits<double>::quiet_NaN();
  std::vector<float> logits(size_t(std::min(predicted, kRowsAtOnce) * c.vocab));
  std::vector<double> lost(size_t(predicted), 0.0);
  for (int64_t begin = 0; begin < predicted; begin += kRowsAtOnce) {
    const int64_t rows = std::min(kRowsAtOnce, predicted - begin);
    LONGKV_TRY(product(output, tape.final.data() + begin * c.dim, rows, logits.data()));
    if (c.final_softcap > 0) softcap_in_place(logits.data(), c.final_softcap, rows * c.vocab, pool_);
    pool_.run(rows, [&](int64_t t, int) {
      float* x = logits.data() + t * c.vocab;
      const int32_t target = ids[size_t(begin + t + 1)];
      const float top = *std::max_element(x, x + c.vocab);
      double sum = 0;
      for (int64_t i = 0; i < c.vocab; ++i) sum += std::exp(x[i] - top);
      lost[size_t(begin + t)] = top + std::log(sum) - x[target];
      for (int64_t i = 0; i < c.vocab; ++i) {
        double d = (std::exp(x[i] - top) / sum - (i == target ? 1.0 : 0.0)) / double(predicted);
        if (c.final_softcap > 0) d *= 1.0 - std::pow(double(x[i]) / c.final_softcap, 2);
        x[i] = float(d);
      }
    });
    const ChunkOps::Gradient one[] = {{&output, logits.data()}};
    LONGKV_TRY(ops_->multiply_backward(one, rows, dfinal + begin * c.dim));
  }
  return std::accumulate(lost.begin(), lost.end(), 0.0) / double(predicted);
}

Status ChunkModel::backward(const ChunkPrompt& prompt, const OldMask& mask, const ChunkTape& tape, const float* dfinal,
                            float* dvalues, std::vector<std::vector<float>>* keys) {
  const ModelConfig& c = config();
  const int64_t tokens = tape.tokens, first = prompt.rows;
  const ModelWeights& weights = model_->weights();
  std::vector<float> dx(size_t(tokens * c.dim), 0.0f), dnorm(dx.size()), dblock(dx.size());
  rms_norm_backward(tape.last.data(), weights.output_norm.data(), c.norm_eps, tokens, c.dim, dfinal, dx.data(), pool_);

  std::vector<float> dgate(size_t(tokens * c.ff_dim)), dup(dgate.size());
  std::vector<float> dout(size_t(tokens * c.heads * c.head_dim_v));
  std::vector<float> dq(size_t(tokens * c.heads * c.head_dim_k)), dk(size_t(tokens * c.kv_heads * c.head_dim_k));
  std::vector<float> dv(size_t(tokens * c.kv_heads * c.head_dim_v)), raw, dprompt;
  if (keys != nullptr) keys->assign(size_t(c.layers), {});
  const auto through_norm = [&](const Vector& post_norm, const std::vector<float>& before) -> const float* {
    if (post_norm.empty()) return dx.data();
    std::fill(dblock.begin(), dblock.end(), 0.0f);
    rms_norm_backward(before.data(), post_norm.data(), c.norm_eps, tokens, c.dim, dx.data(), dblock.data(), pool_);
    return dblock.data();
  };
  for (int layer = c.layers - 1; layer >= 0; --layer) {
    const LayerWeights& l = weights.layers[size_t(layer)];
    const LayerTape& y = tape.layers[size_t(layer)];
    std::fill(dup.begin(), dup.end(), 0.0f);
    const ChunkOps::Gradient down[] = {{&l.down, through_norm(l.post_ffn_norm, y.down)}};
    LONGKV_TRY(ops_->multiply_backward(down, tokens, dup.data()));
    gate_mul_backward(c.activation, y.gate.data(), y.up.data(), tokens * c.ff_dim, dup.data(), dgate.data(), pool_);
    std::fill(dnorm.begin(), dnorm.end(), 0.0f);
    const ChunkOps::Gradient both[] = {{&l.gate, dgate.data()}, {&l.up, dup.data()}};
    LONGKV_TRY(ops_->multiply_backward(both, tokens, dnorm.data()));
    rms_norm_backward(y.mid.data(), l.ffn_norm.data(), c.norm_eps, tokens, c.dim, dnorm.data(), dx.data(), pool_);

    std::fill(dout.begin(), dout.end(), 0.0f);
    const ChunkOps::Gradient block[] = {{&l.o, through_norm(l.post_attn_norm, y.projected)}};
    LONGKV_TRY(ops_->multiply_backward(block, tokens, dout.data()));
    if (mask.kind == OldRows::kGates && learns(layer)) {
      const int64_t at = layer * values_per_layer(mask.kind),
                    head_values = int64_t(c.heads / c.kv_heads) * c.head_dim_v;
      const float* full = mask.teacher->layers[size_t(layer)].attended.data();
      for (int64_t i = 0; i < int64_t(dout.size()); ++i) {
        const int64_t h = i / head_values % c.kv_heads;
        dvalues[at + h] += dout[size_t(i)] * (full[i] - y.attended[size_t(i)]);
        dout[size_t(i)] *= 1.0f - mask.values[at + h];
      }
    }
    const ChunkAttention a = attention_of(layer, prompt, mask, y, tokens);
    float* dmix =
        mask.kind == OldRows::kMixed && learns(layer) ? dvalues + layer * values_per_layer(mask.kind) : nullptr;
    const bool wanted = keys != nullptr && learns(layer);
    const int64_t before = a.prompt[0].rows, width = c.head_dim_k;
    dprompt.resize(wanted ? size_t(c.kv_heads * before * width) : 0);
    LONGKV_TRY(ops_->attend_backward(a, y.attended.data(), y.lse.data(), dout.data(),
                                     {dq.data(), dk.data(), dv.data(), dmix, wanted ? dprompt.data() : nullptr}));
    if (wanted) {
      std::vector<float>& to = (*keys)[size_t(layer)];
      for (int h = 0; h < c.kv_heads; ++h) {
        to.insert(to.end(), dprompt.begin() + h * before * width, dprompt.begin() + (h + 1) * before * width);
        for (int64_t t = 0; t < tokens; ++t) {
          const auto row = dk.begin() + (t * c.kv_heads + h) * width;
          to.insert(to.end(), row, row + width);
        }
      }
    }
    const auto before_rope = [&](std::vector<float>& d, const Vector& weight, const std::vector<float>& x, int heads) {
      unturn(layer, d.data(), tokens, heads, first);
      if (weight.empty()) return;
      raw.assign(d.size(), 0.0f);
      rms_norm_backward(x.data(), weight.data(), c.norm_eps, tokens * heads, c.head_dim_k, d.data(), raw.data(), pool_);
      d.swap(raw);
    };
    before_rope(dq, l.q_norm, y.q_raw, c.heads);
    before_rope(dk, l.k_norm, y.k_raw, c.kv_heads);
    std::fill(dnorm.begin(), dnorm.end(), 0.0f);
    const ChunkOps::Gradient projections[] = {{&l.q, dq.data()}, {&l.k, dk.data()}, {&l.v, dv.data()}};
    LONGKV_TRY(ops_->multiply_backward(projections, tokens, dnorm.data()));
    rms_norm_backward(y.x.data(), l.attn_norm.data(), c.norm_eps, tokens, c.dim, dnorm.data(), dx.data(), pool_);
  }
  return {};
}

}  // namespace longkv
