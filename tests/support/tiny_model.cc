#include "support/tiny_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

namespace longkv::test {

namespace {

constexpr uint64_t kDim = 64, kHeads = 2, kKvHeads = 1, kHidden = 96, kContext = 512;
constexpr const char* kChatml =
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

TinyBpe vocabulary() { return TinyBpe({"Ā Ā"}, {{"<|im_start|>", 3}, {"<|im_end|>", 3}}); }

class TensorWriter {
 public:
  TensorWriter(MkGguf& file, const TinyModel& model) : file_(file), model_(model), random_(model.seed) {}

  void matrix(const std::string& name, uint64_t cols, uint64_t rows, bool letters_only = false) {
    std::normal_distribution<float> normal(0.0f, 1.0f / std::sqrt(float(cols)));
    std::vector<float> values(cols * rows);
    for (float& v : values) v = normal(random_);
    for (uint64_t row = 0; letters_only && row < rows; ++row) {
      if (row < 'a' || row > 'z') std::fill_n(values.begin() + int64_t(row * cols), cols, 0.0f);
    }
    write(name, {cols, rows}, std::move(values));
  }
  void ones(const std::string& name) { write(name, {kDim}, std::vector<float>(kDim, 1.0f)); }

 private:
  void write(const std::string& name, std::vector<uint64_t> dims, std::vector<float> values) {
    const auto found = model_.mistakes.find(name);
    const TensorMistake mistake = found == model_.mistakes.end() ? TensorMistake{} : found->second;
    if (mistake.missing) return;
    if (mistake.first_value) values[0] = *mistake.first_value;
    if (!mistake.dims.empty()) {
      dims = mistake.dims;
      uint64_t n = 1;
      for (const uint64_t d : dims) n *= d;
      values.resize(n, 0.5f);
    }
    if (mistake.raw_type) {
      file_.raw_record(name, *mistake.raw_type, dims, 0);
    } else {
      file_.f32_tensor(name, dims, values);
    }
  }

  MkGguf& file_;
  const TinyModel& model_;
  std::mt19937_64 random_;
};

}  // namespace

std::string TinyModel::write(const std::string& name) const {
  const TinyBpe words = vocabulary();
  MkGguf file;
  file.string("general.architecture", architecture).string("general.name", "tiny test model");
  const std::string p = architecture + ".";
  file.i64(p + "block_count", blocks).u32(p + "embedding_length", kDim).u32(p + "feed_forward_length", kHidden);
  file.u32(p + "attention.head_count", kHeads).u32(p + "attention.head_count_kv", kKvHeads);
  file.f32(p + "attention.layer_norm_rms_epsilon", epsilon).u32(p + "context_length", kContext);
  file.string("tokenizer.ggml.model", "gpt2").string("tokenizer.ggml.pre", pre);
  file.strings("tokenizer.ggml.tokens", words.tokens).i32s("tokenizer.ggml.token_type", words.types);
  file.strings("tokenizer.ggml.merges", words.merges).boolean("tokenizer.ggml.add_bos_token", false);
  file.i64("tokenizer.ggml.eos_token_id", eos_id >= 0 ? eos_id : int64_t(words.tokens.size()) - 1);
  if (!chat_template.empty()) file.string("tokenizer.chat_template", chat_template);
  if (more) more(file);

  TensorWriter tensors(file, *this);
  const uint64_t kv = kDim / kHeads * kKvHeads;
  tensors.matrix("token_embd.weight", kDim, words.tokens.size());
  for (const std::string layer : {"blk.0.", "blk.1."}) {
    tensors.ones(layer + "attn_norm.weight");
    tensors.matrix(layer + "attn_q.weight", kDim, kDim);
    tensors.matrix(layer + "attn_k.weight", kDim, kv);
    tensors.matrix(layer + "attn_v.weight", kDim, kv);
    tensors.matrix(layer + "attn_output.weight", kDim, kDim);
    tensors.ones(layer + "ffn_norm.weight");
    tensors.matrix(layer + "ffn_gate.weight", kDim, kHidden);
    tensors.matrix(layer + "ffn_up.weight", kDim, kHidden);
    tensors.matrix(layer + "ffn_down.weight", kHidden, kDim);
  }
  tensors.ones("output_norm.weight");
  tensors.matrix("output.weight", kDim, words.tokens.size(), /*letters_only=*/true);
  return file.write(name);
}

TinyModel tiny_chat_model() {
  TinyModel model;
  model.chat_template = kChatml;
  return model;
}

}  // namespace longkv::test
