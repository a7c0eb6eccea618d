#include "chat/jinja/operators.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "chat/jinja/text.h"
#include "tokenizer/unicode.h"

namespace longkv::jinja {

namespace {

constexpr size_t kMaxRepeatedBytes = size_t{64} << 20;
constexpr size_t kMaxItems = size_t{1} << 22;

// Comparisons of one pair of values. Values may share parts, so their number is bounded as well as their depth.
class Comparer {
 public:
  Result<bool> equal(const Value& a, const Value& b, int depth) {
    LONGKV_TRY(visit(depth));
    if (a.string() && b.string()) return a.str->text == b.str->text;
    if (a.numeric() && b.numeric()) {
      return a.integral() && b.integral() ? a.as_int() == b.as_int() : a.as_real() == b.as_real();
    }
    if (a.kind != b.kind) return false;
    switch (a.kind) {
      case Kind::kUndefined:
      case Kind::kNone: return true;
      case Kind::kBig: return a.big == b.big;
      case Kind::kList:
      case Kind::kTuple:
      case Kind::kView: return equal_items(a.list->items, b.list->items, depth);
      case Kind::kDict: return equal_dicts(*a.dict, *b.dict, depth);
      case Kind::kMethod: return a.bound->name == b.bound->name && a.bound->object.raw == b.bound->object.raw;
      default: return a.raw == b.raw;
    }
  }

  Result<int> order(const Value& a, const Value& b, int depth) {
    LONGKV_TRY(visit(depth));
    if (a.string() && b.string()) {
      const int c = a.str->text.compare(b.str->text);
      return c < 0 ? -1 : c > 0 ? 1 : 0;
    }
    if (a.numeric() && b.numeric()) {
      if (a.integral() && b.integral()) return a.as_int() < b.as_int() ? -1 : a.as_int() > b.as_int() ? 1 : 0;
      return a.as_real() < b.as_real() ? -1 : a.as_real() > b.as_real() ? 1 : 0;
    }
    if (a.kind == b.kind && a.sequence()) {
      const auto& x = a.list->items;
      const auto& y = b.list->items;
      for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
        LONGKV_ASSIGN(const bool same, equal(x[i], y[i], depth + 1));
        if (!same) return order(x[i], y[i], depth + 1);
      }
      return x.size() < y.size() ? -1 : x.size() > y.size() ? 1 : 0;
    }
    if (a.undefined()) return undefined_error(a);
    if (b.undefined()) return undefined_error(b);
    return value_error(fmt::format("'<' not supported between instances of '{}' and '{}'", type_name(a), type_name(b)));
  }

 private:
  Status visit(int depth) {
    if (depth > kMaxValueDepth) {
      return value_error(fmt::format("a value is nested more than {} levels deep", kMaxValueDepth));
    }
    return --budget_ > 0 ? Status() : value_error("the values compared are too large");
  }

  Result<bool> equal_items(const std::vector<Value>& a, const std::vector<Value>& b, int depth) {
    if (&a == &b) return true;
    if (a.size() != b.size()) return false;
    for (size_t i = 0; i < a.size(); ++i) {
      LONGKV_ASSIGN(const bool same, equal(a[i], b[i], depth + 1));
      if (!same) return false;
    }
    return true;
  }

  Result<bool> equal_dicts(Dict& a, Dict& b, int depth) {
    if (&a == &b) return true;
    if (a.items.size() != b.items.size()) return false;
    for (const auto& [key, value] : a.items) {
      const Value* other = b.find(key);
      if (other == nullptr) return false;
      LONGKV_ASSIGN(const bool same, equal(value, *other, depth + 1));
      if (!same) return false;
    }
    return true;
  }

  int64_t budget_ = 10'000'000;
};

const char* symbol(NodeKind op) {
  switch (op) {
    case NodeKind::kAdd: return "+";
    case NodeKind::kSubtract: return "-";
    case NodeKind::kMultiply: return "*";
    case NodeKind::kDivide: return "/";
    case NodeKind::kFloorDivide: return "//";
    case NodeKind::kModulo: return "%";
    default: return "** or pow()";
  }
}

Status out_of_range() { return value_error("an integer is beyond 64 bits"); }

int64_t floor_divide(int64_t a, int64_t b) { return a / b - ((a % b != 0 && (a % b < 0) != (b < 0)) ? 1 : 0); }

Result<Value> integer_power(int64_t base, int64_t exponent) {
  if (exponent < 0) {
    if (base == 0) return value_error("0.0 cannot be raised to a negative power");
    return Value::of(std::pow(double(base), double(exponent)));
  }
  int64_t result = 1;
  if (base == 0 || base == 1 || base == -1) {
    return Value::of(exponent == 0 ? int64_t{1} : base == -1 && exponent % 2 == 0 ? int64_t{1} : base);
  }
  for (int64_t i = 0; i < exponent; ++i) {
    if (__builtin_mul_overflow(result, base, &result)) return out_of_range();
  }
  return Value::of(result);
}

Result<Value> integer_arithmetic(NodeKind op, int64_t a, int64_t b) {
  int64_t result = 0;
  bool overflow = false;
  switch (op) {
    case NodeKind::kAdd: overflow = __builtin_add_overflow(a, b, &result); break;
    case NodeKind::kSubtract: overflow = __builtin_sub_overflow(a, b, &result); break;
    case NodeKind::kMultiply: overflow = __builtin_mul_overflow(a, b, &result); break;
    case NodeKind::kPower: return integer_power(a, b);
    default:
      if (b == 0)
        return value_error(op == NodeKind::kDivide ? "division by zero" : "integer division or modulo by zero");
      if (op == NodeKind::kDivide) return Value::of(double(a) / double(b));
      overflow = a == INT64_MIN && b == -1;
      if (!overflow) result = op == NodeKind::kModulo ? a - floor_divide(a, b) * b : floor_divide(a, b);
  }
  if (overflow) return out_of_range();
  return Value::of(result);
}

Result<Value> real_arithmetic(NodeKind op, double a, double b) {
  switch (op) {
    case NodeKind::kAdd: return Value::of(a + b);
    case NodeKind::kSubtract: return Value::of(a - b);
    case NodeKind::kMultiply: return Value::of(a * b);
    case NodeKind::kPower:
      if (a == 0 && b < 0) return value_error("0.0 cannot be raised to a negative power");
      if (a < 0 && b != std::floor(b)) return value_error("a power is a complex number");
      return Value::of(std::pow(a, b));
    default: break;
  }
  if (b == 0) return value_error("float division by zero");
  if (op == NodeKind::kDivide) return Value::of(a / b);
  double mod = std::fmod(a, b);
  if (mod != 0 && (b < 0) != (mod < 0)) mod += b;
  if (op == NodeKind::kModulo) return Value::of(mod == 0 ? std::copysign(0.0, b) : mod);
  const double quotient = (a - mod) / b;
  const double whole = std::floor(quotient);
  return Value::of(quotient - whole > 0.5 ? whole + 1 : whole);
}

Result<Value> repeat(Heap& heap, const Value& v, int64_t times) {
  times = std::max<int64_t>(times, 0);
  const size_t unit = v.string() ? v.str->text.size() : v.list->items.size();
  const size_t limit = v.string() ? kMaxRepeatedBytes : kMaxItems;
  if (unit > 0 && uint64_t(times) > limit / unit) return value_error("the result of a repetition is too large");
  if (v.string()) {
    TextBuilder out;
    out.reserve(unit * size_t(times));
    for (int64_t i = 0; unit > 0 && i < times; ++i) out.add(v.str);
    return Value::of(out.finish(heap));
  }
  List* list = heap.list();
  for (int64_t i = 0; unit > 0 && i < times; ++i) {
    list->items.insert(list->items.end(), v.list->items.begin(), v.list->items.end());
  }
  heap.charge(list->items.size() * sizeof(Value));
  return Value::of(v.kind, list);
}

}  // namespace

Status value_error(std::string_view reason) { return Status(Code::kInvalidArgument, std::string(reason)); }

Status undefined_error(const Value& v) {
  return value_error(v.reason != nullptr ? *v.reason : std::string("a value is undefined"));
}

Result<bool> equal(const Value& a, const Value& b, int depth) { return Comparer().equal(a, b, depth); }

bool equal_keys(const Value& a, const Value& b) {
  const Result<bool> same = Comparer().equal(a, b, 0);
  return same.ok() && *same;
}

Result<int> order(const Value& a, const Value& b, int depth) { return Comparer().order(a, b, depth); }

Result<bool> compare(Compare op, const Value& a, const Value& b) {
  switch (op) {
    case Compare::kEqual: return equal(a, b);
    case Compare::kNotEqual: {
      LONGKV_ASSIGN(const bool same, equal(a, b));
      return !same;
    }
    case Compare::kIn: return contains(b, a);
    case Compare::kNotIn: {
      LONGKV_ASSIGN(const bool in, contains(b, a));
      return !in;
    }
    default: break;
  }
  if (a.numeric() && b.numeric() && (std::isnan(a.as_real()) || std::isnan(b.as_real()))) return false;
  LONGKV_ASSIGN(const int c, order(a, b));
  switch (op) {
    case Compare::kLess: return c < 0;
    case Compare::kLessEqual: return c <= 0;
    case Compare::kGreater: return c > 0;
    default: return c >= 0;
  }
}

Result<bool> contains(const Value& container, const Value& item) {
  switch (container.kind) {
    case Kind::kStr:
      if (!item.string()) {
        if (item.undefined()) return undefined_error(item);
        return value_error(fmt::format("'in <string>' requires string as left operand, not {}", type_name(item)));
      }
      return container.str->text.find(item.str->text) != std::string_view::npos;
    case Kind::kDict:
      if (!hashable(item)) return value_error(fmt::format("unhashable type: '{}'", type_name(item)));
      return container.dict->find(item) != nullptr;
    case Kind::kUndefined: return false;
    default: break;
  }
  if (!container.holds_items()) {
    return value_error(fmt::format("argument of type '{}' is not iterable", type_name(container)));
  }
  List& list = *container.list;
  const bool once = container.is(Kind::kGenerator);
  for (size_t i = once ? list.consumed : 0; i < list.items.size(); ++i) {
    if (once) list.consumed = i + 1;
    LONGKV_ASSIGN(const bool same, equal(list.items[i], item));
    if (same) return true;
  }
  return false;
}

Result<Value> arithmetic(Heap& heap, NodeKind op, const Value& a, const Value& b) {
  if (a.integral() && b.integral()) return integer_arithmetic(op, a.as_int(), b.as_int());
  if (a.numeric() && b.numeric()) return real_arithmetic(op, a.as_real(), b.as_real());
  if (a.undefined()) return undefined_error(a);
  if (op == NodeKind::kModulo && a.string()) return format_percent(heap, a.str, b);
  if (b.undefined()) return undefined_error(b);
  if (op == NodeKind::kAdd) {
    if (a.string() && b.string()) {
      TextBuilder out;
      out.reserve(a.str->text.size() + b.str->text.size());
      out.add(a.str);
      out.add(b.str);
      return Value::of(out.finish(heap));
    }
    if (a.sequence() && a.kind == b.kind) {
      List* list = heap.list();
      if (a.list->items.size() + b.list->items.size() > kMaxItems) return value_error("a list is too long");
      list->items = a.list->items;
      list->items.insert(list->items.end(), b.list->items.begin(), b.list->items.end());
      heap.charge(list->items.size() * sizeof(Value));
      return Value::of(a.kind, list);
    }
    if (a.string()) return value_error(fmt::format("can only concatenate str (not \"{}\") to str", type_name(b)));
    if (a.is(Kind::kList)) {
      return value_error(fmt::format("can only concatenate list (not \"{}\") to list", type_name(b)));
    }
  }
  if (op == NodeKind::kMultiply) {
    if ((a.string() || a.sequence()) && b.integral()) return repeat(heap, a, b.as_int());
    if ((b.string() || b.sequence()) && a.integral()) return repeat(heap, b, a.as_int());
  }
  return value_error(
      fmt::format("unsupported operand type(s) for {}: '{}' and '{}'", symbol(op), type_name(a), type_name(b)));
}

Result<Value> negative(const Value& v) {
  if (v.is(Kind::kFloat)) return Value::of(-v.real);
  if (v.integral()) return v.as_int() == INT64_MIN ? Result<Value>(out_of_range()) : Value::of(-v.as_int());
  if (v.undefined()) return undefined_error(v);
  return value_error(fmt::format("bad operand type for unary -: '{}'", type_name(v)));
}

Result<std::vector<Value>> items_of(Heap& heap, const Value& v) {
  switch (v.kind) {
    case Kind::kUndefined: return std::vector<Value>();
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kView: heap.charge(v.list->items.size() * sizeof(Value)); return v.list->items;
    case Kind::kGenerator: {
      List& list = *v.list;
      std::vector<Value> rest(list.items.begin() + ptrdiff_t(list.consumed), list.items.end());
      list.consumed = list.items.size();
      heap.charge(rest.size() * sizeof(Value));
      return rest;
    }
    case Kind::kDict: {
      std::vector<Value> keys;
      for (const auto& [key, value] : v.dict->items) keys.push_back(key);
      heap.charge(keys.size() * sizeof(Value));
      return keys;
    }
    case Kind::kStr: {
      std::vector<Value> chars;
      for (size_t i = 0; i < v.str->text.size();) {
        const size_t length = decode_utf8(v.str->text.data() + i, v.str->text.size() - i).length;
        chars.push_back(Value::of(heap.part(v.str, i, i + length)));
        i += length;
        if (chars.size() > kMaxItems) return value_error("the text is too long to take its characters one by one");
      }
      heap.charge(chars.size() * sizeof(Value));
      return chars;
    }
    default: return value_error(fmt::format("'{}' object is not iterable", type_name(v)));
  }
}

Result<int64_t> length_of(const Value& v) {
  switch (v.kind) {
    case Kind::kUndefined: return int64_t{0};
    case Kind::kStr: return v.str->length();
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kView: return int64_t(v.list->items.size());
    case Kind::kDict: return int64_t(v.dict->items.size());
    case Kind::kLoop: return int64_t(v.loop->items->size());
    default: return value_error(fmt::format("object of type '{}' has no len()", type_name(v)));
  }
}

Result<const Str*> text_of(Heap& heap, const Value& v) {
  if (v.string()) return v.str;
  TextBuilder out;
  LONGKV_TRY(append_text(out, v));
  return out.finish(heap);
}

}  // namespace longkv::jinja
