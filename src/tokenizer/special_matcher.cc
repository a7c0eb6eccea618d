#include "tokenizer/special_matcher.h"

#include <algorithm>

namespace longkv {

SpecialMatcher::SpecialMatcher(const Vocabulary& vocabulary) {
  for (int32_t id = 0; id < vocabulary.size(); ++id) {
    const std::string_view text = vocabulary.text(id);
    const bool control = vocabulary.is_control(id);
    if (text.empty() || text.size() > kLongest) continue;
    if (!control && vocabulary.type(id) != TokenType::kUserDefined) continue;
    entries_.push_back({text, id, control});
    first_bytes_.set(static_cast<uint8_t>(text[0]));
  }
  std::stable_sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) { return a.text < b.text; });
}

SpecialMatcher::Match SpecialMatcher::find(std::string_view text, size_t from, bool controls,
                                           std::span<const int32_t> blocked) const {
  for (size_t pos = from; pos < text.size(); ++pos) {
    if (!first_bytes_[static_cast<uint8_t>(text[pos])]) continue;
    // Narrow the sorted entries byte by byte; an entry that ends here precedes its continuations.
    Match best;
    size_t low = 0;
    size_t high = entries_.size();
    for (size_t depth = 0; low < high; ++depth) {
      for (; low < high && entries_[low].text.size() == depth; ++low) {
        const Entry& entry = entries_[low];
        if (entry.control && !controls) continue;
        if (std::find(blocked.begin(), blocked.end(), entry.id) != blocked.end()) continue;
        best = {pos, depth, entry.id};
      }
      if (pos + depth >= text.size()) break;
      const auto byte = static_cast<uint8_t>(text[pos + depth]);
      const auto at = [&](const Entry& entry) { return static_cast<uint8_t>(entry.text[depth]); };
      const auto begin = entries_.begin() + static_cast<std::ptrdiff_t>(low);
      const auto end = entries_.begin() + static_cast<std::ptrdiff_t>(high);
      const auto first = std::partition_point(begin, end, [&](const Entry& entry) { return at(entry) < byte; });
      const auto last = std::partition_point(first, end, [&](const Entry& entry) { return at(entry) == byte; });
      low = static_cast<size_t>(first - entries_.begin());
      high = static_cast<size_t>(last - entries_.begin());
    }
    if (best.id != kNoToken) return best;
  }
  return {};
}

}  // namespace longkv
