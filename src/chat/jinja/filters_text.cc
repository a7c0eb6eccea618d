// Filters that make a text out of a text.
#include <algorithm>
#include <array>

#include "base/error.h"
#include "chat/jinja/filters.h"
#include "chat/jinja/methods.h"
#include "chat/jinja/text.h"
#include "tokenizer/unicode.h"

namespace longkv::jinja {

namespace {

template <CaseChange change>
Result<Value> change_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_TRY(Parameters::match("case filter", arguments, {}).status());
  LONGKV_ASSIGN(const Str* s, in.text(input));
  return Value::of(change_case(in.heap(), s, change));
}

// Words begin after white space and - ( { [ <, unlike those of str.title().
Result<Value> title_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_TRY(Parameters::match("title", arguments, {}).status());
  LONGKV_ASSIGN(const Str* s, in.text(input));
  TextBuilder out;
  bool first = true;
  for (size_t i = 0; i < s->text.size();) {
    const Utf8Char c = decode_utf8(s->text.data() + i, s->text.size() - i);
    const Str* one = in.heap().part(s, i, i + c.length);
    out.add(change_case(in.heap(), one, first ? CaseChange::kUpper : CaseChange::kLower));
    first = is_space(c.code) || c.code == '-' || c.code == '(' || c.code == '{' || c.code == '[' || c.code == '<';
    i += c.length;
  }
  return in.make(out);
}

Result<Value> trim_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("trim", arguments, {"chars"}));
  LONGKV_ASSIGN(const Str* s, in.text(input));
  const Str* chars = nullptr;
  if (p.has(0) && !p[0].is(Kind::kNone)) {
    LONGKV_ASSIGN(chars, p.text(0, nullptr));
  }
  return Value::of(strip_text(in.heap(), s, chars, true, true));
}

Result<Value> replace_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("replace", arguments, {"old", "new", "count"}, 2));
  LONGKV_ASSIGN(const Str* s, in.text(input));
  LONGKV_ASSIGN(const Str* from, in.text(p[0]));
  LONGKV_ASSIGN(const Str* to, in.text(p[1]));
  int64_t count = -1;
  if (p.has(2) && !p[2].is(Kind::kNone)) {
    LONGKV_ASSIGN(count, p.integer(2, -1));
  }
  LONGKV_ASSIGN(const Str* out, replace_text(in, s, from, to, count));
  return Value::of(out);
}

Result<Value> indent_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("indent", arguments, {"width", "first", "blank"}));
  if (input.undefined()) return undefined_error(input);
  if (!input.string()) return value_error(fmt::format("indent takes a string, not {}", type_name(input)));
  const Str* indention = nullptr;
  if (p.has(0) && p[0].string()) {
    indention = p[0].str;
  } else {
    LONGKV_ASSIGN(const int64_t width, p.integer(0, 4));
    if (width > 10'000) return value_error("indent by more than 10000 characters");
    indention = in.heap().own(std::string(size_t(std::max<int64_t>(width, 0)), ' '), Origin::kTemplate);
  }
  TextBuilder padded;
  padded.add(input.str);
  padded.add_neutral("\n");
  LONGKV_ASSIGN(const Value lines, split_lines(in, padded.finish(in.heap()), false));
  TextBuilder out;
  bool first = true;
  for (const Value& line : lines.list->items) {
    if (!first) out.add_neutral("\n");
    const bool wanted = first ? p.flag(1, false) : p.flag(2, false) || !line.str->text.empty();
    if (wanted) out.add(indention);
    out.add(line.str);
    LONGKV_TRY(in.tick_bytes(indention->text.size()));
    first = false;
  }
  return in.make(out);
}

Result<Value> string_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_TRY(Parameters::match("string", arguments, {}).status());
  LONGKV_ASSIGN(const Str* s, in.text(input));
  return Value::of(s);
}

Result<Value> escape_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_TRY(Parameters::match("escape", arguments, {}).status());
  LONGKV_ASSIGN(const Str* s, in.text(input));
  constexpr std::array<std::pair<char, std::string_view>, 5> kEntities = {
      {{'&', "&amp;"}, {'>', "&gt;"}, {'<', "&lt;"}, {'\'', "&#39;"}, {'"', "&#34;"}}};
  TextBuilder out;
  size_t plain = 0;
  for (size_t i = 0; i < s->text.size(); ++i) {
    for (const auto& [c, entity] : kEntities) {
      if (s->text[i] != c) continue;
      out.add_part(s, plain, i);
      out.add_neutral(entity);
      plain = i + 1;
    }
  }
  out.add_part(s, plain, s->text.size());
  return in.make(out);
}

Result<Value> center_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("center", arguments, {"width"}));
  LONGKV_ASSIGN(const Str* s, in.text(input));
  LONGKV_ASSIGN(const int64_t width, p.integer(0, 80));
  Arguments width_only;
  width_only.positional.push_back(Value::of(width));
  return call_text_method(in, s, "center", width_only);
}

Result<Value> truncate_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("truncate", arguments, {"length", "killwords", "end", "leeway"}));
  LONGKV_ASSIGN(const Str* s, in.text(input));
  LONGKV_ASSIGN(const int64_t length, p.integer(0, 255));
  LONGKV_ASSIGN(const Str* end, p.text(2, in.literal("...").str));
  LONGKV_ASSIGN(const int64_t leeway, p.integer(3, 5));
  if (length < end->length() || leeway < 0)
    return value_error("truncate: the length must not be below that of the end");
  if (s->length() <= length + leeway) return Value::of(s);
  const Str* kept = in.heap().part(s, 0, byte_of(s, length - end->length()));
  if (!p.flag(1, false)) {
    if (const size_t blank = kept->text.rfind(' '); blank != std::string_view::npos) {
      kept = in.heap().part(kept, 0, blank);
    }
  }
  TextBuilder out;
  out.add(kept);
  out.add(end);
  return in.make(out);
}

Result<Value> wordcount_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_TRY(Parameters::match("wordcount", arguments, {}).status());
  LONGKV_ASSIGN(const Str* s, in.text(input));
  int64_t words = 0;
  bool inside = false;
  for (size_t i = 0; i < s->text.size();) {
    const Utf8Char c = decode_utf8(s->text.data() + i, s->text.size() - i);
    const bool word = c.code == '_' || (char_class_table()[c.code] & (kLetter | kNumber)) != 0;
    words += word && !inside;
    inside = word;
    i += c.length;
  }
  return Value::of(words);
}

Result<Value> format_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Str* s, in.text(input));
  if (arguments.named.empty()) {
    return format_percent(in.heap(), s, in.list(arguments.positional, Kind::kTuple));
  }
  if (!arguments.positional.empty())
    return value_error("can't handle positional and keyword arguments at the same time");
  Dict* dict = in.heap().dict();
  for (const auto& [name, value] : arguments.named) {
    dict->set(Value::of(in.heap().borrow(name, arguments.names)), value);
  }
  return format_percent(in.heap(), s, Value::of(Kind::kDict, dict));
}

}  // namespace

std::span<const NamedFilter> text_filters() {
  static constexpr NamedFilter kFilters[] = {
      {"upper", change_filter<CaseChange::kUpper>},
      {"lower", change_filter<CaseChange::kLower>},
      {"capitalize", change_filter<CaseChange::kCapitalize>},
      {"title", title_filter},
      {"trim", trim_filter},
      {"replace", replace_filter},
      {"indent", indent_filter},
      {"string", string_filter},
      {"safe", string_filter},
      {"escape", escape_filter},
      {"e", escape_filter},
      {"forceescape", escape_filter},
      {"center", center_filter},
      {"truncate", truncate_filter},
      {"wordcount", wordcount_filter},
      {"format", format_filter},
  };
  return kFilters;
}

}  // namespace longkv::jinja
