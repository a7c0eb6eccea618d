#include "chat/jinja/tests.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "chat/jinja/filters.h"
#include "chat/jinja/text.h"

namespace longkv::jinja {

namespace {

struct NamedTest {
  std::string_view name;
  TestFunction function;
};

using In = Interpreter;

template <bool (*holds)(const Value&)>
Result<bool> plain(In&, const Value& v, const Arguments& arguments) {
  LONGKV_TRY(Parameters::match("test", arguments, {}).status());
  return holds(v);
}

bool is_defined(const Value& v) { return !v.undefined(); }
bool is_undefined(const Value& v) { return v.undefined(); }
bool is_none(const Value& v) { return v.is(Kind::kNone); }
bool is_boolean(const Value& v) { return v.is(Kind::kBool); }
bool is_true(const Value& v) { return v.is(Kind::kBool) && v.boolean; }
bool is_false(const Value& v) { return v.is(Kind::kBool) && !v.boolean; }
bool is_integer(const Value& v) { return v.is(Kind::kInt) || v.is(Kind::kBig); }
bool is_float(const Value& v) { return v.is(Kind::kFloat); }
bool is_number(const Value& v) { return v.numeric() || v.is(Kind::kBig); }
bool is_string(const Value& v) { return v.string(); }
bool is_mapping(const Value& v) { return v.is(Kind::kDict); }
bool is_sequence(const Value& v) { return v.string() || v.sequence() || v.is(Kind::kDict) || v.undefined(); }
bool is_iterable(const Value& v) {
  return v.string() || v.holds_items() || v.is(Kind::kDict) || v.undefined() || v.is(Kind::kLoop);
}
bool is_callable(const Value& v) {
  return v.is(Kind::kMacro) || v.is(Kind::kFunction) || v.is(Kind::kMethod) || v.is(Kind::kJoiner) ||
         v.is(Kind::kLoop) || v.undefined();
}
bool is_escaped(const Value&) { return false; }

template <Compare op>
Result<bool> compared(In&, const Value& v, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("comparison", arguments, {"other"}, 1));
  return compare(op, v, p[0]);
}

Result<bool> same_as(In&, const Value& v, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("sameas", arguments, {"other"}, 1));
  const Value& other = p[0];
  if (v.kind != other.kind) return false;
  if (v.string()) return v.str == other.str || v.str->text == other.str->text;
  if (v.is(Kind::kFloat)) return v.real == other.real;
  if (v.is(Kind::kBool)) return v.boolean == other.boolean;
  return v.none_or_undefined() || v.raw == other.raw;
}

Result<int64_t> whole_number(const Value& v) {
  if (v.integral()) return v.as_int();
  if (v.undefined()) return undefined_error(v);
  return value_error(fmt::format("an integer was expected, not {}", type_name(v)));
}

template <bool odd>
Result<bool> parity(In&, const Value& v, const Arguments& arguments) {
  LONGKV_TRY(Parameters::match("odd or even", arguments, {}).status());
  LONGKV_ASSIGN(const int64_t n, whole_number(v));
  return (n % 2 != 0) == odd;
}

Result<bool> divisible_by(In&, const Value& v, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("divisibleby", arguments, {"num"}, 1));
  LONGKV_ASSIGN(const int64_t n, whole_number(v));
  LONGKV_ASSIGN(const int64_t by, whole_number(p[0]));
  if (by == 0) return value_error("integer modulo by zero");
  return by == -1 || n % by == 0;
}

template <CaseChange change>
Result<bool> has_case(In& in, const Value& v, const Arguments& arguments) {
  LONGKV_TRY(Parameters::match("lower or upper", arguments, {}).status());
  LONGKV_ASSIGN(const Str* s, in.text(v));
  const CaseChange other = change == CaseChange::kUpper ? CaseChange::kLower : CaseChange::kUpper;
  return change_case(in.heap(), s, change)->text == s->text && change_case(in.heap(), s, other)->text != s->text;
}

Result<bool> names_filter(In& in, const Value& v, const Arguments& arguments) {
  LONGKV_TRY(Parameters::match("filter", arguments, {}).status());
  LONGKV_ASSIGN(const Str* s, in.text(v));
  return known_filter(s->text);
}

Result<bool> names_test(In& in, const Value& v, const Arguments& arguments) {
  LONGKV_TRY(Parameters::match("test", arguments, {}).status());
  LONGKV_ASSIGN(const Str* s, in.text(v));
  return known_test(s->text);
}

constexpr NamedTest kTests[] = {
    {"defined", plain<is_defined>},
    {"undefined", plain<is_undefined>},
    {"none", plain<is_none>},
    {"boolean", plain<is_boolean>},
    {"true", plain<is_true>},
    {"false", plain<is_false>},
    {"integer", plain<is_integer>},
    {"float", plain<is_float>},
    {"number", plain<is_number>},
    {"string", plain<is_string>},
    {"mapping", plain<is_mapping>},
    {"sequence", plain<is_sequence>},
    {"iterable", plain<is_iterable>},
    {"callable", plain<is_callable>},
    {"escaped", plain<is_escaped>},
    {"odd", parity<true>},
    {"even", parity<false>},
    {"divisibleby", divisible_by},
    {"lower", has_case<CaseChange::kLower>},
    {"upper", has_case<CaseChange::kUpper>},
    {"sameas", same_as},
    {"filter", names_filter},
    {"test", names_test},
    {"in", compared<Compare::kIn>},
    {"eq", compared<Compare::kEqual>},
    {"equalto", compared<Compare::kEqual>},
    {"==", compared<Compare::kEqual>},
    {"ne", compared<Compare::kNotEqual>},
    {"!=", compared<Compare::kNotEqual>},
    {"lt", compared<Compare::kLess>},
    {"lessthan", compared<Compare::kLess>},
    {"<", compared<Compare::kLess>},
    {"le", compared<Compare::kLessEqual>},
    {"<=", compared<Compare::kLessEqual>},
    {"gt", compared<Compare::kGreater>},
    {"greaterthan", compared<Compare::kGreater>},
    {">", compared<Compare::kGreater>},
    {"ge", compared<Compare::kGreaterEqual>},
    {">=", compared<Compare::kGreaterEqual>},
};

}  // namespace

TestFunction find_test(std::string_view name) {
  const auto* found =
      std::find_if(std::begin(kTests), std::end(kTests), [&](const NamedTest& t) { return t.name == name; });
  return found == std::end(kTests) ? nullptr : found->function;
}

bool known_test(std::string_view name) { return find_test(name) != nullptr; }

}  // namespace longkv::jinja
