// How far one word is from another, for messages that guess what was meant.
#pragma once

#include <cstddef>
#include <string_view>

namespace longkv {

// Insertions, deletions, replacements and swaps of neighbours, of bytes, that turn one word into the other. Takes time
// a.size() * b.size(): callers bound the words.
size_t edit_distance(std::string_view a, std::string_view b);

}  // namespace longkv
