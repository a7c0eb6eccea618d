#include "chat/jinja/lexer.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "base/error.h"
#include "chat/jinja/text.h"
#include "tokenizer/unicode.h"

namespace longkv::jinja {

namespace {

constexpr size_t kMaxSource = size_t{4} << 20;

// Line breaks become "\n", and one at the very end is dropped.
std::string normalize_newlines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      out += source[i];
    } else {
      out += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    }
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

int digit_value(char c) {
  if (is_digit(c)) return c - '0';
  const char lower = char(c | 0x20);
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : 99;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(normalize_newlines(source)) {}

  Result<std::vector<Token>> run() {
    while (pos_ < source_.size()) LONGKV_TRY(next_tag());
    push(TokenKind::kEnd);
    return std::move(tokens_);
  }

 private:
  std::string_view rest() const { return std::string_view(source_).substr(pos_); }
  bool starts(std::string_view s) const { return rest().starts_with(s); }

  Token& push(TokenKind kind) {
    Token& token = tokens_.emplace_back();
    token.kind = kind;
    token.line = line_;
    return token;
  }

  void advance(size_t to) {
    line_ += uint32_t(std::count(source_.begin() + ptrdiff_t(pos_), source_.begin() + ptrdiff_t(to), '\n'));
    pos_ = to;
    line_starting_ = pos_ > 0 && source_[pos_ - 1] == '\n';
  }

  // Text up to `end`, where a tag with `sign` begins.
  void push_data(size_t end, char sign, bool before_print) {
    std::string_view text = std::string_view(source_).substr(pos_, end - pos_);
    if (sign == '-') {
      text = text.substr(0, end_without_space(text));
    } else if (sign != '+' && !before_print) {
      const size_t line_break = text.rfind('\n');
      const size_t from = line_break == std::string_view::npos ? 0 : line_break + 1;
      if ((from > 0 || line_starting_) && skip_space(text, from) == text.size()) text = text.substr(0, from);
    }
    if (!text.empty()) push(TokenKind::kData).text = text;
    advance(end);
  }

  size_t find_tag(size_t from) const {
    for (size_t at = source_.find('{', from); at != std::string::npos; at = source_.find('{', at + 1)) {
      const char next = at + 1 < source_.size() ? source_[at + 1] : '\0';
      if (next == '{' || next == '%' || next == '#') return at;
    }
    return std::string::npos;
  }

  Status next_tag() {
    const size_t at = find_tag(pos_);
    if (at == std::string::npos) {
      push(TokenKind::kData).text = rest();
      advance(source_.size());
      return {};
    }
    const char kind = source_[at + 1];
    const char after = at + 2 < source_.size() ? source_[at + 2] : '\0';
    const char sign = after == '-' || after == '+' ? after : '\0';
    push_data(at, sign, kind == '{');
    const size_t inside = at + 2 + (sign != '\0' ? 1 : 0);
    if (kind == '#') return comment(inside);
    if (kind == '%') {
      if (const size_t body = raw_body(inside); body != 0) return raw(body);
    }
    push(kind == '{' ? TokenKind::kPrintBegin : TokenKind::kBlockBegin);
    advance(inside);
    return inner(kind == '{');
  }

  Status comment(size_t inside) {
    const size_t close = source_.find("#}", inside);
    if (close == std::string::npos) return template_error(line_, "Missing end of comment tag");
    const char sign = close > inside ? source_[close - 1] : '\0';
    size_t end = close + 2;
    if (sign == '-') {
      end = skip_space(source_, end);
    } else if (sign != '+' && end < source_.size() && source_[end] == '\n') {
      ++end;
    }
    advance(end);
    return {};
  }

  // Where the text of a raw block begins, when the tag whose inside is given opens one; 0 otherwise.
  size_t raw_body(size_t inside) const {
    size_t at = skip_space(source_, inside);
    if (source_.compare(at, 3, "raw") != 0) return 0;
    at = skip_space(source_, at + 3);
    if (source_.compare(at, 2, "%}") == 0) return at + 2;
    return source_.compare(at, 3, "-%}") == 0 ? skip_space(source_, at + 3) : 0;
  }

  Status raw(size_t body) {
    const uint32_t line = line_;
    advance(body);
    for (size_t at = source_.find("{%", body); at != std::string::npos; at = source_.find("{%", at + 2)) {
      size_t p = at + 2;
      const char sign = p < source_.size() && (source_[p] == '-' || source_[p] == '+') ? source_[p++] : '\0';
      p = skip_space(source_, p);
      if (source_.compare(p, 6, "endraw") != 0) continue;
      p = skip_space(source_, p + 6);
      size_t end = 0;
      if (source_.compare(p, 2, "%}") == 0) {
        end = p + 2 + (p + 2 < source_.size() && source_[p + 2] == '\n' ? 1 : 0);
      } else if (source_.compare(p, 3, "+%}") == 0) {
        end = p + 3;
      } else if (source_.compare(p, 3, "-%}") == 0) {
        end = skip_space(source_, p + 3);
      } else {
        continue;
      }
      push_data(at, sign, false);
      advance(end);
      return {};
    }
    return template_error(line, "Missing end of raw directive");
  }

  // Length of the end of the tag at pos_ with the white space that it removes; 0 when there is none.
  size_t tag_end(bool print) const {
    if (starts(print ? "-}}" : "-%}")) return skip_space(source_, pos_ + 3) - pos_;
    if (starts(print ? "}}" : "%}")) {
      return 2 + (!print && pos_ + 2 < source_.size() && source_[pos_ + 2] == '\n' ? 1 : 0);
    }
    return !print && starts("+%}") ? 3 : 0;
  }

  Status inner(bool print) {
    std::string open;  // brackets that wait for their end
    const uint32_t first_line = line_;
    while (pos_ < source_.size()) {
      if (open.empty()) {
        if (const size_t length = tag_end(print); length > 0) {
          push(print ? TokenKind::kPrintEnd : TokenKind::kBlockEnd);
          advance(pos_ + length);
          return {};
        }
      }
      const size_t blank = skip_space(source_, pos_);
      if (blank != pos_) {
        advance(blank);
        continue;
      }
      const char c = source_[pos_];
      if (is_digit(c)) {
        LONGKV_TRY(number());
      } else if (c == '\'' || c == '"') {
        LONGKV_TRY(string(c));
      } else if (const size_t end = name_end(pos_); end != pos_) {
        push(TokenKind::kName).text = source_.substr(pos_, end - pos_);
        advance(end);
      } else {
        LONGKV_TRY(operation(open));
      }
    }
    return template_error(
        first_line, print ? "the expression has no end: '}}' is missing" : "the statement has no end: '%}' is missing");
  }

  size_t name_end(size_t at) const {
    while (at < source_.size()) {
      const auto byte = static_cast<unsigned char>(source_[at]);
      if (byte < 0x80) {
        if (!(is_digit(source_[at]) || byte == '_' || ((byte | 0x20) >= 'a' && (byte | 0x20) <= 'z'))) break;
        ++at;
        continue;
      }
      const Utf8Char c = decode_utf8(source_.data() + at, source_.size() - at);
      if (!c.valid || (char_class_table()[c.code] & (kLetter | kNumber | kMark)) == 0) break;
      at += c.length;
    }
    return at;
  }

  size_t digits_end(size_t at, int base) const {
    while (at < source_.size() && (digit_value(source_[at]) < base || (source_[at] == '_' && at + 1 < source_.size() &&
                                                                       digit_value(source_[at + 1]) < base))) {
      ++at;
    }
    return at;
  }

  Status number() {
    const bool after_dot = pos_ > 0 && source_[pos_ - 1] == '.';
    int base = 10;
    size_t begin = pos_;
    if (source_[pos_] == '0' && pos_ + 1 < source_.size()) {
      const char mark = char(source_[pos_ + 1] | 0x20);
      base = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 10;
      if (base != 10) begin += 2;
    }
    size_t end = digits_end(begin, base);
    bool real = false;
    if (base == 10 && !after_dot) {
      if (end + 1 < source_.size() && source_[end] == '.' && is_digit(source_[end + 1])) {
        real = true;
        end = digits_end(end + 1, 10);
      }
      if (end < source_.size() && (source_[end] | 0x20) == 'e') {
        const size_t sign = end + 1 < source_.size() && (source_[end + 1] == '+' || source_[end + 1] == '-') ? 1 : 0;
        if (end + 1 + sign < source_.size() && is_digit(source_[end + 1 + sign])) {
          real = true;
          end = digits_end(end + 1 + sign, 10);
        }
      }
    }
    std::string text = source_.substr(begin, end - begin);
    std::erase(text, '_');
    Token& token = push(real ? TokenKind::kReal : TokenKind::kInteger);
    token.text = text;
    const char* last = text.data() + text.size();
    const auto read =
        real ? std::from_chars(text.data(), last, token.real) : std::from_chars(text.data(), last, token.integer, base);
    if (read.ec != std::errc() || read.ptr != last) {
      return template_error(line_, fmt::format("the number {} is out of range", text));
    }
    advance(end);
    return {};
  }

  Status string(char quote) {
    size_t end = pos_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) {
      return template_error(line_, fmt::format("the string that begins here has no end: {} is missing", quote));
    }
    Token& token = push(TokenKind::kString);
    const std::string_view body = std::string_view(source_).substr(pos_ + 1, end - pos_ - 1);
    LONGKV_TRY(unescape(body, token.text));
    advance(end + 1);
    return {};
  }

  Status unescape(std::string_view body, std::string& out) const {
    constexpr std::string_view kFrom = "abfnrtv\\'\"";
    constexpr std::string_view kTo = "\a\b\f\n\r\t\v\\'\"";
    for (size_t i = 0; i < body.size(); ++i) {
      if (body[i] != '\\' || i + 1 == body.size()) {
        out += body[i];
        continue;
      }
      const char c = body[++i];
      if (const size_t simple = kFrom.find(c); simple != std::string_view::npos) {
        out += kTo[simple];
      } else if (c >= '0' && c <= '7') {
        uint32_t code = 0;
        size_t n = 0;
        for (; n < 3 && i + n < body.size() && body[i + n] >= '0' && body[i + n] <= '7'; ++n) {
          code = code * 8 + uint32_t(body[i + n] - '0');
        }
        append_utf8(out, code);
        i += n - 1;
      } else if (c == 'x' || c == 'u' || c == 'U') {
        const size_t wanted = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        uint32_t code = 0;
        for (size_t n = 1; n <= wanted; ++n) {
          const int digit = i + n < body.size() ? digit_value(body[i + n]) : 99;
          if (digit > 15) return template_error(line_, fmt::format("truncated \\{} escape in a string", c));
          code = code * 16 + uint32_t(digit);
        }
        if (code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) {
          return template_error(line_, fmt::format("\\{} escape in a string names no character", c));
        }
        append_utf8(out, code);
        i += wanted;
      } else if (c == 'N') {
        return template_error(line_, "\\N escapes are not supported in strings");
      } else if (c != '\n') {
        out += '\\';
        out += c;
      }
    }
    return {};
  }

  Status operation(std::string& open) {
    constexpr std::array<std::string_view, 6> kPairs = {"//", "**", "==", "!=", ">=", "<="};
    const auto pair = std::find_if(kPairs.begin(), kPairs.end(), [&](std::string_view op) { return starts(op); });
    if (pair != kPairs.end()) {
      push(TokenKind::kOperator).text = *pair;
      advance(pos_ + 2);
      return {};
    }
    const char c = source_[pos_];
    if (std::string_view("+-/*%~[](){}><=.:|,;").find(c) == std::string_view::npos) {
      const Utf8Char bad = decode_utf8(source_.data() + pos_, source_.size() - pos_);
      return template_error(line_, fmt::format("unexpected char '{}'",
                                               bad.valid ? source_.substr(pos_, bad.length)
                                                         : std::string("\\x") + fmt::format("{:02x}", uint8_t(c))));
    }
    if (c == '(' || c == '[' || c == '{') open += c == '(' ? ')' : c == '[' ? ']' : '}';
    if (c == ')' || c == ']' || c == '}') {
      if (open.empty()) return template_error(line_, fmt::format("unexpected '{}'", c));
      if (open.back() != c) return template_error(line_, fmt::format("unexpected '{}', expected '{}'", c, open.back()));
      open.pop_back();
    }
    push(TokenKind::kOperator).text = std::string(1, c);
    advance(pos_ + 1);
    return {};
  }

  const std::string source_;
  size_t pos_ = 0;
  uint32_t line_ = 1;
  bool line_starting_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

Status template_error(uint32_t line, std::string_view reason) {
  return fail(Code::kInvalidArgument, "line {}: {}", line, reason);
}

Result<std::vector<Token>> tokenize_template(std::string_view source) {
  if (source.size() > kMaxSource) {
    return fail(Code::kInvalidArgument, "the template has {} bytes, more than {}", source.size(), kMaxSource);
  }
  for (size_t i = 0; i < source.size();) {
    const Utf8Char c = decode_utf8(source.data() + i, source.size() - i);
    if (!c.valid) return fail(Code::kInvalidArgument, "the template is not UTF-8 at byte {}", i);
    i += c.length;
  }
  return Lexer(source).run();
}

}  // namespace longkv::jinja
