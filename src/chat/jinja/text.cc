#include "chat/jinja/text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "chat/jinja/case_table.h"
#include "chat/jinja/operators.h"
#include "tokenizer/unicode.h"

namespace longkv::jinja {

namespace {

bool printable(uint32_t code) {
  if (code < 0x7F) return code >= 0x20;
  const CodeRange* end = kUnprintable + kUnprintableCount;
  const CodeRange* at =
      std::lower_bound(kUnprintable, end, code, [](const CodeRange& r, uint32_t c) { return r.last < c; });
  return at == end || code < at->first;
}

void append_case(std::string& out, uint32_t code, const CaseRun* runs, size_t run_count, const CaseText* texts,
                 size_t text_count) {
  const CaseText* text_end = texts + text_count;
  const CaseText* text =
      std::lower_bound(texts, text_end, code, [](const CaseText& t, uint32_t c) { return t.code < c; });
  if (text != text_end && text->code == code) {
    out += text->text;
    return;
  }
  const CaseRun* end = runs + run_count;
  const CaseRun* run = std::lower_bound(runs, end, code, [](const CaseRun& r, uint32_t c) { return r.last < c; });
  const bool in_run = run != end && code >= run->first && (code - run->first) % run->step == 0;
  append_utf8(out, in_run ? uint32_t(int64_t(code) + run->delta) : code);
}

void append_upper(std::string& out, uint32_t code) {
  append_case(out, code, kUpperRuns, kUpperRunCount, kUpperTexts, kUpperTextCount);
}
void append_lower(std::string& out, uint32_t code) {
  append_case(out, code, kLowerRuns, kLowerRunCount, kLowerTexts, kLowerTextCount);
}
void append_title(std::string& out, uint32_t code) {
  append_case(out, code, kTitleRuns, kTitleRunCount, kTitleTexts, kTitleTextCount);
}

// Neither upper nor lower case: has another upper-case form than itself.
bool is_title(uint32_t code) {
  std::string same, upper;
  append_utf8(same, code);
  append_upper(upper, code);
  return same != upper;
}

bool is_cased(uint32_t code) { return (char_class_table()[code] & (kUpper | kLower)) != 0; }

// Capital sigma in lower case is another letter at the end of a word.
bool final_sigma(std::string_view text, size_t at, bool after_cased) {
  if (!after_cased) return false;
  const size_t next = at + 2;
  if (next >= text.size()) return true;
  return !is_cased(decode_utf8(text.data() + next, text.size() - next).code);
}

void append_quoted(TextBuilder& out, const Str* s) {
  const std::string_view text = s->text;
  const bool both = text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos;
  const char quote = both ? '"' : '\'';
  out.add_neutral(std::string_view(&quote, 1));
  size_t plain = 0;
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = decode_utf8(text.data() + i, text.size() - i);
    const bool escaped = c.code == uint32_t(quote) || c.code == '\\' || !printable(c.code);
    if (!escaped) {
      i += c.length;
      continue;
    }
    out.add_part(s, plain, i);
    if (c.code == uint32_t(quote) || c.code == '\\') {
      const char pair[2] = {'\\', char(c.code)};
      out.add_neutral(std::string_view(pair, 2));
    } else if (c.code == '\n' || c.code == '\r' || c.code == '\t') {
      out.add_neutral(c.code == '\n' ? "\\n" : c.code == '\r' ? "\\r" : "\\t");
    } else if (c.code < 0x100) {
      out.add_neutral(fmt::format("\\x{:02x}", c.code));
    } else {
      out.add_neutral(c.code < 0x10000 ? fmt::format("\\u{:04x}", c.code) : fmt::format("\\U{:08x}", c.code));
    }
    i += c.length;
    plain = i;
  }
  out.add_part(s, plain, text.size());
  out.add_neutral(std::string_view(&quote, 1));
}

void append_json_text(TextBuilder& out, const Str* s, bool ensure_ascii) {
  const std::string_view text = s->text;
  out.add_neutral("\"");
  size_t plain = 0;
  for (size_t i = 0; i < text.size();) {
    const auto byte = static_cast<unsigned char>(text[i]);
    size_t length = 1;
    std::string escape;
    if (byte == '"' || byte == '\\') {
      escape = {'\\', char(byte)};
    } else if (byte < 0x20) {
      constexpr std::string_view kNamed = "\b\f\n\r\t";
      const size_t named = kNamed.find(char(byte));
      escape = named != std::string_view::npos ? std::string{'\\', "bfnrt"[named]} : fmt::format("\\u{:04x}", byte);
    } else if (byte >= 0x7F && ensure_ascii) {
      const Utf8Char c = decode_utf8(text.data() + i, text.size() - i);
      length = c.length;
      escape = c.code < 0x10000 ? fmt::format("\\u{:04x}", c.code)
                                : fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + ((c.code - 0x10000) >> 10),
                                              0xDC00 + ((c.code - 0x10000) & 0x3FF));
    }
    if (!escape.empty()) {
      out.add_part(s, plain, i);
      out.add_neutral(escape);
      plain = i + length;
    }
    i += length;
  }
  out.add_part(s, plain, text.size());
  out.add_neutral("\"");
}

// Values may share parts, so a small one can be long to write, and its bytes count as work only when it is written,
// though piece by piece they take longer than in a copy. The text of a string itself is not bound by this.
constexpr size_t kMaxTextBytes = size_t{16} << 20;

Status check_bounds(const TextBuilder& out, int depth) {
  if (depth > kMaxValueDepth) {
    return value_error(fmt::format("a value is nested more than {} levels deep", kMaxValueDepth));
  }
  if (out.size() > kMaxTextBytes) return value_error("a text is too long");
  return {};
}

// Where the text of the i-th item goes: before it, a separator.
Status append_items(TextBuilder& out, const std::vector<Value>& items, int depth) {
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out.add_neutral(", ");
    LONGKV_TRY(append_repr(out, items[i], depth + 1));
  }
  return {};
}

Status append_dict(TextBuilder& out, const Dict& dict, int depth) {
  out.add_neutral("{");
  for (size_t i = 0; i < dict.items.size(); ++i) {
    if (i > 0) out.add_neutral(", ");
    LONGKV_TRY(append_repr(out, dict.items[i].first, depth + 1));
    out.add_neutral(": ");
    LONGKV_TRY(append_repr(out, dict.items[i].second, depth + 1));
  }
  out.add_neutral("}");
  return {};
}

Status json_key(TextBuilder& out, const Value& key, const JsonStyle& style) {
  if (key.string()) {
    append_json_text(out, key.str, style.ensure_ascii);
    return {};
  }
  if (!key.numeric() && !key.is(Kind::kNone) && !key.is(Kind::kBig)) {
    return value_error(
        fmt::format("keys of JSON objects must be str, int, float, bool or None, not {}", type_name(key)));
  }
  out.add_neutral("\"");
  LONGKV_TRY(append_json(out, key, style));
  out.add_neutral("\"");
  return {};
}

void new_line(TextBuilder& out, const JsonStyle& style, int depth) {
  out.add_neutral("\n");
  for (int i = 0; i < depth; ++i) style.add(out, style.indent);
}

}  // namespace

bool is_space(uint32_t code) {
  if (code < 0x80) return code == ' ' || (code >= 0x09 && code <= 0x0D) || (code >= 0x1C && code <= 0x1F);
  return (char_class_table()[code] & kSpace) != 0;
}

size_t skip_space(std::string_view text, size_t pos) {
  while (pos < text.size()) {
    const Utf8Char c = decode_utf8(text.data() + pos, text.size() - pos);
    if (!is_space(c.code)) break;
    pos += c.length;
  }
  return pos;
}

size_t end_without_space(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    size_t at = end - 1;
    while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
    if (!is_space(decode_utf8(text.data() + at, end - at).code)) break;
    end = at;
  }
  return end;
}

size_t byte_of(const Str* s, int64_t index) {
  if (s->ascii()) return size_t(index);
  size_t pos = 0;
  for (; index > 0 && pos < s->text.size(); --index)
    pos += decode_utf8(s->text.data() + pos, s->text.size() - pos).length;
  return pos;
}

const Str* change_case(Heap& heap, const Str* s, CaseChange change) {
  TextBuilder out;
  out.reserve(s->text.size());
  std::string piece;
  bool after_cased = false;
  size_t span = 0;
  for (size_t i = 0; i < s->text.size();) {
    const Utf8Char c = decode_utf8(s->text.data() + i, s->text.size() - i);
    const bool upper = (char_class_table()[c.code] & kUpper) != 0;
    CaseChange now = change;
    if (change == CaseChange::kCapitalize) now = i == 0 ? CaseChange::kTitle : CaseChange::kLower;
    if (change == CaseChange::kTitle) now = after_cased ? CaseChange::kLower : CaseChange::kTitle;
    if (change == CaseChange::kSwap) now = upper ? CaseChange::kLower : CaseChange::kUpper;
    piece.clear();
    if (change == CaseChange::kSwap && upper && is_title(c.code)) {
      append_utf8(piece, c.code);
    } else if (now == CaseChange::kUpper) {
      append_upper(piece, c.code);
    } else if (now == CaseChange::kTitle) {
      append_title(piece, c.code);
    } else if (c.code == 0x3A3 && final_sigma(s->text, i, after_cased)) {
      append_utf8(piece, 0x3C2);
    } else {
      append_lower(piece, c.code);
    }
    while (span < s->spans.size() && s->spans[span].end <= i) ++span;
    const bool user = s->origin == Origin::kUser || (span < s->spans.size() && s->spans[span].begin <= i);
    out.add(piece, user ? Origin::kUser : Origin::kTemplate);
    after_cased = is_cased(c.code);
    i += c.length;
  }
  return out.finish(heap);
}

std::string real_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char digits[40];
  const auto end = std::to_chars(digits, digits + sizeof digits, value, std::chars_format::scientific).ptr;
  const std::string_view text(digits, size_t(end - digits));
  const size_t e = text.find('e');
  int exponent = 0;
  const char* from = digits + e + 1;
  std::from_chars(*from == '+' ? from + 1 : from, end, exponent);
  std::string mantissa(text.substr(0, e));
  const std::string sign = mantissa[0] == '-' ? "-" : "";
  std::erase(mantissa, '-');
  if (exponent < -4 || exponent >= 16) {
    return fmt::format("{}{}e{}{:02}", sign, mantissa, exponent < 0 ? '-' : '+', std::abs(exponent));
  }
  std::erase(mantissa, '.');
  if (exponent < 0) return sign + "0." + std::string(size_t(-exponent - 1), '0') + mantissa;
  if (mantissa.size() <= size_t(exponent) + 1) {
    return sign + mantissa + std::string(size_t(exponent) + 1 - mantissa.size(), '0') + ".0";
  }
  return sign + mantissa.substr(0, size_t(exponent) + 1) + "." + mantissa.substr(size_t(exponent) + 1);
}

Status append_text(TextBuilder& out, const Value& v) {
  if (v.string()) {
    out.add(v.str);
    return {};
  }
  if (v.undefined()) return {};
  return append_repr(out, v);
}

Status append_repr(TextBuilder& out, const Value& v, int depth) {
  LONGKV_TRY(check_bounds(out, depth));
  switch (v.kind) {
    case Kind::kUndefined: out.add_neutral("Undefined"); return {};
    case Kind::kNone: out.add_neutral("None"); return {};
    case Kind::kBool: out.add_neutral(v.boolean ? "True" : "False"); return {};
    case Kind::kInt: out.add_neutral(fmt::format("{}", v.integer)); return {};
    case Kind::kBig: out.add_neutral(fmt::format("{}", v.big)); return {};
    case Kind::kFloat: out.add_neutral(real_text(v.real)); return {};
    case Kind::kStr: append_quoted(out, v.str); return {};
    case Kind::kList:
      out.add_neutral("[");
      LONGKV_TRY(append_items(out, v.list->items, depth));
      out.add_neutral("]");
      return {};
    case Kind::kTuple:
      out.add_neutral("(");
      LONGKV_TRY(append_items(out, v.list->items, depth));
      out.add_neutral(v.list->items.size() == 1 ? ",)" : ")");
      return {};
    case Kind::kView:
      out.add_neutral("[");
      LONGKV_TRY(append_items(out, v.list->items, depth));
      out.add_neutral("]");
      return {};
    case Kind::kDict: return append_dict(out, *v.dict, depth);
    case Kind::kNamespace:
      out.add_neutral("<Namespace ");
      LONGKV_TRY(append_dict(out, *v.dict, depth));
      out.add_neutral(">");
      return {};
    default: return value_error(fmt::format("a {} cannot be written as text", type_name(v)));
  }
}

Status append_json(TextBuilder& out, const Value& v, const JsonStyle& style, int depth) {
  LONGKV_TRY(check_bounds(out, depth));
  switch (v.kind) {
    case Kind::kNone: out.add_neutral("null"); return {};
    case Kind::kBool: out.add_neutral(v.boolean ? "true" : "false"); return {};
    case Kind::kFloat:
      out.add_neutral(std::isnan(v.real)   ? "NaN"
                      : std::isinf(v.real) ? (v.real < 0 ? "-Infinity" : "Infinity")
                                           : real_text(v.real));
      return {};
    case Kind::kInt:
    case Kind::kBig: return append_repr(out, v);
    case Kind::kStr: append_json_text(out, v.str, style.ensure_ascii); return {};
    case Kind::kList:
    case Kind::kTuple: {
      const std::vector<Value>& items = v.list->items;
      if (items.empty()) {
        out.add_neutral("[]");
        return {};
      }
      out.add_neutral("[");
      for (size_t i = 0; i < items.size(); ++i) {
        if (i > 0) style.add(out, style.item_separator);
        if (style.pretty) new_line(out, style, depth + 1);
        LONGKV_TRY(append_json(out, items[i], style, depth + 1));
      }
      if (style.pretty) new_line(out, style, depth);
      out.add_neutral("]");
      return {};
    }
    case Kind::kDict: {
      if (v.dict->items.empty()) {
        out.add_neutral("{}");
        return {};
      }
      std::vector<std::pair<Value, Value>> items = v.dict->items;
      if (style.sort_keys) {
        Status failed;
        std::stable_sort(items.begin(), items.end(), [&](const auto& a, const auto& b) {
          const Result<int> o = order(a.first, b.first);
          if (!o.ok()) failed = o.status();
          return o.ok() && *o < 0;
        });
        LONGKV_TRY(failed);
      }
      out.add_neutral("{");
      for (size_t i = 0; i < items.size(); ++i) {
        if (i > 0) style.add(out, style.item_separator);
        if (style.pretty) new_line(out, style, depth + 1);
        LONGKV_TRY(json_key(out, items[i].first, style));
        style.add(out, style.key_separator);
        LONGKV_TRY(append_json(out, items[i].second, style, depth + 1));
      }
      if (style.pretty) new_line(out, style, depth);
      out.add_neutral("}");
      return {};
    }
    default: return value_error(fmt::format("Object of type {} is not JSON serializable", type_name(v)));
  }
}

}  // namespace longkv::jinja
