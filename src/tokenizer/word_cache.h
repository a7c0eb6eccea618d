// Ids of words met before in the same text. Keys are views into the text, so the cache lives no longer than it.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "tokenizer/string_index.h"

namespace longkv {

class WordCache {
 public:
  // Appends the ids of a known word; false if it is not known.
  bool append(std::string_view word, std::vector<int32_t>& ids) const {
    if (word.size() > kLongest) return false;
    const int32_t entry = index_.find(word);
    if (entry < 0) return false;
    const auto [begin, count] = spans_[static_cast<size_t>(entry)];
    ids.insert(ids.end(), ids_.begin() + begin, ids_.begin() + begin + count);
    return true;
  }

  // Remembers that `word` became the ids of `all` from `from` on. Words that are long or come late are not kept.
  void remember(std::string_view word, const std::vector<int32_t>& all, size_t from) {
    if (word.size() > kLongest || index_.size() >= kMost) return;
    index_.insert(word, static_cast<int32_t>(spans_.size()));
    spans_.push_back({static_cast<uint32_t>(ids_.size()), static_cast<uint32_t>(all.size() - from)});
    ids_.insert(ids_.end(), all.begin() + static_cast<std::ptrdiff_t>(from), all.end());
  }

 private:
  static constexpr size_t kLongest = 64;
  static constexpr size_t kMost = size_t{1} << 17;
  struct Span {
    uint32_t begin;
    uint32_t count;
  };
  StringIndex index_;
  std::vector<Span> spans_;
  std::vector<int32_t> ids_;
};

}  // namespace longkv
