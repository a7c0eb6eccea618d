// Filters on single values: tojson, default, numbers.
#include <charconv>
#include <cmath>

#include "base/error.h"
#include "chat/jinja/filters.h"
#include "chat/jinja/methods.h"
#include "chat/jinja/text.h"

namespace longkv::jinja {

namespace {

// json.dumps(x, ensure_ascii, indent, separators, sort_keys) as Transformers calls it.
Result<Value> tojson_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p,
                Parameters::match("tojson", arguments, {"ensure_ascii", "indent", "separators", "sort_keys"}));
  JsonStyle style;
  style.ensure_ascii = p.flag(0, false);
  style.sort_keys = p.flag(3, false);
  if (p.has(1) && !p[1].is(Kind::kNone)) {
    style.pretty = true;
    style.item_separator = ",";
    if (p[1].string()) {
      style.indent = p[1].str->text;
      style.from_user |= p[1].str->origin != Origin::kTemplate;
    } else {
      LONGKV_ASSIGN(const int64_t width, p.integer(1, 0));
      if (width > 1000) return value_error("tojson: an indent of more than 1000 characters");
      style.indent.assign(size_t(std::max<int64_t>(width, 0)), ' ');
    }
  }
  if (p.has(2) && !p[2].is(Kind::kNone)) {
    const Value& both = p[2];
    if (!both.sequence() || both.list->items.size() != 2 || !both.list->items[0].string() ||
        !both.list->items[1].string()) {
      return value_error("tojson: 'separators' must be two strings");
    }
    style.item_separator = both.list->items[0].str->text;
    style.key_separator = both.list->items[1].str->text;
    for (const Value& v : both.list->items) style.from_user |= v.str->origin != Origin::kTemplate;
  }
  TextBuilder out;
  LONGKV_TRY(append_json(out, input, style));
  return in.make(out);
}

Result<Value> default_filter(Interpreter&, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("default", arguments, {"default_value", "boolean"}));
  if (!input.undefined() && !(p.flag(1, false) && !truthy(input))) return input;
  if (p.has(0)) return p[0];
  static const Str kEmpty;
  return Value::of(&kEmpty);
}

std::string_view stripped(const Str* s) {
  const std::string_view text = s->text;
  const size_t begin = skip_space(text, 0);
  return begin == text.size() ? std::string_view() : text.substr(begin, end_without_space(text) - begin);
}

bool read_real(std::string_view text, double& value) {
  if (text.starts_with('+')) text.remove_prefix(1);
  if (text.empty() || text.starts_with('+')) return false;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), value);
  return read.ptr == text.data() + text.size() && (read.ec == std::errc() || read.ec == std::errc::result_out_of_range);
}

bool read_integer(std::string_view text, int base, int64_t& value) {
  if (text.starts_with('+')) text.remove_prefix(1);
  const auto read = std::from_chars(text.data(), text.data() + text.size(), value, base);
  return !text.empty() && read.ec == std::errc() && read.ptr == text.data() + text.size();
}

Result<Value> int_filter(Interpreter&, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("int", arguments, {"default", "base"}));
  const Value fallback = p.has(0) ? p[0] : Value::of(int64_t{0});
  LONGKV_ASSIGN(const int64_t base, p.integer(1, 10));
  if (input.undefined()) return undefined_error(input);
  if (input.integral()) return Value::of(input.as_int());
  double real = 0;
  if (input.string()) {
    int64_t whole = 0;
    std::string_view text = stripped(input.str);
    if (base == 16 && (text.starts_with("0x") || text.starts_with("0X"))) text.remove_prefix(2);
    if (base == 8 && (text.starts_with("0o") || text.starts_with("0O"))) text.remove_prefix(2);
    if (base == 2 && (text.starts_with("0b") || text.starts_with("0B"))) text.remove_prefix(2);
    if (base >= 2 && base <= 36 && read_integer(text, int(base), whole)) return Value::of(whole);
    if (!read_real(stripped(input.str), real)) return fallback;
  } else if (input.is(Kind::kFloat)) {
    real = input.real;
  } else {
    return fallback;
  }
  if (!std::isfinite(real)) return fallback;
  if (!(std::fabs(real) < 9.2e18)) return value_error("int: the number is beyond 64 bits");
  return Value::of(int64_t(real));
}

Result<Value> float_filter(Interpreter&, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("float", arguments, {"default"}));
  if (input.undefined()) return undefined_error(input);
  if (input.numeric()) return Value::of(input.as_real());
  double real = 0;
  if (input.string() && read_real(stripped(input.str), real)) return Value::of(real);
  return p.has(0) ? p[0] : Value::of(0.0);
}

Result<Value> abs_filter(Interpreter&, const Value& input, const Arguments& arguments) {
  LONGKV_TRY(Parameters::match("abs", arguments, {}).status());
  if (input.is(Kind::kFloat)) return Value::of(std::fabs(input.real));
  if (input.integral()) return input.as_int() < 0 ? negative(input) : Result<Value>(Value::of(input.as_int()));
  if (input.undefined()) return undefined_error(input);
  return value_error(fmt::format("bad operand type for abs(): '{}'", type_name(input)));
}

Result<Value> round_filter(Interpreter&, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("round", arguments, {"precision", "method"}));
  LONGKV_ASSIGN(const int64_t precision, p.integer(0, 0));
  static const Str kCommon{"common", Origin::kTemplate, {}, -1};
  LONGKV_ASSIGN(const Str* method, p.text(1, &kCommon));
  if (input.undefined()) return undefined_error(input);
  if (!input.numeric()) return value_error(fmt::format("round takes a number, not {}", type_name(input)));
  if (precision < -300 || precision > 300) return value_error("round: the precision is out of range");
  const double scale = std::pow(10.0, double(precision));
  if (method->text == "ceil") return Value::of(std::ceil(input.as_real() * scale) / scale);
  if (method->text == "floor") return Value::of(std::floor(input.as_real() * scale) / scale);
  if (method->text != "common") return value_error("method must be common, ceil or floor");
  if (input.integral() && precision >= 0) return Value::of(input.as_int());
  if (!std::isfinite(input.as_real())) return input;
  if (precision < 0) {
    const double rounded = std::nearbyint(input.as_real() * scale) / scale;
    return input.integral() ? Value::of(int64_t(rounded)) : Value::of(rounded);
  }
  double rounded = 0;
  LONGKV_TRY(Status(read_real(fmt::format("{:.{}f}", input.real, precision), rounded)
                        ? Status()
                        : value_error("round: the number is out of range")));
  return Value::of(rounded);
}

Result<Value> attr_filter(Interpreter& in, const Value& input, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("attr", arguments, {"name"}, 1));
  LONGKV_ASSIGN(const Str* name, p.text(0, nullptr));
  // Attributes only: the keys of a dict are none.
  std::string_view canonical;
  if (input.is(Kind::kDict) && method_kind(input, name->text, canonical) == MethodKind::kNone) {
    return in.heap().undefined(fmt::format("'dict object' has no attribute '{}'", name->text));
  }
  return in.attribute(input, name->text);
}

}  // namespace

std::span<const NamedFilter> value_filters() {
  static constexpr NamedFilter kFilters[] = {
      {"tojson", tojson_filter}, {"default", default_filter}, {"d", default_filter},   {"int", int_filter},
      {"float", float_filter},   {"abs", abs_filter},         {"round", round_filter}, {"attr", attr_filter},
  };
  return kFilters;
}

}  // namespace longkv::jinja
