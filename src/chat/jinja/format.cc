// Python's two ways to format: "%s" % x and "{}".format(x).
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/error.h"
#include "chat/jinja/operators.h"
#include "chat/jinja/text.h"

namespace longkv::jinja {

namespace {

constexpr int64_t kMaxWidth = 10'000;

struct Spec {
  std::string fill = " ";
  Origin fill_origin = Origin::kTemplate;
  char align = '\0';  // < > ^ =
  bool plus = false, blank = false, alternate = false, zero = false, commas = false;
  int64_t width = 0;
  int64_t precision = -1;
  char type = '\0';
};

Result<int64_t> read_number(std::string_view text, size_t& at) {
  int64_t n = 0;
  while (at < text.size() && text[at] >= '0' && text[at] <= '9') {
    n = n * 10 + (text[at++] - '0');
    if (n > kMaxWidth) return value_error(fmt::format("a format asks for more than {} characters", kMaxWidth));
  }
  return n;
}

std::string sign_of(bool negative, const Spec& spec) {
  return negative ? "-" : spec.plus ? "+" : spec.blank ? " " : "";
}

std::string with_commas(std::string digits) {
  const size_t end = std::min(digits.find('.'), digits.size());
  for (size_t i = end; i > 3; i -= 3) digits.insert(i - 3, ",");
  return digits;
}

Result<std::string> integer_digits(int64_t value, const Spec& spec, std::string& sign) {
  const uint64_t magnitude = value < 0 ? uint64_t(0) - uint64_t(value) : uint64_t(value);
  sign = sign_of(value < 0, spec);
  std::string digits;
  switch (spec.type) {
    case 'x': digits = fmt::format("{:x}", magnitude); break;
    case 'X': digits = fmt::format("{:X}", magnitude); break;
    case 'o': digits = fmt::format("{:o}", magnitude); break;
    case 'b': digits = fmt::format("{:b}", magnitude); break;
    default: digits = fmt::format("{}", magnitude);
  }
  if (spec.alternate && std::string_view("xXob").find(spec.type) != std::string_view::npos && spec.type != '\0') {
    sign += {'0', spec.type};
  }
  return spec.commas ? with_commas(digits) : digits;
}

Result<std::string> real_digits(double value, const Spec& spec, std::string& sign) {
  sign = sign_of(std::signbit(value) && !std::isnan(value), spec);
  const double magnitude = std::fabs(value);
  if (spec.type == '\0' && spec.precision < 0) return real_text(magnitude);
  if (!std::isfinite(magnitude)) return std::string(std::isnan(magnitude) ? "nan" : "inf");
  const char type = spec.type == '%' ? 'f' : spec.type == '\0' ? 'g' : spec.type;
  const char format[] = {'%', '.', '*', type, '\0'};
  const int precision = spec.precision < 0 ? 6 : int(spec.precision);
  std::string digits(size_t(precision) + 340, '\0');
  const double shown = spec.type == '%' ? magnitude * 100 : magnitude;
  const int n = std::snprintf(digits.data(), digits.size(), format, precision, shown);
  if (n < 0 || size_t(n) >= digits.size()) return value_error("a number is too long to format");
  digits.resize(size_t(n));
  if (spec.commas) digits = with_commas(digits);
  return spec.type == '%' ? digits + "%" : digits;
}

// `body` is `length` characters long; pads it to the width.
void pad(TextBuilder& out, const std::string& sign, const Str* body, const Spec& spec, char default_align) {
  const int64_t missing = std::max<int64_t>(spec.width - body->length() - int64_t(sign.size()), 0);
  const char align = spec.align != '\0' ? spec.align : spec.zero && default_align == '>' ? '=' : default_align;
  const std::string& fill = spec.align == '\0' && spec.zero && default_align == '>' ? std::string("0") : spec.fill;
  const int64_t before = align == '<' ? 0 : align == '^' ? missing / 2 : missing;
  if (align == '=') out.add_neutral(sign);
  for (int64_t i = 0; i < before; ++i) out.add(fill, spec.fill_origin);
  if (align != '=') out.add_neutral(sign);
  out.add(body);
  for (int64_t i = before; i < missing; ++i) out.add(fill, spec.fill_origin);
}

Status add_formatted(Heap& heap, TextBuilder& out, const Value& v, const Spec& spec) {
  std::string sign;
  const bool as_real = spec.type != '\0' && std::string_view("eEfFgG%").find(spec.type) != std::string_view::npos;
  const bool as_integer = spec.type != '\0' && std::string_view("dxXobn").find(spec.type) != std::string_view::npos;
  if ((v.is(Kind::kInt) || (v.is(Kind::kBool) && as_integer)) && !as_real && spec.type != 's') {
    LONGKV_ASSIGN(const std::string digits, integer_digits(v.as_int(), spec, sign));
    pad(out, sign, heap.own(digits, Origin::kTemplate), spec, '>');
    return {};
  }
  if (v.numeric() && (as_real || (v.is(Kind::kFloat) && spec.type == '\0'))) {
    LONGKV_ASSIGN(const std::string digits, real_digits(v.as_real(), spec, sign));
    pad(out, sign, heap.own(digits, Origin::kTemplate), spec, '>');
    return {};
  }
  if (as_real || as_integer) {
    return value_error(fmt::format("Unknown format code '{}' for object of type '{}'", spec.type, type_name(v)));
  }
  LONGKV_ASSIGN(const Str* s, text_of(heap, v));
  if (spec.precision >= 0 && s->length() > spec.precision) s = heap.part(s, 0, byte_of(s, spec.precision));
  pad(out, "", s, spec, '<');
  return {};
}

// [[fill]align][sign][#][0][width][,][.precision][type]
Result<Spec> parse_spec(std::string_view text) {
  Spec spec;
  size_t at = 0;
  const auto is_align = [&](size_t i) {
    return i < text.size() && std::string_view("<>^=").find(text[i]) != std::string_view::npos;
  };
  size_t first = 1;
  while (first < text.size() && (static_cast<unsigned char>(text[first]) & 0xC0) == 0x80) ++first;
  if (!text.empty() && is_align(first)) {
    spec.fill = std::string(text.substr(0, first));
    spec.align = text[first];
    at = first + 1;
  } else if (is_align(0)) {
    spec.align = text[at++];
  }
  for (; at < text.size() && std::string_view("+- #0").find(text[at]) != std::string_view::npos; ++at) {
    spec.plus |= text[at] == '+';
    spec.blank |= text[at] == ' ';
    spec.alternate |= text[at] == '#';
    spec.zero |= text[at] == '0';
  }
  LONGKV_ASSIGN(spec.width, read_number(text, at));
  if (at < text.size() && (text[at] == ',' || text[at] == '_')) spec.commas = text[at++] == ',';
  if (at < text.size() && text[at] == '.') {
    ++at;
    LONGKV_ASSIGN(spec.precision, read_number(text, at));
  }
  if (at < text.size()) spec.type = text[at++];
  if (at != text.size()) return value_error(fmt::format("Invalid format specifier '{}'", text));
  return spec;
}

}  // namespace

Result<Value> format_percent(Heap& heap, const Str* format, const Value& arguments) {
  const std::string_view text = format->text;
  const bool tuple = arguments.is(Kind::kTuple);
  const bool dict = arguments.is(Kind::kDict);
  size_t used = 0;
  TextBuilder out;
  for (size_t at = 0; at < text.size();) {
    const size_t mark = std::min(text.find('%', at), text.size());
    out.add_part(format, at, mark);
    if (mark == text.size()) break;
    at = mark + 1;
    Spec spec;
    Value v;
    bool named = false;
    if (at < text.size() && text[at] == '(') {
      const size_t close = text.find(')', at);
      if (close == std::string_view::npos) return value_error("incomplete format key");
      if (!dict) return value_error("format requires a mapping");
      const Value* found = arguments.dict->find(text.substr(at + 1, close - at - 1));
      if (found == nullptr)
        return value_error(fmt::format("no key '{}' to format", text.substr(at + 1, close - at - 1)));
      v = *found;
      named = true;
      at = close + 1;
    }
    for (; at < text.size() && std::string_view("+- #0").find(text[at]) != std::string_view::npos; ++at) {
      spec.plus |= text[at] == '+';
      spec.blank |= text[at] == ' ';
      spec.alternate |= text[at] == '#';
      spec.zero |= text[at] == '0';
      if (text[at] == '-') spec.align = '<';
    }
    LONGKV_ASSIGN(spec.width, read_number(text, at));
    if (at < text.size() && text[at] == '.') {
      ++at;
      LONGKV_ASSIGN(spec.precision, read_number(text, at));
    }
    while (at < text.size() && std::string_view("hlL").find(text[at]) != std::string_view::npos) ++at;
    if (at == text.size()) return value_error("incomplete format");
    const char type = text[at++];
    if (type == '%') {
      out.add_neutral("%");
      continue;
    }
    if (!named) {
      if (tuple ? used >= arguments.list->items.size() : used > 0) {
        return value_error("not enough arguments for format string");
      }
      v = tuple ? arguments.list->items[used] : arguments;
      ++used;
    }
    spec.type = type == 'i' || type == 'u' ? 'd' : type;
    if (type == 'r' || type == 'a') {
      TextBuilder repr;
      LONGKV_TRY(append_repr(repr, v));
      v = Value::of(repr.finish(heap));
      spec.type = 's';
    } else if (std::string_view("sdxXoeEfFgG").find(spec.type) == std::string_view::npos) {
      return value_error(fmt::format("unsupported format character '{}'", type));
    }
    if (spec.type == 's') {
      LONGKV_ASSIGN(const Str* s, text_of(heap, v));
      v = Value::of(s);
      spec.zero = false;
      if (spec.align == '\0') spec.align = '>';
    } else if (!v.numeric()) {
      return value_error(fmt::format("%{} format: a real number is required, not {}", type, type_name(v)));
    } else if (v.is(Kind::kFloat) && spec.type == 'd') {
      if (!(std::fabs(v.real) < 9e18)) return value_error("a number is too large to format as an integer");
      v = Value::of(int64_t(v.real));
    }
    LONGKV_TRY(add_formatted(heap, out, v, spec));
  }
  if (tuple ? used < arguments.list->items.size() : used == 0 && !dict && !arguments.is(Kind::kList)) {
    return value_error("not all arguments converted during string formatting");
  }
  return Value::of(out.finish(heap));
}

Result<Value> format_braces(Heap& heap, const Str* format, const std::vector<Value>& positional,
                            const std::vector<std::pair<std::string_view, Value>>& named) {
  const std::string_view text = format->text;
  size_t automatic = 0;
  TextBuilder out;
  for (size_t at = 0; at < text.size();) {
    const size_t mark = std::min(text.find_first_of("{}", at), text.size());
    out.add_part(format, at, mark);
    if (mark == text.size()) break;
    at = mark + 1;
    if (at < text.size() && text[at] == text[mark]) {
      out.add_part(format, mark, at);
      ++at;
      continue;
    }
    if (text[mark] == '}') return value_error("Single '}' encountered in format string");
    const size_t close = text.find('}', at);
    if (close == std::string_view::npos) return value_error("expected '}' before end of string");
    std::string_view field = text.substr(at, close - at);
    at = close + 1;
    Spec spec;
    if (const size_t colon = field.find(':'); colon != std::string_view::npos) {
      LONGKV_ASSIGN(spec, parse_spec(field.substr(colon + 1)));
      if (format->origin != Origin::kTemplate) spec.fill_origin = Origin::kUser;
      field = field.substr(0, colon);
    }
    char conversion = '\0';
    if (const size_t bang = field.find('!'); bang != std::string_view::npos) {
      if (bang + 2 != field.size()) return value_error("a conversion in a format string is '!r' or '!s'");
      conversion = field[bang + 1];
      field = field.substr(0, bang);
    }
    const size_t head_end = std::min(field.find_first_of(".["), field.size());
    const std::string_view head = field.substr(0, head_end);
    if (head_end != field.size()) return value_error("format fields with attributes or subscripts are not supported");
    Value v;
    if (head.empty() || (head[0] >= '0' && head[0] <= '9')) {
      size_t end = 0;
      LONGKV_ASSIGN(const int64_t number, read_number(head, end));
      const size_t index = head.empty() ? automatic++ : size_t(number);
      if (end != head.size() || index >= positional.size()) {
        return value_error("Replacement index out of range for positional args tuple");
      }
      v = positional[index];
    } else {
      const auto found = std::find_if(named.begin(), named.end(), [&](const auto& n) { return n.first == head; });
      if (found == named.end()) return value_error(fmt::format("no argument '{}' to format", head));
      v = found->second;
    }
    if (conversion == 'r' || conversion == 's') {
      TextBuilder piece;
      LONGKV_TRY(conversion == 'r' ? append_repr(piece, v) : append_text(piece, v));
      v = Value::of(piece.finish(heap));
    } else if (conversion != '\0') {
      return value_error(fmt::format("Unknown conversion specifier '{}'", conversion));
    }
    LONGKV_TRY(add_formatted(heap, out, v, spec));
  }
  return Value::of(out.finish(heap));
}

}  // namespace longkv::jinja
