// The grammar of recipe strings, read from left to right without recursion:
//
//   recipe  = part { "+" part }
//   part    = preset [ ":" params ]  |  stage "=" choice [ "(" [ params ] ")" ]  |  stage "(" [ params ] ")"
//   params  = key "=" value { "," key "=" value }
//   value   = characters of words and / % : ~ @  |  '"' anything but '"' '"'
//
// Words are made of letters, digits, '_', '-' and '.'; blanks between them do not count.
#include <cctype>

#include "base/error.h"
#include "kv/recipe/parts.h"

namespace longkv {

namespace {

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  bool at_end() {
    skip_blanks();
    return pos_ >= text_.size();
  }

  bool take(char c) {
    skip_blanks();
    if (pos_ >= text_.size() || text_[pos_] != c) return false;
    ++pos_;
    return true;
  }

  Result<RecipeWord> word(const char* what) { return run(what, is_word); }

  Result<RecipeWord> value() {
    if (!take('"')) return run("a value", is_recipe_value_char);
    const size_t begin = pos_;
    while (pos_ < text_.size() && text_[pos_] != '"') ++pos_;
    if (pos_ >= text_.size()) return expected("a closing '\"'");
    ++pos_;
    return RecipeWord{std::string(text_.substr(begin, pos_ - 1 - begin)), fmt::format("position {}", begin + 1)};
  }

  Status expected(const char* what) {
    skip_blanks();
    if (pos_ >= text_.size()) {
      return fail(Code::kInvalidArgument, "position {}: the recipe ends where {} is expected", pos_ + 1, what);
    }
    const unsigned char c = static_cast<unsigned char>(text_[pos_]);
    const std::string found = std::isprint(c) != 0 ? fmt::format("'{}'", char(c)) : fmt::format("byte 0x{:02x}", c);
    return fail(Code::kInvalidArgument, "position {}: found {} where {} is expected", pos_ + 1, found, what);
  }

 private:
  Result<RecipeWord> run(const char* what, bool (*belongs)(char)) {
    skip_blanks();
    const size_t begin = pos_;
    while (pos_ < text_.size() && belongs(text_[pos_])) ++pos_;
    if (pos_ == begin) return expected(what);
    return RecipeWord{std::string(text_.substr(begin, pos_ - begin)), fmt::format("position {}", begin + 1)};
  }
  static bool is_word(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-' || c == '.';
  }
  void skip_blanks() {
    while (pos_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[pos_])) != 0) ++pos_;
  }

  std::string_view text_;
  size_t pos_ = 0;
};

Status read_params(Reader& in, RecipePart& part) {
  do {
    if (part.params.size() == kMaxRecipeParams) {
      return fail(Code::kInvalidArgument, "{}: '{}' has more than {} parameters", part.name.where, part.name.text,
                  kMaxRecipeParams);
    }
    RecipeParam param;
    LONGKV_ASSIGN(param.key, in.word("a parameter"));
    if (!in.take('=')) return in.expected("'=' and a value");
    LONGKV_ASSIGN(param.value, in.value());
    part.params.push_back(std::move(param));
  } while (in.take(','));
  return {};
}

Result<RecipePart> read_part(Reader& in) {
  RecipePart part;
  LONGKV_ASSIGN(part.name, in.word("a preset or a stage"));
  if (in.take(':')) {
    part.preset = true;
    LONGKV_TRY(read_params(in, part));
    return part;
  }
  bool open = in.take('(');
  if (!open) {
    if (!in.take('=')) {
      part.preset = true;
      return part;
    }
    LONGKV_ASSIGN(part.choice, in.word("a choice"));
    open = in.take('(');
  }
  if (open && !in.take(')')) {
    LONGKV_TRY(read_params(in, part));
    if (!in.take(')')) return in.expected("',' or ')'");
  }
  return part;
}

}  // namespace

bool is_recipe_value_char(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
         std::string_view("_-./%:~@").find(c) != std::string_view::npos;
}

Result<std::vector<RecipePart>> split_recipe_text(std::string_view text) {
  if (text.size() > kMaxRecipeText) {
    return fail(Code::kInvalidArgument, "a recipe of {} bytes is too long; at most {}", text.size(), kMaxRecipeText);
  }
  Reader in(text);
  std::vector<RecipePart> parts;
  do {
    if (parts.size() == kMaxRecipeParts) {
      return fail(Code::kInvalidArgument, "a recipe has at most {} parts joined by '+'", kMaxRecipeParts);
    }
    LONGKV_ASSIGN(RecipePart part, read_part(in));
    parts.push_back(std::move(part));
  } while (in.take('+'));
  if (!in.at_end()) return in.expected("'+' or the end");
  return parts;
}

}  // namespace longkv
