// Byte-level BPE: words of the pre-tokenizer start as bytes and merge by the rank of the pair.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "tokenizer/pair_map.h"
#include "tokenizer/vocabulary.h"
#include "tokenizer/word_cache.h"

namespace longkv {

class ByteBpe {
 public:
  // Errors: kCorrupt for a merge that is not two texts separated by a blank.
  Status load(const Metadata& metadata, const Vocabulary& vocabulary);

  // Interface of Merger. Symbols below the vocabulary's size are token ids.
  PairMerge merge(int32_t left, int32_t right, std::string_view /*joined*/) const {
    if (left < 0 || right < 0) return {};
    const PairMerge* found = pairs_.find(static_cast<uint32_t>(left), static_cast<uint32_t>(right));
    return found != nullptr ? *found : PairMerge{};
  }
  size_t priority_count() const { return merge_count_; }

  // Hash over the merges, for the tokenizer's fingerprint.
  uint64_t merges_hash() const { return merges_hash_; }

  // Encodes text without special tokens, word by word. Errors: kInvalidArgument for a byte that no token can write.
  class Encoder {
   public:
    Encoder(const Vocabulary& vocabulary, const ByteBpe& bpe) : vocabulary_(vocabulary), bpe_(bpe), merger_(bpe) {}
    Status encode(std::string_view text, WordCache& cache, std::vector<int32_t>& ids);

   private:
    Status encode_word(std::string_view word, std::vector<int32_t>& ids);

    const Vocabulary& vocabulary_;
    const ByteBpe& bpe_;
    Merger<ByteBpe> merger_;
    std::vector<int32_t> symbols_;
    std::vector<int32_t> lengths_;
  };

 private:
  PairMap pairs_;
  std::array<int32_t, 256> byte_symbols_{};
  size_t merge_count_ = 0;
  uint64_t merges_hash_ = 0;
};

// Appends what a word's merged symbols became, `lengths` in bytes: tokens as they are, any other symbol as the tokens
// of its bytes, or as the unknown token once. Shared by both kinds of vocabulary.
Status append_symbols(const Vocabulary& vocabulary, std::string_view word, std::span<const int32_t> symbols,
                      std::span<const int32_t> lengths, std::vector<int32_t>& ids);

}  // namespace longkv
