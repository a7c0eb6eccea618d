// Text to token ids and back, from the metadata of a GGUF file alone: no model family needs to be known.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/metadata.h"
#include "longkv/status.h"

namespace longkv {

class ByteBpe;
class SentencePiece;
struct Vocabulary;

// Part of a text for Tokenizer::encode_parts().
struct TextPart {
  std::string_view text;
  bool parse_special = false;  // whether control tokens spelled out in it become those tokens
};

// Read-only after from_metadata(), cheap to copy, safe to use from several threads.
class Tokenizer {
 public:
  static constexpr size_t kMaxTextBytes = size_t{1} << 30;

  // `pre_override` replaces tokenizer.ggml.pre of the file unless empty.
  // Errors: kUnsupported for an unknown vocabulary model or pre-tokenizer (the message lists the known ones),
  // kCorrupt when arrays disagree in length or an id lies outside of the vocabulary, kInvalidArgument if keys are
  // absent.
  static Result<Tokenizer> from_metadata(const Metadata& metadata, std::string_view pre_override = {});

  // `add_special`: BOS before and EOS after the text as the file asks for; a BOS that the text spells out itself is not
  // doubled. User-defined tokens are cut out of the text in any case, control tokens only with `parse_special`.
  // Invalid UTF-8 is kept byte by byte.
  // Errors: kInvalidArgument for a text above kMaxTextBytes or a byte that the vocabulary cannot write.
  Result<std::vector<int32_t>> encode(std::string_view text, bool add_special, bool parse_special) const;

  // The parts as one text: words and merges cross the borders of parts, special tokens do not. Ids in `blocked` are
  // never cut out of parts without parse_special, even when the file calls them user-defined.
  Result<std::vector<int32_t>> encode_parts(std::span<const TextPart> parts, bool add_special,
                                            std::span<const int32_t> blocked = {}) const;

  // The bytes that a token stands for, perhaps part of a character; a control token's name; empty for ids out of range.
  std::string_view piece(int32_t id) const;
  // The bytes of all tokens; control tokens only with `show_special`. A blank that encode() puts before a text is
  // removed again. The result need not be valid UTF-8: use StreamDecoder for text.
  std::string decode(std::span<const int32_t> ids, bool show_special = false) const;

  int32_t vocab_size() const;
  std::optional<int32_t> bos() const;
  std::optional<int32_t> eos() const;
  bool adds_bos() const;              // whether encode(add_special) puts a BOS first
  bool is_eog(int32_t id) const;      // ends an answer
  bool is_control(int32_t id) const;  // plain text never becomes this token
  bool is_user_defined(int32_t id) const;
  // The token of exactly this text as it stands in the file, controls included.
  std::optional<int32_t> find(std::string_view text) const;
  const std::string& pre_tokenizer() const;  // name in use; "" or the file's value for SentencePiece
  // Hash of tokens, types, scores, merges and settings: equal fingerprints mean equal ids for every text.
  uint64_t fingerprint() const;

 private:
  struct Impl;
  explicit Tokenizer(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

}  // namespace longkv
