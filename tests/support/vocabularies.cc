#include "support/vocabularies.h"

#include <algorithm>

namespace longkv::test {

namespace {

// GPT-2's character of a byte.
std::string alphabet_char(int byte) {
  const auto printable = [](int b) { return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174; };
  int code = byte;
  if (!printable(byte)) {
    code = 256;
    for (int b = 0; b < byte; ++b) code += printable(b) ? 0 : 1;
  }
  std::string out;
  if (code < 0x80) return out += char(code);
  out += char(0xC0 | code >> 6);
  return out += char(0x80 | (code & 0x3F));
}

}  // namespace

TinyBpe::TinyBpe(std::vector<std::string> merge_list, std::vector<std::pair<std::string, int32_t>> extra)
    : merges(std::move(merge_list)) {
  for (int byte = 0; byte < 256; ++byte) tokens.push_back(alphabet_char(byte));
  for (std::string merge : merges) {
    merge.erase(merge.find(' ', 1), 1);
    if (std::find(tokens.begin(), tokens.end(), merge) == tokens.end()) tokens.push_back(merge);
  }
  types.assign(tokens.size(), 1);
  bos = int32_t(tokens.size());
  eos = bos + 1;
  extra.insert(extra.begin(), {{"<|bos|>", 3}, {"<|eos|>", 3}});
  for (auto& [text, type] : extra) {
    tokens.push_back(text);
    types.push_back(type);
  }
}

MkGguf TinyBpe::file(const std::string& pre) const {
  MkGguf gguf;
  gguf.string("general.architecture", "none").string("tokenizer.ggml.model", "gpt2");
  if (!pre.empty()) gguf.string("tokenizer.ggml.pre", pre);
  gguf.strings("tokenizer.ggml.tokens", tokens).i32s("tokenizer.ggml.token_type", types);
  gguf.strings("tokenizer.ggml.merges", merges);
  gguf.u32("tokenizer.ggml.bos_token_id", uint32_t(bos)).u32("tokenizer.ggml.eos_token_id", uint32_t(eos));
  return gguf;
}

TinySentencePiece::TinySentencePiece(const std::vector<std::string>& pieces) {
  tokens = {"<unk>", "<s>", "</s>"};
  types = {2, 3, 3};
  for (int byte = 0; byte < 256; ++byte) {
    constexpr const char* kHex = "0123456789ABCDEF";
    tokens.push_back(std::string("<0x") + kHex[byte / 16] + kHex[byte % 16] + ">");
    types.push_back(6);
  }
  scores.assign(tokens.size(), 0.0F);
  for (const std::string& piece : pieces) {
    tokens.push_back(piece);
    types.push_back(1);
    scores.push_back(-float(scores.size()));
  }
}

MkGguf TinySentencePiece::file(bool space_prefix) const {
  MkGguf gguf;
  gguf.string("general.architecture", "none").string("tokenizer.ggml.model", "llama");
  gguf.strings("tokenizer.ggml.tokens", tokens).i32s("tokenizer.ggml.token_type", types);
  gguf.f32s("tokenizer.ggml.scores", scores).boolean("tokenizer.ggml.add_space_prefix", space_prefix);
  return gguf;
}

Result<Tokenizer> open_tokenizer(const MkGguf& file, const std::string& pre) {
  static int count = 0;
  LONGKV_ASSIGN(const GgufFile gguf, GgufFile::open(file.write("vocabulary_" + std::to_string(count++) + ".gguf")));
  return Tokenizer::from_metadata(gguf.metadata(), pre);
}

}  // namespace longkv::test
