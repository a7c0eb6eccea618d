#include "model/weights.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>

#include "base/error.h"
#include "base/log.h"
#include "model/families/families.h"

namespace longkv {

namespace {

// Looks tensors up by name, checks shapes, and remembers which were used.
class Binder {
 public:
  explicit Binder(const GgufFile& file) : file_(file) {}

  bool has(const std::string& name) const { return file_.find(name) != nullptr; }
  int64_t rows(const std::string& name) const { return has(name) ? file_.find(name)->dims[1] : 0; }

  Result<Weight> matrix(const std::string& name, int64_t rows, int64_t cols) {
    const TensorInfo* t = file_.find(name);
    if (t == nullptr) return fail(Code::kCorrupt, "tensor '{}' is missing", name);
    if (t->dims[0] != cols || t->dims[1] != rows || t->dims[2] != 1 || t->dims[3] != 1) {
      return fail(Code::kCorrupt, "tensor '{}' has shape [{}, {}, {}, {}], expected [{}, {}]", name, t->dims[0],
                  t->dims[1], t->dims[2], t->dims[3], cols, rows);
    }
    used_.insert(name);
    Weight w;
    w.type = t->type;
    w.rows = rows;
    w.cols = cols;
    LONGKV_ASSIGN(w.row_bytes, row_bytes(t->type, cols));
    w.data = t->data;
    return w;
  }

  Result<Vector> vector(const std::string& name, int64_t n) {
    const TensorInfo* t = file_.find(name);
    if (t == nullptr) return fail(Code::kCorrupt, "tensor '{}' is missing", name);
    if (t->elements() != n) {
      return fail(Code::kCorrupt, "tensor '{}' has {} values, expected {}", name, t->elements(), n);
    }
    used_.insert(name);
    LONGKV_ASSIGN(const int64_t bytes, row_bytes(t->type, n));
    if (uint64_t(bytes) > t->bytes) return fail(Code::kCorrupt, "tensor '{}' is shorter than its shape says", name);
    Vector v(static_cast<size_t>(n));
    dequantize(t->type, t->data, v.data(), n);
    return v;
  }

  Result<Vector> optional_vector(const std::string& name, int64_t n) {
    if (!has(name)) return Vector();
    return vector(name, n);
  }

  // Of what layers may have or lack: all of them have it, or none.
  Result<Vector> layer_vector(const std::string& layer, const std::string& name, int64_t n) {
    const bool here = has(layer + name);
    if (optional_.emplace(name, here).first->second != here) {
      return fail(Code::kCorrupt, "tensor '{}{}' is {}", layer, name,
                  here ? "there, which earlier layers have none of" : "missing, which earlier layers have");
    }
    return optional_vector(layer + name, n);
  }

  // Divisors of RoPE's frequencies.
  Result<Vector> divisors(const std::string& name, int64_t n) {
    LONGKV_ASSIGN(Vector v, vector(name, n));
    for (const float d : v) {
      if (!(d > 0.0f) || !std::isfinite(d))
        return fail(Code::kCorrupt, "tensor '{}' holds {}; expected positive numbers", name, d);
    }
    return v;
  }

  Status report_unused() const {
    int64_t unused = 0;
    std::string first;
    for (const TensorInfo& t : file_.tensors()) {
      if (used_.count(t.name) != 0) continue;
      if (unused++ == 0) first = t.name;
    }
    if (unused == 0) return {};
    return notice(fmt::format("{} tensors of the model file are not used by longkv, the first is '{}'", unused, first));
  }

 private:
  const GgufFile& file_;
  std::set<std::string> used_;
  std::map<std::string, bool> optional_;  // whether the first layer has it
};

// Rows [begin, begin + rows) of a matrix.
Weight slice(const Weight& w, int64_t begin, int64_t rows) {
  Weight s = w;
  s.data = w.row(begin);
  s.rows = rows;
  return s;
}

// Elements [begin, begin + n) of a vector that may be absent.
Vector slice(const Vector& v, int64_t begin, int64_t n) {
  return v.empty() ? Vector() : Vector(v.begin() + begin, v.begin() + begin + n);
}

Status bind_attention(Binder& b, const std::string& p, const ModelConfig& c, LayerWeights& l) {
  const int64_t nq = int64_t(c.heads) * c.head_dim_k;
  const int64_t nk = int64_t(c.kv_heads) * c.head_dim_k;
  const int64_t nv = int64_t(c.kv_heads) * c.head_dim_v;
  if (b.has(p + "attn_qkv.weight")) {
    LONGKV_ASSIGN(const Weight fused, b.matrix(p + "attn_qkv.weight", nq + nk + nv, c.dim));
    LONGKV_ASSIGN(const Vector bias, b.layer_vector(p, "attn_qkv.bias", nq + nk + nv));
    l.q = slice(fused, 0, nq);
    l.k = slice(fused, nq, nk);
    l.v = slice(fused, nq + nk, nv);
    l.q_bias = slice(bias, 0, nq);
    l.k_bias = slice(bias, nq, nk);
    l.v_bias = slice(bias, nq + nk, nv);
  } else {
    LONGKV_ASSIGN(l.q, b.matrix(p + "attn_q.weight", nq, c.dim));
    LONGKV_ASSIGN(l.k, b.matrix(p + "attn_k.weight", nk, c.dim));
    LONGKV_ASSIGN(l.v, b.matrix(p + "attn_v.weight", nv, c.dim));
    LONGKV_ASSIGN(l.q_bias, b.layer_vector(p, "attn_q.bias", nq));
    LONGKV_ASSIGN(l.k_bias, b.layer_vector(p, "attn_k.bias", nk));
    LONGKV_ASSIGN(l.v_bias, b.layer_vector(p, "attn_v.bias", nv));
  }
  LONGKV_ASSIGN(l.q_norm, b.layer_vector(p, "attn_q_norm.weight", c.head_dim_k));
  LONGKV_ASSIGN(l.k_norm, b.layer_vector(p, "attn_k_norm.weight", c.head_dim_k));
  LONGKV_ASSIGN(l.o, b.matrix(p + "attn_output.weight", c.dim, int64_t(c.heads) * c.head_dim_v));
  LONGKV_ASSIGN(l.o_bias, b.layer_vector(p, "attn_output.bias", c.dim));
  LONGKV_ASSIGN(l.attn_norm, b.vector(p + "attn_norm.weight", c.dim));
  LONGKV_ASSIGN(l.post_attn_norm, b.layer_vector(p, "post_attention_norm.weight", c.dim));
  return {};
}

Status bind_ffn(Binder& b, const std::string& p, const ModelConfig& c, LayerWeights& l) {
  if (b.has(p + "ffn_gate.weight")) {
    LONGKV_ASSIGN(l.gate, b.matrix(p + "ffn_gate.weight", c.ff_dim, c.dim));
    LONGKV_ASSIGN(l.up, b.matrix(p + "ffn_up.weight", c.ff_dim, c.dim));
  } else if (b.rows(p + "ffn_up.weight") == c.ff_dim) {
    return fail(Code::kCorrupt, "tensor '{}ffn_gate.weight' is missing", p);
  } else {
    LONGKV_ASSIGN(const Weight fused, b.matrix(p + "ffn_up.weight", 2 * c.ff_dim, c.dim));
    l.gate = slice(fused, 0, c.ff_dim);
    l.up = slice(fused, c.ff_dim, c.ff_dim);
  }
  LONGKV_ASSIGN(l.down, b.matrix(p + "ffn_down.weight", c.dim, c.ff_dim));
  LONGKV_ASSIGN(l.ffn_norm, b.vector(p + "ffn_norm.weight", c.dim));
  LONGKV_ASSIGN(l.post_ffn_norm, b.layer_vector(p, "post_ffw_norm.weight", c.dim));
  return {};
}

// The embedding has a row for every token; what else the file says of their number must agree.
Status check_vocabulary(const Metadata& m, const ModelConfig& c) {
  const auto tokens = m.all().find("tokenizer.ggml.tokens");
  if (tokens != m.all().end() && tokens->second.count > uint64_t(c.vocab)) {
    return fail(Code::kCorrupt, "tokenizer.ggml.tokens has {} tokens, the embedding {} rows", tokens->second.count,
                c.vocab);
  }
  LONGKV_ASSIGN(const int64_t size, m.integer_or(c.family + ".vocab_size", 0, int64_t(1) << 40, c.vocab));
  if (size == c.vocab) return {};
  return notice(
      fmt::format("'{}.vocab_size' is {}, but the embedding has {} rows, which are used", c.family, size, c.vocab));
}

}  // namespace

uint64_t ModelWeights::bytes_per_token() const {
  auto bytes = [](const Weight& w) { return uint64_t(w.rows) * uint64_t(w.row_bytes); };
  uint64_t total = bytes(output);
  for (const LayerWeights& l : layers) {
    for (const Weight* w : {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down}) total += bytes(*w);
  }
  return total;
}

std::vector<Weight*> ModelWeights::products(int count) {
  std::vector<Weight*> all;
  const size_t met = count < 0 ? layers.size() : std::min(layers.size(), size_t(count));
  for (size_t i = 0; i < met; ++i) {
    LayerWeights& l = layers[i];
    all.insert(all.end(), {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down});
  }
  if (count < 0) all.push_back(&output);
  return all;
}

Result<ModelWeights> bind_weights(const GgufFile& file, ModelConfig& c) {
  Binder b(file);
  ModelWeights w;
  const TensorInfo* embedding = file.find("token_embd.weight");
  if (embedding == nullptr) return fail(Code::kCorrupt, "tensor 'token_embd.weight' is missing");
  c.vocab = embedding->dims[1];
  LONGKV_TRY(check_vocabulary(file.metadata(), c));
  LONGKV_ASSIGN(w.embedding, b.matrix("token_embd.weight", c.vocab, c.dim));
  w.output = w.embedding;
  if (b.has("output.weight")) {
    LONGKV_ASSIGN(w.output, b.matrix("output.weight", c.vocab, c.dim));
  }
  LONGKV_ASSIGN(w.output_norm, b.vector("output_norm.weight", c.dim));
  w.layers.resize(size_t(c.layers));
  for (int i = 0; i < c.layers; ++i) {
    const std::string prefix = fmt::format("blk.{}.", i);
    LONGKV_TRY(bind_attention(b, prefix, c, w.layers[size_t(i)]));
    LONGKV_TRY(bind_ffn(b, prefix, c, w.layers[size_t(i)]));
    // Some files repeat the divisors in every layer; they are the same numbers.
    if (b.has(prefix + "rope_freqs.weight")) {
      LONGKV_ASSIGN(w.rope_freqs, b.divisors(prefix + "rope_freqs.weight", c.rope.dim / 2));
    }
  }
  if (b.has("rope_freqs.weight")) {
    LONGKV_ASSIGN(w.rope_freqs, b.divisors("rope_freqs.weight", c.rope.dim / 2));
  }
  if (b.has("rope_factors_long.weight")) {
    LONGKV_ASSIGN(w.rope_factors_long, b.divisors("rope_factors_long.weight", c.rope.dim / 2));
    LONGKV_ASSIGN(w.rope_factors_short, b.divisors("rope_factors_short.weight", c.rope.dim / 2));
    c.rope.scaling = RopeScaling::kLongRope;
  }
  if (c.rope.scaling == RopeScaling::kLongRope && w.rope_factors_long.empty()) {
    return fail(Code::kCorrupt,
                "the model says longrope, but has no tensors 'rope_factors_long' and 'rope_factors_short'");
  }
  for (const std::string_view name : find_family(c.family)->tensors) {
    const std::string first = "blk.0." + std::string(name);
    if (!b.has(first)) return fail(Code::kCorrupt, "tensor '{}' is missing; models of {} have it", first, c.family);
  }
  LONGKV_TRY(b.report_unused());
  return w;
}

}  // namespace longkv
