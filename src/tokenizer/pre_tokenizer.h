// Pre-tokenizers of byte-level BPE vocabularies: which text may never merge across.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include "tokenizer/scanners.h"

namespace longkv {

constexpr int kMaxSplitStages = 6;

// One rule set. Several names in files mean the same rules.
struct PreTokenizer {
  std::string_view name;
  std::array<Scanner, kMaxSplitStages> stages;  // each splits the pieces of the one before; unused ones are nullptr
  bool whole_words = false;                     // a word that is a token as it stands is taken without merging
  bool add_bos = false;                         // when the file does not say
};

// nullptr when the name is not known. "" is "default".
const PreTokenizer* find_pre_tokenizer(std::string_view name);
// All names, separated by commas, for messages.
std::string known_pre_tokenizers();

// Splits a text into words by walking the stages without recursion: `next` gives one word after the other.
class WordSplitter {
 public:
  WordSplitter(const PreTokenizer& rules, std::string_view text);

  // The next word, empty at the end of the text.
  std::string_view next();

 private:
  const PreTokenizer& rules_;
  std::string_view text_;
  int stage_count_ = 0;
  int open_ = 0;  // stages whose segment is not used up
  size_t pos_ = 0;
  std::array<size_t, kMaxSplitStages + 1> segment_end_{};
};

}  // namespace longkv
