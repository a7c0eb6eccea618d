// Small vocabularies as files in memory: byte-level BPE and SentencePiece, valid unless a test changes them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "gguf/gguf.h"
#include "support/mkgguf.h"
#include "tokenizer/tokenizer.h"

namespace longkv::test {

// Byte tokens 0..255 in the order of GPT-2's alphabet, then the results of `merges`, then controls <|bos|> and <|eos|>.
struct TinyBpe {
  std::vector<std::string> tokens;
  std::vector<int32_t> types;
  std::vector<std::string> merges;
  int32_t bos = 0;
  int32_t eos = 0;

  explicit TinyBpe(std::vector<std::string> merge_list, std::vector<std::pair<std::string, int32_t>> extra = {});
  MkGguf file(const std::string& pre = "gpt-2") const;
};

// <unk> <s> </s>, 256 byte tokens, then `pieces` with scores falling from -1 (or as given).
struct TinySentencePiece {
  std::vector<std::string> tokens;
  std::vector<int32_t> types;
  std::vector<float> scores;

  explicit TinySentencePiece(const std::vector<std::string>& pieces);
  MkGguf file(bool space_prefix) const;
};

Result<Tokenizer> open_tokenizer(const MkGguf& file, const std::string& pre = "");

}  // namespace longkv::test
