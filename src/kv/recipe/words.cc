#include "kv/recipe/words.h"

#include <algorithm>
#include <cctype>

#include "base/checked.h"
#include "base/edit_distance.h"
#include "base/error.h"

namespace longkv {

namespace {

constexpr size_t kLongestWord = 64;

// Methods that the recipe language has names for and this version does not implement, and what comes nearest.
struct LaterWord {
  const char* word;
  const char* nearest;
};
constexpr LaterWord kLater[] = {
    {"gpu", "place=cpu"},
    {"hybrid", "place=cpu"},
    {"disk", "place=cpu"},
};

std::string lower(std::string_view text) {
  std::string out(text.substr(0, kLongestWord));
  for (char& c : out) c = char(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

}  // namespace

std::string join_words(std::span<const std::string> words) {
  std::string out;
  for (const std::string& w : words) out += (out.empty() ? "" : ", ") + w;
  return out;
}

std::string nearest_word(std::string_view typed, std::span<const std::string> words) {
  const std::string a = lower(typed);
  std::string best;
  size_t best_distance = std::max<size_t>(1, a.size() / 3) + 1;
  for (const std::string& w : words) {
    const size_t d = edit_distance(a, lower(w));
    if (d < best_distance) {
      best_distance = d;
      best = w;
    }
  }
  return best;
}

Status unknown_word(const std::string& what, const RecipeWord& word, std::span<const std::string> allowed) {
  for (const LaterWord& later : kLater) {
    if (word.text == later.word) {
      return fail(Code::kInvalidArgument, "{}: {} '{}' is known but not in this version; nearest available: {}",
                  word.where, what, word.text, later.nearest);
    }
  }
  const std::string near = nearest_word(word.text, allowed);
  return fail(Code::kInvalidArgument, "{}: unknown {} '{}'; allowed: {}{}", word.where, what,
              word.text.substr(0, kLongestWord), join_words(allowed),
              near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
}

Result<int64_t> parse_size(const std::string& what, const RecipeWord& word, int64_t min, int64_t max) {
  const auto refuse = [&](const char* problem) {
    return fail(Code::kInvalidArgument, "{}: {}='{}' {}; expected a whole number from {} to {}, K, M or G may follow",
                word.where, what, word.text.substr(0, kLongestWord), problem, min, max);
  };
  std::string digits = word.text;
  int shift = 0;
  if (!digits.empty()) {
    const char suffix = char(std::toupper(static_cast<unsigned char>(digits.back())));
    shift = suffix == 'K' ? 10 : suffix == 'M' ? 20 : suffix == 'G' ? 30 : 0;
    if (shift != 0) digits.pop_back();
  }
  if (digits.empty() || digits.find_first_not_of("0123456789") != std::string::npos) return refuse("is no number");
  if (digits.size() > 18) return refuse("is out of range");
  const auto value = checked_mul(uint64_t(std::stoll(digits)), uint64_t{1} << shift);
  if (!value || *value > uint64_t(max) || int64_t(*value) < min) return refuse("is out of range");
  return int64_t(*value);
}

Result<bool> parse_bool(const std::string& what, const RecipeWord& word) {
  const std::string text = lower(word.text);
  if (text == "true" || text == "yes" || text == "on" || text == "1") return true;
  if (text == "false" || text == "no" || text == "off" || text == "0") return false;
  return fail(Code::kInvalidArgument, "{}: {}='{}' is neither true nor false", word.where, what,
              word.text.substr(0, kLongestWord));
}

}  // namespace longkv
