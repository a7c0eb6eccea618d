// Writes a GGUF model of a known shape with random weights, so that big shapes can be timed where no checkpoint can be
// had. Such a model computes nonsense; every figure of it must say "synthetic".
//   synthetic_model SHAPE FILE [TYPE [LAYERS]]     SHAPE: llama-3.1-8b, qwen2.5-7b, internlm2.5-7b; TYPE: q4_0, q8_0 or
//   f16; LAYERS: fewer than the shape has, to time one layer at lengths that the whole would take too long for
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/float16.h"
#include "gguf/writer.h"
#include "quant/tensor_type.h"

namespace {

using namespace longkv;

struct Shape {
  const char* name;
  const char* architecture;
  int64_t layers, dim, heads, kv_heads, head_dim, ff, vocab, context;
  float rope_base;
  bool bias;
};
constexpr Shape kShapes[] = {
    {"llama-3.1-8b", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 1 << 20, 500000.0f, false},
    {"qwen2.5-7b", "qwen2", 28, 3584, 28, 4, 128, 18944, 152064, 1 << 20, 1000000.0f, true},
    {"internlm2.5-7b", "llama", 32, 4096, 32, 8, 128, 14336, 92544, 1 << 20, 50000000.0f, false},
};

// Random blocks whose values have a deviation of about 0.02.
std::vector<uint8_t> random_blocks(TensorType type, int64_t values) {
  std::mt19937_64 random(1);
  const TensorTypeInfo* info = tensor_type_info(type);
  std::vector<uint8_t> data(size_t(values / info->block_values * info->block_bytes));
  for (size_t i = 0; i + 8 <= data.size(); i += 8) {
    const uint64_t bits = random();
    std::memcpy(data.data() + i, &bits, 8);
  }
  for (size_t at = 0; at < data.size(); at += size_t(info->block_bytes)) {
    f16_t h = to_f16(type == TensorType::kQ8_0 ? 0.0003f : 0.0045f);
    if (type == TensorType::kF16) h = to_f16((float(random() >> 40) * 0x1p-24f - 0.5f) * 0.07f);
    std::memcpy(data.data() + at, &h, 2);
  }
  return data;
}

// A token for every byte, so that commands which read text take the file too.
Status write_vocabulary(GgufWriter& w, int64_t n) {
  std::vector<std::string> tokens = {"<unk>", "<s>", "</s>"};
  std::vector<int32_t> types = {2, 3, 3};
  while (int64_t(tokens.size()) < n) {
    const auto i = int(tokens.size()) - 3;
    char name[32];
    std::snprintf(name, sizeof(name), i < 256 ? "<0x%02X>" : "<unused%d>", i);
    tokens.emplace_back(name);
    types.push_back(i < 256 ? 6 : 5);
  }
  LONGKV_TRY(w.add_string("tokenizer.ggml.model", "llama"));
  LONGKV_TRY(w.add_strings("tokenizer.ggml.tokens", tokens));
  LONGKV_TRY(w.add_i32s("tokenizer.ggml.token_type", types));
  LONGKV_TRY(w.add_f32s("tokenizer.ggml.scores", std::vector<float>(tokens.size(), 0.0f)));
  LONGKV_TRY(w.add_u32("tokenizer.ggml.bos_token_id", 1));
  return w.add_u32("tokenizer.ggml.eos_token_id", 2);
}

Status write_model(const Shape& s, TensorType type, const std::string& path) {
  GgufWriter w;
  const std::string p = std::string(s.architecture) + ".";
  LONGKV_TRY(w.add_string("general.architecture", s.architecture));
  LONGKV_TRY(w.add_string("general.name", std::string("synthetic ") + s.name));
  LONGKV_TRY(w.add_u32(p + "block_count", uint32_t(s.layers)));
  LONGKV_TRY(w.add_u32(p + "context_length", uint32_t(s.context)));
  LONGKV_TRY(w.add_u32(p + "embedding_length", uint32_t(s.dim)));
  LONGKV_TRY(w.add_u32(p + "feed_forward_length", uint32_t(s.ff)));
  LONGKV_TRY(w.add_u32(p + "attention.head_count", uint32_t(s.heads)));
  LONGKV_TRY(w.add_u32(p + "attention.head_count_kv", uint32_t(s.kv_heads)));
  LONGKV_TRY(w.add_f32(p + "attention.layer_norm_rms_epsilon", 1e-5f));
  LONGKV_TRY(w.add_f32(p + "rope.freq_base", s.rope_base));
  LONGKV_TRY(w.add_u32(p + "rope.dimension_count", uint32_t(s.head_dim)));

  LONGKV_TRY(write_vocabulary(w, s.vocab));
  // Every tensor is a piece of one random store: the writer copies none of it.
  const int64_t largest = s.dim * std::max(s.vocab, s.ff);
  const std::vector<uint8_t> store = random_blocks(type, largest);
  const std::vector<float> ones(size_t(std::max(s.dim, s.heads * s.head_dim)), 1.0f);
  const auto matrix = [&](const std::string& name, int64_t rows, int64_t cols) {
    const int64_t dims[] = {cols, rows};
    return w.add_tensor(name, type, dims, std::span(store).first(size_t(rows * row_bytes(type, cols).value())));
  };
  const auto vector = [&](const std::string& name, int64_t n) {
    const int64_t dims[] = {n};
    return w.add_tensor(name, TensorType::kF32, dims,
                        std::span(reinterpret_cast<const uint8_t*>(ones.data()), size_t(n) * sizeof(float)));
  };
  const int64_t q = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim;
  LONGKV_TRY(matrix("token_embd.weight", s.vocab, s.dim));
  LONGKV_TRY(matrix("output.weight", s.vocab, s.dim));
  LONGKV_TRY(vector("output_norm.weight", s.dim));
  for (int64_t i = 0; i < s.layers; ++i) {
    const std::string b = "blk." + std::to_string(i) + ".";
    LONGKV_TRY(vector(b + "attn_norm.weight", s.dim));
    LONGKV_TRY(matrix(b + "attn_q.weight", q, s.dim));
    LONGKV_TRY(matrix(b + "attn_k.weight", kv, s.dim));
    LONGKV_TRY(matrix(b + "attn_v.weight", kv, s.dim));
    if (s.bias) {
      LONGKV_TRY(vector(b + "attn_q.bias", q));
      LONGKV_TRY(vector(b + "attn_k.bias", kv));
      LONGKV_TRY(vector(b + "attn_v.bias", kv));
    }
    LONGKV_TRY(matrix(b + "attn_output.weight", s.dim, q));
    LONGKV_TRY(vector(b + "ffn_norm.weight", s.dim));
    LONGKV_TRY(matrix(b + "ffn_gate.weight", s.ff, s.dim));
    LONGKV_TRY(matrix(b + "ffn_up.weight", s.ff, s.dim));
    LONGKV_TRY(matrix(b + "ffn_down.weight", s.dim, s.ff));
  }
  return w.write(path);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string shape = argc > 1 ? argv[1] : "", type = argc > 3 ? argv[3] : "q4_0";
  for (Shape s : kShapes) {
    if (argc < 3 || shape != s.name) continue;
    if (argc > 4) s.layers = std::clamp<int64_t>(std::atoll(argv[4]), 1, s.layers);
    for (TensorType t : {TensorType::kQ4_0, TensorType::kQ8_0, TensorType::kF16}) {
      if (type != tensor_type_info(t)->name) continue;
      const Status done = write_model(s, t, argv[2]);
      if (done.ok()) return 0;
      std::fprintf(stderr, "error: %s\n", done.message().c_str());
      return 1;
    }
  }
  std::fprintf(stderr, "usage: synthetic_model SHAPE FILE [TYPE [LAYERS]]; shapes:");
  for (const Shape& s : kShapes) std::fprintf(stderr, " %s", s.name);
  std::fprintf(stderr, "; types: q4_0 q8_0 f16\n");
  return 2;
}
