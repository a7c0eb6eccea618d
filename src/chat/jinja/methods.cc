#include "chat/jinja/methods.h"

#include <algorithm>
#include <span>

#include "base/error.h"
#include "chat/jinja/text.h"

namespace longkv::jinja {

namespace {

constexpr std::string_view kTextMethods[] = {
    "capitalize",   "casefold",   "center",     "count",   "endswith",  "expandtabs", "find",      "format",
    "index",        "isalnum",    "isalpha",    "isascii", "isdecimal", "isdigit",    "islower",   "isnumeric",
    "isspace",      "isupper",    "join",       "ljust",   "lower",     "lstrip",     "partition", "removeprefix",
    "removesuffix", "replace",    "rfind",      "rindex",  "rjust",     "rpartition", "rsplit",    "rstrip",
    "split",        "splitlines", "startswith", "strip",   "swapcase",  "title",      "upper",     "zfill",
};
constexpr std::string_view kListMethods[] = {"count", "index", "copy"};
constexpr std::string_view kTupleMethods[] = {"count", "index"};
constexpr std::string_view kDictMethods[] = {"get", "items", "keys", "values", "copy"};
// Those that would change their object.
constexpr std::string_view kListChanges[] = {"append", "extend", "insert", "pop", "remove", "reverse", "sort", "clear"};
constexpr std::string_view kDictChanges[] = {"pop", "popitem", "update", "setdefault", "clear"};

bool find_in(std::span<const std::string_view> names, std::string_view name, std::string_view& canonical) {
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) return false;
  canonical = *found;
  return true;
}

}  // namespace

MethodKind method_kind(const Value& object, std::string_view name, std::string_view& canonical) {
  std::span<const std::string_view> callable, forbidden;
  switch (object.kind) {
    case Kind::kStr: callable = kTextMethods; break;
    case Kind::kTuple: callable = kTupleMethods; break;
    case Kind::kList:
      callable = kListMethods;
      forbidden = kListChanges;
      break;
    case Kind::kDict:
      callable = kDictMethods;
      forbidden = kDictChanges;
      break;
    default: return MethodKind::kNone;
  }
  if (find_in(callable, name, canonical)) return MethodKind::kCallable;
  return find_in(forbidden, name, canonical) ? MethodKind::kForbidden : MethodKind::kNone;
}

Result<Value> call_method(Interpreter& in, const Value& object, std::string_view name, const Arguments& arguments) {
  return object.string() ? call_text_method(in, object.str, name, arguments)
                         : call_container_method(in, object, name, arguments);
}

Result<Value> call_container_method(Interpreter& in, const Value& object, std::string_view name,
                                    const Arguments& arguments) {
  if (object.is(Kind::kDict)) {
    const auto& items = object.dict->items;
    LONGKV_TRY(in.tick_items(name == "get" ? 1 : items.size()));
    if (name == "get") {
      LONGKV_ASSIGN(const Parameters p, Parameters::match("get", arguments, {"key", "default"}, 1));
      if (!hashable(p[0])) return value_error(fmt::format("unhashable type: '{}'", type_name(p[0])));
      const Value* found = object.dict->find(p[0]);
      return found != nullptr ? *found : p.has(1) ? p[1] : Value::none();
    }
    LONGKV_TRY(Parameters::match(name, arguments, {}).status());
    if (name == "copy") {
      Dict* copy = in.heap().dict();
      *copy = *object.dict;
      in.heap().charge(items.size() * 2 * sizeof(Value));
      return Value::of(Kind::kDict, copy);
    }
    std::vector<Value> view;
    for (const auto& [key, value] : items) {
      view.push_back(name == "keys" ? key : name == "values" ? value : in.list({key, value}, Kind::kTuple));
    }
    return in.list(std::move(view), Kind::kView);
  }
  const std::vector<Value>& items = object.list->items;
  LONGKV_TRY(in.tick_items(items.size()));
  if (name == "copy") {
    LONGKV_TRY(Parameters::match(name, arguments, {}).status());
    return in.list(items);
  }
  LONGKV_ASSIGN(const Parameters p, Parameters::match(name, arguments, {"value"}, 1));
  int64_t count = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    LONGKV_ASSIGN(const bool same, equal(items[i], p[0]));
    if (same && name == "index") return Value::of(int64_t(i));
    count += same;
  }
  if (name == "index") return value_error("the value is not in the list");
  return Value::of(count);
}

}  // namespace longkv::jinja
