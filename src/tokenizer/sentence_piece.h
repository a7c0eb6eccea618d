// SentencePiece BPE: characters merge to tokens by the token's score; what is left falls back on byte tokens.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <string_view>
#include <vector>

#include "tokenizer/merger.h"
#include "tokenizer/pair_map.h"
#include "tokenizer/vocabulary.h"
#include "tokenizer/word_cache.h"

namespace longkv {

class SentencePiece {
 public:
  explicit SentencePiece(const Vocabulary& vocabulary);

  // Interface of Merger. Priorities are ranks of the distinct scores, highest score first.
  PairMerge merge(int32_t left, int32_t right, std::string_view joined) const {
    if (left < 0 || right < 0 || joined.size() > longest_) return {};
    const int32_t id = vocabulary_->index.find(joined);
    return id < 0 ? PairMerge{} : PairMerge{priorities_[static_cast<size_t>(id)], id};
  }
  size_t priority_count() const { return priority_count_; }

  // Whether some token contains character `a` directly before `b`. Where none does, no merge can ever cross, so a text
  // splits there into words that merge independently.
  bool adjacent(uint32_t a, uint32_t b) const {
    if (a < 128 && b < 128) return ascii_pairs_[a * 128 + b];
    return pairs_.find(a, b) != nullptr;
  }

  class Encoder {
   public:
    Encoder(const Vocabulary& vocabulary, const SentencePiece& model)
        : vocabulary_(vocabulary), model_(model), merger_(model) {}
    // `text` has blanks where the vocabulary's texts have U+2581 and must live as long as `cache`.
    Status encode(std::string_view text, WordCache& cache, std::vector<int32_t>& ids);

   private:
    Status encode_word(std::string_view word, std::vector<int32_t>& ids);

    const Vocabulary& vocabulary_;
    const SentencePiece& model_;
    Merger<SentencePiece> merger_;
    std::vector<int32_t> symbols_;
    std::vector<int32_t> lengths_;
  };

 private:
  const Vocabulary* vocabulary_;
  std::vector<uint32_t> priorities_;  // per token
  size_t priority_count_ = 0;
  size_t longest_ = 0;  // bytes of the longest token
  std::bitset<128 * 128> ascii_pairs_;
  PairMap pairs_;
};

}  // namespace longkv
