// Methods of strings.
#include <algorithm>

#include "base/error.h"
#include "chat/jinja/methods.h"
#include "chat/jinja/text.h"
#include "tokenizer/unicode.h"

namespace longkv::jinja {

namespace {

constexpr int64_t kMaxWidth = 1'000'000;

// Python's [start:end] of find, count, startswith and endswith, in bytes.
struct Window {
  size_t begin = 0;
  size_t end = 0;
  bool empty = false;  // start lies behind end: nothing is found, not even ""
};

Result<Window> window(const Str* s, const Parameters& p, size_t first) {
  const int64_t length = p.has(first) || p.has(first + 1) ? s->length() : 0;
  const auto clip = [&](int64_t i) { return i < 0 ? std::max<int64_t>(i + length, 0) : std::min(i, length); };
  Window w;
  w.end = s->text.size();
  int64_t start = 0;
  int64_t stop = length;
  if (p.has(first) && !p[first].is(Kind::kNone)) {
    LONGKV_ASSIGN(start, p.integer(first, 0));
    w.empty = start > length;
    start = clip(start);
    w.begin = byte_of(s, start);
  }
  if (p.has(first + 1) && !p[first + 1].is(Kind::kNone)) {
    LONGKV_ASSIGN(stop, p.integer(first + 1, length));
    stop = clip(stop);
    w.end = byte_of(s, stop);
  }
  if (start > stop) {
    w.empty = true;
    w.end = w.begin;
  }
  return w;
}

std::string_view cut(const Str* s, const Window& w) { return s->text.substr(w.begin, w.end - w.begin); }

int64_t chars_in(std::string_view text) {
  Str s;
  s.text = text;
  return s.length();
}

Result<Value> find_in(const Str* s, std::string_view name, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match(name, arguments, {"sub", "start", "end"}, 1));
  LONGKV_ASSIGN(const Str* wanted, p.text(0, nullptr));
  LONGKV_ASSIGN(const Window w, window(s, p, 1));
  const std::string_view text = cut(s, w);
  const bool right = name.starts_with('r');
  const size_t at = w.empty ? std::string_view::npos : right ? text.rfind(wanted->text) : text.find(wanted->text);
  if (at != std::string_view::npos) return Value::of(chars_in(s->text.substr(0, w.begin + at)));
  if (name.ends_with("index")) return value_error("substring not found");
  return Value::of(int64_t{-1});
}

Result<Value> count_in(const Str* s, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("count", arguments, {"sub", "start", "end"}, 1));
  LONGKV_ASSIGN(const Str* wanted, p.text(0, nullptr));
  LONGKV_ASSIGN(const Window w, window(s, p, 1));
  if (w.empty) return Value::of(int64_t{0});
  const std::string_view text = cut(s, w);
  if (wanted->text.empty()) return Value::of(chars_in(text) + 1);
  int64_t n = 0;
  for (size_t at = text.find(wanted->text); at != std::string_view::npos;
       at = text.find(wanted->text, at + wanted->text.size())) {
    ++n;
  }
  return Value::of(n);
}

Result<Value> has_end(const Str* s, bool prefix, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p,
                Parameters::match(prefix ? "startswith" : "endswith", arguments, {"prefix", "start", "end"}, 1));
  LONGKV_ASSIGN(const Window w, window(s, p, 1));
  const std::string_view text = cut(s, w);
  std::vector<Value> candidates = {p[0]};
  if (p[0].is(Kind::kTuple)) candidates = p[0].list->items;
  for (const Value& c : candidates) {
    if (c.undefined()) return undefined_error(c);
    if (!c.string()) {
      return value_error(fmt::format("{} first arg must be str or a tuple of str, not {}",
                                     prefix ? "startswith" : "endswith", type_name(c)));
    }
    if (!w.empty && (prefix ? text.starts_with(c.str->text) : text.ends_with(c.str->text))) return Value::of(true);
  }
  return Value::of(false);
}

Result<Value> partition(Interpreter& in, const Str* s, bool right, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("partition", arguments, {"sep"}, 1));
  LONGKV_ASSIGN(const Str* by, p.text(0, nullptr));
  if (by->text.empty()) return value_error("empty separator");
  const size_t at = right ? s->text.rfind(by->text) : s->text.find(by->text);
  const Value empty = in.literal("");
  const Value whole = Value::of(s);
  if (at == std::string_view::npos) {
    return right ? in.list({empty, empty, whole}, Kind::kTuple) : in.list({whole, empty, empty}, Kind::kTuple);
  }
  const size_t after = at + by->text.size();
  return in.list({Value::of(in.heap().part(s, 0, at)), Value::of(in.heap().part(s, at, after)),
                  Value::of(in.heap().part(s, after, s->text.size()))},
                 Kind::kTuple);
}

Result<Value> justify(Interpreter& in, const Str* s, std::string_view name, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match(name, arguments, {"width", "fillchar"}, 1));
  LONGKV_ASSIGN(const int64_t width, p.integer(0, 0));
  LONGKV_ASSIGN(const Str* fill, p.text(1, in.literal(name == "zfill" ? "0" : " ").str));
  if (fill->length() != 1) return value_error("The fill character must be exactly one character long");
  if (width > kMaxWidth) return value_error(fmt::format("a width of more than {} characters", kMaxWidth));
  const int64_t missing = width - s->length();
  if (missing <= 0) return Value::of(s);
  int64_t before = 0;
  if (name == "rjust" || name == "zfill") before = missing;
  if (name == "center") before = missing / 2 + (missing & width & 1);
  TextBuilder out;
  const bool sign = name == "zfill" && (s->text.starts_with('-') || s->text.starts_with('+'));
  if (sign) out.add_part(s, 0, 1);
  for (int64_t i = 0; i < before; ++i) out.add(fill);
  out.add_part(s, sign ? 1 : 0, s->text.size());
  for (int64_t i = before; i < missing; ++i) out.add(fill);
  return in.make(out);
}

Result<Value> join(Interpreter& in, const Str* s, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("join", arguments, {"iterable"}, 1));
  LONGKV_ASSIGN(const std::vector<Value> items, items_of(in.heap(), p[0]));
  TextBuilder out;
  for (size_t i = 0; i < items.size(); ++i) {
    if (!items[i].string()) {
      return value_error(fmt::format("sequence item {}: expected str instance, {} found", i, type_name(items[i])));
    }
    if (i > 0) out.add(s);
    out.add(items[i].str);
    LONGKV_TRY(in.tick_bytes(s->text.size() + items[i].str->text.size()));
  }
  return in.make(out);
}

Result<Value> expand_tabs(Interpreter& in, const Str* s, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("expandtabs", arguments, {"tabsize"}));
  LONGKV_ASSIGN(const int64_t size, p.integer(0, 8));
  if (size > 1000) return value_error("a tab of more than 1000 characters");
  TextBuilder out;
  int64_t column = 0;
  for (size_t i = 0; i < s->text.size(); ++i) {
    const char c = s->text[i];
    if (c == '\t') {
      const int64_t n = size > 0 ? size - column % size : 0;
      out.add_neutral(std::string(size_t(n), ' '));
      column += n;
      LONGKV_TRY(in.tick_bytes(size_t(n)));
      continue;
    }
    out.add_part(s, i, i + 1);
    if ((static_cast<unsigned char>(c) & 0xC0) != 0x80) ++column;
    if (c == '\n' || c == '\r') column = 0;
  }
  return in.make(out);
}

// The questions that a string answers about all of its characters.
Result<Value> all_chars(Interpreter& in, const Str* s, std::string_view name) {
  if (name == "isascii") return Value::of(s->ascii());
  if (name == "islower" || name == "isupper") {
    const bool upper = name == "isupper";
    const std::string_view same = change_case(in.heap(), s, upper ? CaseChange::kUpper : CaseChange::kLower)->text;
    const std::string_view other = change_case(in.heap(), s, upper ? CaseChange::kLower : CaseChange::kUpper)->text;
    return Value::of(same == s->text && other != s->text);
  }
  for (size_t i = 0; i < s->text.size();) {
    const Utf8Char c = decode_utf8(s->text.data() + i, s->text.size() - i);
    const uint8_t cls = char_class_table()[c.code];
    const bool digit = c.code < 0x80 ? c.code >= '0' && c.code <= '9' : (cls & kNumber) != 0;
    bool holds = digit;
    if (name == "isspace") holds = is_space(c.code);
    if (name == "isalpha") holds = (cls & kLetter) != 0;
    if (name == "isalnum") holds = digit || (cls & kLetter) != 0;
    if (!holds) return Value::of(false);
    i += c.length;
  }
  return Value::of(!s->text.empty());
}

Result<Value> remove_end(Interpreter& in, const Str* s, bool prefix, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("removeprefix", arguments, {"prefix"}, 1));
  LONGKV_ASSIGN(const Str* end, p.text(0, nullptr));
  const size_t n = end->text.size();
  const size_t size = s->text.size();
  if (prefix) return Value::of(s->text.starts_with(end->text) ? in.heap().part(s, n, size) : s);
  return Value::of(s->text.ends_with(end->text) ? in.heap().part(s, 0, size - n) : s);
}

}  // namespace

Result<Value> call_text_method(Interpreter& in, const Str* s, std::string_view name, const Arguments& arguments) {
  if (name == "split" || name == "rsplit") return split_text(in, s, arguments, name == "rsplit");
  if (name == "find" || name == "rfind" || name == "index" || name == "rindex") return find_in(s, name, arguments);
  if (name == "startswith" || name == "endswith") return has_end(s, name == "startswith", arguments);
  if (name == "removeprefix" || name == "removesuffix") return remove_end(in, s, name == "removeprefix", arguments);
  if (name == "partition" || name == "rpartition") return partition(in, s, name == "rpartition", arguments);
  if (name == "count") return count_in(s, arguments);
  if (name == "join") return join(in, s, arguments);
  if (name == "format") return format_braces(in.heap(), s, arguments.positional, arguments.named);
  if (name == "expandtabs") return expand_tabs(in, s, arguments);
  if (name == "ljust" || name == "rjust" || name == "center" || name == "zfill") return justify(in, s, name, arguments);
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    LONGKV_ASSIGN(const Parameters p, Parameters::match(name, arguments, {"chars"}));
    const Str* chars = nullptr;
    if (p.has(0) && !p[0].is(Kind::kNone)) {
      LONGKV_ASSIGN(chars, p.text(0, nullptr));
      LONGKV_TRY(in.tick_bytes(s->text.size() * std::min<size_t>(chars->text.size(), 64)));
    }
    return Value::of(strip_text(in.heap(), s, chars, name != "rstrip", name != "lstrip"));
  }
  if (name == "replace") {
    LONGKV_ASSIGN(const Parameters p, Parameters::match(name, arguments, {"old", "new", "count"}, 2));
    LONGKV_ASSIGN(const Str* from, p.text(0, nullptr));
    LONGKV_ASSIGN(const Str* to, p.text(1, nullptr));
    LONGKV_ASSIGN(const int64_t count, p.integer(2, -1));
    LONGKV_ASSIGN(const Str* out, replace_text(in, s, from, to, count));
    return Value::of(out);
  }
  if (name == "splitlines") {
    LONGKV_ASSIGN(const Parameters p, Parameters::match(name, arguments, {"keepends"}));
    return split_lines(in, s, p.flag(0, false));
  }
  LONGKV_TRY(Parameters::match(name, arguments, {}).status());
  if (name == "upper") return Value::of(change_case(in.heap(), s, CaseChange::kUpper));
  if (name == "lower" || name == "casefold") return Value::of(change_case(in.heap(), s, CaseChange::kLower));
  if (name == "title") return Value::of(change_case(in.heap(), s, CaseChange::kTitle));
  if (name == "capitalize") return Value::of(change_case(in.heap(), s, CaseChange::kCapitalize));
  if (name == "swapcase") return Value::of(change_case(in.heap(), s, CaseChange::kSwap));
  return all_chars(in, s, name);
}

}  // namespace longkv::jinja
