// The interpreter's half for expressions.
#include <algorithm>

#include "base/error.h"
#include "chat/jinja/filters.h"
#include "chat/jinja/interpreter.h"
#include "chat/jinja/methods.h"
#include "chat/jinja/tests.h"
#include "chat/jinja/text.h"
#include "tokenizer/unicode.h"

namespace longkv::jinja {

namespace {

std::string object_name(const Value& v) {
  if (v.is(Kind::kNone)) return "None";
  return std::string(type_name(v)) + " object";
}

// Where a slice begins, ends and steps, as Python clips them to a sequence of n items.
struct Range {
  int64_t start, stop, step;
};

Result<int64_t> slice_index(const Value& v, int64_t fallback) {
  if (v.is(Kind::kNone)) return fallback;
  if (v.integral()) return v.as_int();
  if (v.undefined()) return undefined_error(v);
  return value_error("slice indices must be integers or None or have an __index__ method");
}

}  // namespace

Value Interpreter::lookup(uint32_t id) {
  for (Scope* s = scope_; s != nullptr; s = s->parent) {
    for (auto& [n, v] : s->names) {
      if (n == id) return v;
    }
  }
  if (undefined_[id].reason == nullptr) undefined_[id] = heap_.undefined(fmt::format("'{}' is undefined", name(id)));
  return undefined_[id];
}

Result<Value> Interpreter::evaluate(uint32_t id) {
  const Deeper deeper(*this);
  if (depth_ > limits_.depth) {
    return value_error(fmt::format("more than {} evaluations inside one another", limits_.depth));
  }
  LONGKV_TRY(tick());
  return evaluate_node(node(id));
}

Result<Value> Interpreter::evaluate_node(const Node& n) {
  switch (n.kind) {
    case NodeKind::kNone: return Value::none();
    case NodeKind::kTrue: return Value::of(true);
    case NodeKind::kFalse: return Value::of(false);
    case NodeKind::kInteger: return Value::of(n.integer);
    case NodeKind::kReal: return Value::of(n.real);
    case NodeKind::kText: {
      const Str*& s = literals_[n.name];
      if (s == nullptr) s = heap_.borrow(name(n.name), Origin::kTemplate);
      return Value::of(s);
    }
    case NodeKind::kName: return lookup(n.name);
    case NodeKind::kList: return evaluate_list(n, Kind::kList);
    case NodeKind::kTuple: return evaluate_list(n, Kind::kTuple);
    case NodeKind::kDict: return evaluate_dict(n);
    case NodeKind::kConcat: return evaluate_concat(n);
    case NodeKind::kCompare: return evaluate_compare(n);
    case NodeKind::kSubscript: return evaluate_subscript(n);
    case NodeKind::kFilter: return evaluate_filter(n);
    case NodeKind::kAnd:
    case NodeKind::kOr: {
      Value v;
      for (uint32_t i = 0; i < n.count; ++i) {
        LONGKV_ASSIGN(v, evaluate(child(n, i)));
        if (truthy(v) == (n.kind == NodeKind::kOr)) break;
      }
      return v;
    }
    case NodeKind::kNot: {
      LONGKV_ASSIGN(const Value v, evaluate(n.a));
      return Value::of(!truthy(v));
    }
    case NodeKind::kNegative: {
      LONGKV_ASSIGN(const Value v, evaluate(n.a));
      return negative(v);
    }
    case NodeKind::kPositive: {
      LONGKV_ASSIGN(const Value v, evaluate(n.a));
      if (v.numeric()) return v.is(Kind::kFloat) ? v : Value::of(v.as_int());
      if (v.undefined()) return undefined_error(v);
      return value_error(fmt::format("bad operand type for unary +: '{}'", type_name(v)));
    }
    case NodeKind::kCondition: {
      LONGKV_ASSIGN(const Value test, evaluate(n.b));
      if (truthy(test)) return evaluate(n.a);
      if (n.c != kNoNode) return evaluate(n.c);
      return heap_.undefined("the inline if-expression evaluated to false and no else section was defined.");
    }
    case NodeKind::kAttribute: {
      LONGKV_ASSIGN(const Value object, evaluate(n.a));
      return attribute(object, name(n.name));
    }
    case NodeKind::kCall: {
      LONGKV_ASSIGN(const Value callee, evaluate(n.a));
      Arguments arguments;
      LONGKV_TRY(arguments_of(program_.calls[n.extra], arguments));
      return call(callee, arguments);
    }
    case NodeKind::kTest: {
      LONGKV_ASSIGN(const Value input, evaluate(n.a));
      Arguments arguments;
      LONGKV_TRY(arguments_of(program_.calls[n.extra], arguments));
      LONGKV_ASSIGN(const bool result, test(name(n.name), input, arguments));
      return Value::of(result);
    }
    case NodeKind::kAdd:
    case NodeKind::kSubtract:
    case NodeKind::kMultiply:
    case NodeKind::kDivide:
    case NodeKind::kFloorDivide:
    case NodeKind::kModulo:
    case NodeKind::kPower: {
      LONGKV_ASSIGN(const Value a, evaluate(n.a));
      LONGKV_ASSIGN(const Value b, evaluate(n.b));
      const uint64_t before = heap_.bytes();
      LONGKV_ASSIGN(const Value v, arithmetic(heap_, n.kind, a, b));
      LONGKV_TRY(tick_bytes(heap_.bytes() - before));
      return v;
    }
    default: return value_error("a slice stands outside of a subscript");
  }
}

Result<Value> Interpreter::evaluate_list(const Node& n, Kind kind) {
  std::vector<Value> items;
  items.reserve(n.count);
  for (uint32_t i = 0; i < n.count; ++i) {
    LONGKV_ASSIGN(const Value v, evaluate(child(n, i)));
    items.push_back(v);
  }
  return list(std::move(items), kind);
}

Result<Value> Interpreter::evaluate_dict(const Node& n) {
  Dict* dict = heap_.dict();
  for (uint32_t i = 0; i + 1 < n.count; i += 2) {
    LONGKV_ASSIGN(const Value key, evaluate(child(n, i)));
    LONGKV_ASSIGN(const Value value, evaluate(child(n, i + 1)));
    if (!hashable(key)) return value_error(fmt::format("unhashable type: '{}'", type_name(key)));
    dict->set(key, value);
  }
  heap_.charge(dict->items.size() * 2 * sizeof(Value));
  return Value::of(Kind::kDict, dict);
}

Result<Value> Interpreter::evaluate_compare(const Node& n) {
  LONGKV_ASSIGN(Value left, evaluate(n.a));
  for (uint32_t i = 0; i < n.count; ++i) {
    LONGKV_ASSIGN(const Value right, evaluate(child(n, i)));
    if (right.holds_items()) LONGKV_TRY(tick_items(right.list->items.size()));
    if (right.string()) LONGKV_TRY(tick_bytes(right.str->text.size()));
    LONGKV_ASSIGN(const bool holds, compare(program_.operators[n.extra + i], left, right));
    if (!holds) return Value::of(false);
    left = right;
  }
  return Value::of(true);
}

Result<Value> Interpreter::evaluate_concat(const Node& n) {
  TextBuilder out;
  for (uint32_t i = 0; i < n.count; ++i) {
    LONGKV_ASSIGN(const Value v, evaluate(child(n, i)));
    LONGKV_TRY(append_text(out, v));
  }
  LONGKV_TRY(tick_bytes(out.size()));
  return make(out);
}

Result<Value> Interpreter::evaluate_subscript(const Node& n) {
  LONGKV_ASSIGN(const Value object, evaluate(n.a));
  if (node(n.b).kind == NodeKind::kSlice) return slice(object, node(n.b));
  LONGKV_ASSIGN(const Value key, evaluate(n.b));
  return item(object, key);
}

Result<Value> Interpreter::slice(const Value& object, const Node& n) {
  Value parts[3] = {Value::none(), Value::none(), Value::none()};
  const uint32_t ids[3] = {n.a, n.b, n.c};
  for (int i = 0; i < 3; ++i) {
    if (ids[i] == kNoNode) continue;
    LONGKV_ASSIGN(parts[i], evaluate(ids[i]));
  }
  if (object.undefined()) return undefined_error(object);
  if (!object.string() && !object.sequence()) {
    return heap_.undefined(fmt::format("{} cannot be sliced", object_name(object)));
  }
  const int64_t size = object.string() ? object.str->length() : int64_t(object.list->items.size());
  LONGKV_ASSIGN(const int64_t step, slice_index(parts[2], 1));
  if (step == 0) return value_error("slice step cannot be zero");
  const bool down = step < 0;
  LONGKV_ASSIGN(int64_t start, slice_index(parts[0], down ? size - 1 : 0));
  LONGKV_ASSIGN(int64_t stop, slice_index(parts[1], down ? -size - 1 : size));
  const auto clip = [&](int64_t i) {
    if (i < 0) i = i < -size ? -1 : i + size;
    return down ? std::clamp<int64_t>(i, -1, size - 1) : std::clamp<int64_t>(i, 0, size);
  };
  start = clip(start);
  stop = clip(stop);
  if (object.string()) LONGKV_TRY(tick_bytes(object.str->text.size()));
  if (object.string() && step == 1) {
    if (stop <= start) return literal("");
    const size_t begin = byte_of(object.str, start);
    return Value::of(heap_.part(object.str, begin, byte_of(object.str, stop)));
  }
  std::vector<Value> source;
  if (object.string()) {
    LONGKV_ASSIGN(source, items_of(heap_, object));
  }
  const std::vector<Value>& from = object.string() ? source : object.list->items;
  std::vector<Value> picked;
  for (int64_t i = start; down ? i > stop : i < stop;) {
    picked.push_back(from[size_t(i)]);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  LONGKV_TRY(tick_items(picked.size()));
  if (!object.string()) return list(std::move(picked), object.kind);
  TextBuilder out;
  for (const Value& c : picked) out.add(c.str);
  return make(out);
}

Result<Value> Interpreter::item(const Value& object, const Value& key) {
  if (object.undefined()) return undefined_error(object);
  if (object.is(Kind::kDict)) {
    if (const Value* found = object.dict->find(key)) return *found;
  }
  if (key.integral() && (object.string() || object.sequence())) {
    const int64_t size = object.string() ? object.str->length() : int64_t(object.list->items.size());
    int64_t i = key.as_int();
    if (i < 0) i += size;
    if (i >= 0 && i < size) {
      if (!object.string()) return object.list->items[size_t(i)];
      const size_t begin = byte_of(object.str, i);
      const size_t end = begin + decode_utf8(object.str->text.data() + begin, object.str->text.size() - begin).length;
      return Value::of(heap_.part(object.str, begin, end));
    }
  }
  if (key.string()) return attribute(object, key.str->text);
  TextBuilder repr;
  LONGKV_TRY(append_repr(repr, key));
  return heap_.undefined(fmt::format("{} has no element {}", object_name(object), repr.text()));
}

Result<Value> Interpreter::attribute(const Value& object, std::string_view name) {
  switch (object.kind) {
    case Kind::kUndefined: return undefined_error(object);
    case Kind::kLoop:
    case Kind::kCycler: return loop_attribute(object, name);
    case Kind::kNamespace:
      if (const Value* found = object.dict->find(name)) return *found;
      break;
    case Kind::kStr:
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kDict: {
      std::string_view canonical;
      const MethodKind kind = method_kind(object, name, canonical);
      if (kind == MethodKind::kCallable) return heap_.method(object, canonical);
      if (kind == MethodKind::kForbidden) {
        return value_error(fmt::format("access to attribute '{}' of '{}' object is unsafe.", name, type_name(object)));
      }
      if (object.is(Kind::kDict)) {
        if (const Value* found = object.dict->find(name)) return *found;
      }
      break;
    }
    default: break;
  }
  return heap_.undefined(fmt::format("'{}' has no attribute '{}'", object_name(object), name));
}

Status Interpreter::arguments_of(const CallArguments& call, Arguments& out) {
  for (const uint32_t id : call.positional) {
    LONGKV_ASSIGN(const Value v, evaluate(id));
    out.positional.push_back(v);
  }
  for (const auto& [id, value] : call.named) {
    LONGKV_ASSIGN(const Value v, evaluate(value));
    out.named.emplace_back(name(id), v);
  }
  if (call.list != kNoNode) {
    LONGKV_ASSIGN(const Value v, evaluate(call.list));
    LONGKV_ASSIGN(const std::vector<Value> items, items_of(heap_, v));
    LONGKV_TRY(tick_items(items.size()));
    out.positional.insert(out.positional.end(), items.begin(), items.end());
  }
  if (call.dict != kNoNode) {
    LONGKV_ASSIGN(const Value v, evaluate(call.dict));
    if (!v.is(Kind::kDict)) return value_error("argument after ** must be a mapping");
    for (const auto& [key, value] : v.dict->items) {
      if (!key.string()) return value_error("keywords must be strings");
      out.named.emplace_back(key.str->text, value);
      if (key.str->origin != Origin::kTemplate) out.names = Origin::kUser;
    }
    LONGKV_TRY(tick_items(v.dict->items.size()));
  }
  return {};
}

Result<Value> Interpreter::evaluate_filter(const Node& n) {
  Value input = block_text_;
  if (n.a != kNoNode) {
    LONGKV_ASSIGN(input, evaluate(n.a));
  }
  Arguments arguments;
  LONGKV_TRY(arguments_of(program_.calls[n.extra], arguments));
  return filter(name(n.name), input, arguments);
}

Result<Value> Interpreter::filter(std::string_view name, const Value& input, const Arguments& arguments) {
  const FilterFunction function = find_filter(name);
  if (function == nullptr) return value_error(fmt::format("No filter named '{}' found.", name));
  if (input.string()) LONGKV_TRY(tick_bytes(input.str->text.size()));
  if (input.holds_items()) LONGKV_TRY(tick_items(input.list->items.size()));
  const uint64_t before = heap_.bytes();
  Result<Value> result = function(*this, input, arguments);
  LONGKV_TRY(tick_bytes(heap_.bytes() - before));
  return result;
}

Result<bool> Interpreter::test(std::string_view name, const Value& input, const Arguments& arguments) {
  const TestFunction function = find_test(name);
  if (function == nullptr) return value_error(fmt::format("No test named '{}' found.", name));
  return function(*this, input, arguments);
}

}  // namespace longkv::jinja
