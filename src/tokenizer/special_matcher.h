// Finds tokens that are cut out of a text before it is split into words: control and user-defined tokens.
#pragma once

#include <bitset>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "tokenizer/vocabulary.h"

namespace longkv {

class SpecialMatcher {
 public:
  struct Match {
    size_t begin = 0;
    size_t length = 0;
    int32_t id = kNoToken;
  };

  SpecialMatcher() = default;
  explicit SpecialMatcher(const Vocabulary& vocabulary);

  // The first match at or after `from`; of several at one place the longest. id is kNoToken when there is none.
  // Control tokens are found only with `controls`. Ids in `blocked` are never found.
  Match find(std::string_view text, size_t from, bool controls, std::span<const int32_t> blocked) const;

 private:
  // A special token longer than this is never cut out, so that the search stays linear in the text.
  static constexpr size_t kLongest = 1024;

  struct Entry {
    std::string_view text;
    int32_t id;
    bool control;
  };
  std::vector<Entry> entries_;  // sorted by text
  std::bitset<256> first_bytes_;
};

}  // namespace longkv
