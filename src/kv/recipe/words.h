// Help for mistyped words of recipes and configuration files, and words that are known but not in this version.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kv/recipe/parts.h"
#include "longkv/status.h"

namespace longkv {

// "a, b, c"
std::string join_words(std::span<const std::string> words);

// The word that `typed` was probably meant to be (letter case ignored, at most a third of its letters wrong), else
// empty.
std::string nearest_word(std::string_view typed, std::span<const std::string> words);

// "position 3: unknown WHAT 'typed'; allowed: a, b; did you mean 'a'?" For a word that a later version will know, the
// message says so and names the nearest one available.
Status unknown_word(const std::string& what, const RecipeWord& word, std::span<const std::string> allowed);

// A count with an optional suffix K, M or G (powers of two). Errors: kInvalidArgument, with the range.
Result<int64_t> parse_size(const std::string& what, const RecipeWord& word, int64_t min, int64_t max);
Result<bool> parse_bool(const std::string& what, const RecipeWord& word);

}  // namespace longkv
