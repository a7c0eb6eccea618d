// The interpreter's half for calls: macros, global functions, methods of `loop`.
#include <algorithm>

#include "base/error.h"
#include "chat/jinja/interpreter.h"
#include "chat/jinja/methods.h"
#include "chat/jinja/text.h"

namespace longkv::jinja {

namespace {

constexpr int64_t kMaxRange = 100'000;  // as the sandbox

Result<Value> make_range(Interpreter& in, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("range", arguments, {"start", "stop", "step"}, 1));
  LONGKV_ASSIGN(int64_t start, p.integer(0, 0));
  LONGKV_ASSIGN(int64_t stop, p.integer(1, 0));
  LONGKV_ASSIGN(const int64_t step, p.integer(2, 1));
  if (!p.has(1)) {
    stop = start;
    start = 0;
  }
  if (step == 0) return value_error("range() arg 3 must not be zero");
  std::vector<Value> items;
  for (int64_t i = start; step > 0 ? i < stop : i > stop;) {
    if (int64_t(items.size()) >= kMaxRange) {
      return value_error(
          fmt::format("Range too big. The sandbox blocks ranges larger than MAX_RANGE ({}).", kMaxRange));
    }
    items.push_back(Value::of(i));
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  LONGKV_TRY(in.tick_items(items.size()));
  return in.list(std::move(items));
}

// dict(...) and namespace(...): a mapping or pairs, then named values.
Result<Value> make_mapping(Interpreter& in, const Arguments& arguments, Kind kind) {
  Dict* dict = in.heap().dict();
  if (arguments.positional.size() > 1) return value_error("dict expected at most 1 argument");
  if (!arguments.positional.empty()) {
    const Value& from = arguments.positional[0];
    if (from.is(Kind::kDict)) {
      for (const auto& [key, value] : from.dict->items) dict->set(key, value);
    } else {
      LONGKV_ASSIGN(const std::vector<Value> pairs, items_of(in.heap(), from));
      for (const Value& pair : pairs) {
        if (!pair.sequence() || pair.list->items.size() != 2 || !hashable(pair.list->items[0])) {
          return value_error("dict() takes a mapping or pairs of a key and a value");
        }
        dict->set(pair.list->items[0], pair.list->items[1]);
      }
    }
  }
  for (const auto& [name, value] : arguments.named) {
    dict->set(Value::of(in.heap().borrow(name, arguments.names)), value);
  }
  LONGKV_TRY(in.tick_items(dict->items.size()));
  in.heap().charge(dict->items.size() * 2 * sizeof(Value));
  if (kind == Kind::kNamespace) {
    for (const auto& [key, value] : dict->items) {
      if (key.string() && key.str->text.starts_with('_')) {
        return value_error(
            fmt::format("Chat templates cannot store underscore-prefixed attributes on a namespace, but "
                        "got '{}'. Please rename the attribute.",
                        key.str->text));
      }
    }
  }
  return Value::of(kind, dict);
}

Result<Value> time_text(Interpreter& in, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("strftime_now", arguments, {"format"}, 1));
  LONGKV_ASSIGN(const Str* format, p.text(0, nullptr));
  if (format->text.size() > 1000) return value_error("the format of strftime_now is longer than 1000 bytes");
  std::tm parts{};
  const std::time_t now = in.now();
  if (localtime_r(&now, &parts) == nullptr) return value_error("the time cannot be expressed as a date");
  if (format->text.empty()) return in.literal("");
  const std::string spelled(format->text);
  std::string text(spelled.size() * 64 + 256, '\0');
  text.resize(std::strftime(text.data(), text.size(), spelled.c_str(), &parts));
  return Value::of(
      in.heap().own(std::move(text), format->origin == Origin::kTemplate ? Origin::kTemplate : Origin::kUser));
}

Result<Value> raise(Interpreter& in, const Arguments& arguments) {
  LONGKV_ASSIGN(const Parameters p, Parameters::match("raise_exception", arguments, {"message"}, 1));
  LONGKV_ASSIGN(const Str* message, in.text(p[0]));
  return value_error(message->text);
}

}  // namespace

Result<Parameters> Parameters::match(std::string_view function, const Arguments& arguments,
                                     std::initializer_list<std::string_view> names, size_t required) {
  Parameters p;
  p.function_ = function;
  p.names_ = names;
  p.values_.resize(names.size());
  p.given_.resize(names.size());
  if (arguments.positional.size() > names.size()) {
    return value_error(fmt::format("{}() takes at most {} argument(s), {} were given", function, names.size(),
                                   arguments.positional.size()));
  }
  for (size_t i = 0; i < arguments.positional.size(); ++i) {
    p.values_[i] = arguments.positional[i];
    p.given_[i] = true;
  }
  for (const auto& [name, value] : arguments.named) {
    const size_t i = size_t(std::find(p.names_.begin(), p.names_.end(), name) - p.names_.begin());
    if (i == p.names_.size()) return value_error(fmt::format("{}() has no parameter '{}'", function, name));
    if (p.given_[i]) return value_error(fmt::format("{}() got two values for '{}'", function, name));
    p.values_[i] = value;
    p.given_[i] = true;
  }
  for (size_t i = 0; i < required; ++i) {
    if (!p.given_[i]) return value_error(fmt::format("{}() needs a value for '{}'", function, p.names_[i]));
  }
  return p;
}

Result<int64_t> Parameters::integer(size_t i, int64_t fallback) const {
  if (!has(i)) return fallback;
  if (values_[i].integral()) return values_[i].as_int();
  if (values_[i].undefined()) return undefined_error(values_[i]);
  return value_error(fmt::format("{}(): '{}' must be an integer, not {}", function_, names_[i], type_name(values_[i])));
}

Result<const Str*> Parameters::text(size_t i, const Str* fallback) const {
  if (!has(i)) return fallback;
  if (values_[i].string()) return values_[i].str;
  if (values_[i].undefined()) return undefined_error(values_[i]);
  return value_error(fmt::format("{}(): '{}' must be str, not {}", function_, names_[i], type_name(values_[i])));
}

Result<Value> Interpreter::call(const Value& callee, const Arguments& arguments) {
  switch (callee.kind) {
    case Kind::kUndefined: return undefined_error(callee);
    case Kind::kMacro: return call_macro(*callee.macro, arguments);
    case Kind::kFunction: return call_function(callee.function, arguments);
    case Kind::kJoiner: {
      LONGKV_TRY(Parameters::match("joiner", arguments, {}).status());
      List& state = *callee.list;
      return state.consumed++ == 0 ? literal("") : state.items[0];
    }
    case Kind::kMethod: {
      const Bound& bound = *callee.bound;
      if (bound.object.is(Kind::kLoop) || bound.object.is(Kind::kCycler)) return call_loop_method(bound, arguments);
      const uint64_t before = heap_.bytes();
      if (bound.object.string()) LONGKV_TRY(tick_bytes(bound.object.str->text.size()));
      Result<Value> result = call_method(*this, bound.object, bound.name, arguments);
      LONGKV_TRY(tick_bytes(heap_.bytes() - before));
      return result;
    }
    case Kind::kLoop: return value_error("The loop must have the 'recursive' marker to be called recursively.");
    default: return value_error(fmt::format("'{}' object is not callable", type_name(callee)));
  }
}

Status Interpreter::bind_macro(const MacroDefinition& definition, const Arguments& arguments, Scope& scope) {
  const std::string& macro = name(definition.name);
  const size_t count = definition.parameters.size();
  std::vector<bool> used(arguments.named.size());
  const auto take = [&](std::string_view wanted) -> const Value* {
    for (size_t i = 0; i < used.size(); ++i) {
      if (!used[i] && arguments.named[i].first == wanted) {
        used[i] = true;
        return &arguments.named[i].second;
      }
    }
    return nullptr;
  };
  for (size_t i = 0; i < count; ++i) {
    const uint32_t id = definition.parameters[i];
    if (i < arguments.positional.size()) {
      scope.set(id, arguments.positional[i]);
    } else if (const Value* given = take(name(id))) {
      scope.set(id, *given);
    } else if (const size_t from_end = count - i; from_end <= definition.defaults.size()) {
      LONGKV_ASSIGN(const Value v, evaluate(definition.defaults[definition.defaults.size() - from_end]));
      scope.set(id, v);
    } else {
      scope.set(id, heap_.undefined(fmt::format("parameter '{}' was not provided", name(id))));
    }
  }
  if (definition.uses_caller) {
    const Value* caller = take("caller");
    scope.set(program_.caller, caller != nullptr ? *caller : heap_.undefined("No caller defined"));
  }
  Dict* rest = heap_.dict();
  for (size_t i = 0; i < used.size(); ++i) {
    if (used[i]) continue;
    const auto& [key, value] = arguments.named[i];
    if (!definition.uses_kwargs) {
      return value_error(fmt::format("macro '{}' takes no keyword argument '{}'", macro, key));
    }
    rest->set(Value::of(heap_.borrow(key, arguments.names)), value);
  }
  if (definition.uses_kwargs) scope.set(program_.kwargs, Value::of(Kind::kDict, rest));
  std::vector<Value> more;
  if (arguments.positional.size() > count) {
    more.assign(arguments.positional.begin() + ptrdiff_t(count), arguments.positional.end());
  }
  if (definition.uses_varargs) {
    scope.set(program_.varargs, list(std::move(more), Kind::kTuple));
  } else if (!more.empty()) {
    return value_error(fmt::format("macro '{}' takes not more than {} argument(s)", macro, count));
  }
  return {};
}

Result<Value> Interpreter::call_macro(const Macro& macro, const Arguments& arguments) {
  if (macros_ >= limits_.macros) {
    return value_error(fmt::format("more than {} macros call one another", limits_.macros));
  }
  const MacroDefinition& definition = program_.macros[macro.definition];
  Scope* const outer = scope_;
  const uint32_t line = line_;
  ++macros_;
  scope_ = heap_.scope(macro.scope);
  TextBuilder out;
  Status status = bind_macro(definition, arguments, *scope_);
  if (status.ok()) status = execute(definition.body, out).status();
  --macros_;
  heap_.release(scope_);
  scope_ = outer;
  if (!status.ok()) return status;
  line_ = line;
  return make(out);
}

Result<Value> Interpreter::call_function(std::string_view function, const Arguments& arguments) {
  if (function == "range") return make_range(*this, arguments);
  if (function == "dict") return make_mapping(*this, arguments, Kind::kDict);
  if (function == "namespace") return make_mapping(*this, arguments, Kind::kNamespace);
  if (function == "strftime_now") return time_text(*this, arguments);
  if (function == "raise_exception") return raise(*this, arguments);
  List* state = heap_.list();
  if (function == "cycler") {
    if (arguments.positional.empty()) return value_error("at least one item has to be provided");
    state->items = arguments.positional;
    heap_.charge(state->items.size() * sizeof(Value));
    return Value::of(Kind::kCycler, state);
  }
  LONGKV_ASSIGN(const Parameters p, Parameters::match(function, arguments, {"sep"}));
  state->items.push_back(p.has(0) ? p[0] : literal(", "));
  return Value::of(Kind::kJoiner, state);
}

Result<Value> Interpreter::loop_attribute(const Value& object, std::string_view name) {
  if (object.is(Kind::kCycler)) {
    List& state = *object.list;
    if (name == "current") return state.items[state.consumed % state.items.size()];
    for (const std::string_view method : {"next", "reset"}) {
      if (name == method) return heap_.method(object, method);
    }
    return heap_.undefined(fmt::format("'Cycler object' has no attribute '{}'", name));
  }
  const Loop& loop = *object.loop;
  const int64_t index = int64_t(loop.index);
  const int64_t length = int64_t(loop.items->size());
  if (name == "index0") return Value::of(index);
  if (name == "index") return Value::of(index + 1);
  if (name == "revindex") return Value::of(length - index);
  if (name == "revindex0") return Value::of(length - index - 1);
  if (name == "first") return Value::of(index == 0);
  if (name == "last") return Value::of(index + 1 == length);
  if (name == "length") return Value::of(length);
  // Only recursive loops, which are not supported, are deeper.
  if (name == "depth" || name == "depth0") return Value::of(int64_t(name == "depth" ? 1 : 0));
  if (name == "previtem") {
    return index > 0 ? (*loop.items)[size_t(index - 1)] : heap_.undefined("there is no previous item");
  }
  if (name == "nextitem") {
    return index + 1 < length ? (*loop.items)[size_t(index + 1)] : heap_.undefined("there is no next item");
  }
  for (const std::string_view method : {"cycle", "changed"}) {
    if (name == method) return heap_.method(object, method);
  }
  return heap_.undefined(fmt::format("'LoopContext object' has no attribute '{}'", name));
}

Result<Value> Interpreter::call_loop_method(const Bound& bound, const Arguments& arguments) {
  const std::vector<Value>& given = arguments.positional;
  if (bound.object.is(Kind::kCycler)) {
    List& state = *bound.object.list;
    if (bound.name == "reset") {
      state.consumed = 0;
      return Value::none();
    }
    return state.items[state.consumed++ % state.items.size()];
  }
  Loop& loop = *bound.object.loop;
  if (bound.name == "cycle") {
    if (given.empty()) return value_error("no items for cycling given");
    return given[loop.index % given.size()];
  }
  bool same = loop.has_last_changed && loop.last_changed.size() == given.size();
  for (size_t i = 0; same && i < given.size(); ++i) {
    LONGKV_ASSIGN(same, equal(loop.last_changed[i], given[i]));
  }
  loop.has_last_changed = true;
  loop.last_changed = given;
  return Value::of(!same);
}

}  // namespace longkv::jinja
