// The tokens of a model file: texts, bytes, types and special ids, checked once and read-only afterwards.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/metadata.h"
#include "longkv/status.h"
#include "tokenizer/pre_tokenizer.h"
#include "tokenizer/string_index.h"

namespace longkv {

enum class VocabularyKind {
  kSentencePiece,  // tokenizer.ggml.model = llama: scores, U+2581 for space, byte fallback
  kByteBpe,        // gpt2: merges over a printable alphabet of 256 bytes
};

// Values of tokenizer.ggml.token_type.
enum class TokenType : uint8_t { kUndefined = 0, kNormal = 1, kUnknown, kControl, kUserDefined, kUnused, kByte };

constexpr int32_t kNoToken = -1;

// Strings in one block of memory.
class StringTable {
 public:
  void add(std::string_view text) {
    bytes_.append(text);
    ends_.push_back(bytes_.size());
  }
  std::string_view operator[](size_t i) const {
    const size_t begin = i == 0 ? 0 : ends_[i - 1];
    return std::string_view(bytes_).substr(begin, ends_[i] - begin);
  }
  size_t size() const { return ends_.size(); }

 private:
  std::string bytes_;
  std::vector<size_t> ends_;
};

struct SpecialIds {
  int32_t bos = kNoToken;
  int32_t eos = kNoToken;
  int32_t unknown = kNoToken;
  int32_t separator = kNoToken;
  int32_t padding = kNoToken;
};

struct Vocabulary {
  VocabularyKind kind = VocabularyKind::kByteBpe;
  const PreTokenizer* pre = nullptr;  // of byte BPE
  std::string pre_name;
  StringTable texts;   // as in the file
  StringTable pieces;  // the bytes that a token stands for
  std::vector<TokenType> types;
  std::vector<float> scores;               // empty for byte BPE
  std::array<int32_t, 256> byte_tokens{};  // kNoToken where the vocabulary cannot write a byte
  SpecialIds special;
  std::vector<uint8_t> end_of_generation;  // per token
  std::vector<uint8_t> strip_right;        // per token: white space after it is dropped; empty when no token does
  bool add_bos = false;
  bool add_eos = false;
  bool add_space_prefix = false;
  StringTable respelled;  // bytes of the few tokens whose piece is not what text must spell to become them
  StringIndex index{};    // bytes -> id over the tokens that text may become; controls and bytes are not among them
  uint64_t fingerprint = 0;

  int32_t size() const { return static_cast<int32_t>(types.size()); }
  TokenType type(int32_t id) const { return types[static_cast<size_t>(id)]; }
  std::string_view text(int32_t id) const { return texts[static_cast<size_t>(id)]; }
  std::string_view piece(int32_t id) const { return pieces[static_cast<size_t>(id)]; }
  bool valid(int32_t id) const { return id >= 0 && id < size(); }
  // Tokens that plain text never turns into.
  bool is_control(int32_t id) const { return type(id) == TokenType::kControl || type(id) == TokenType::kUnknown; }
};

// Fills `out` from the tokenizer.ggml.* keys. `pre_override` replaces the file's tokenizer.ggml.pre unless empty.
// `out` must stay where it is afterwards: its index refers to its strings.
// Errors: kUnsupported for an unknown model or pre-tokenizer; kCorrupt for arrays of unequal length or ids out of
// range.
Status load_vocabulary(const Metadata& metadata, std::string_view pre_override, Vocabulary& out);

// Bytes of a text in GPT-2's printable alphabet; false when a character is not of that alphabet.
bool decode_byte_alphabet(std::string_view text, std::string& bytes);

}  // namespace longkv
