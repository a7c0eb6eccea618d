#include "chat/jinja/convert.h"

#include "base/error.h"
#include "tokenizer/unicode.h"

namespace longkv::jinja {

namespace {

using Json = nlohmann::ordered_json;

constexpr int kMaxJsonDepth = 200;

Result<Value> text_value(Heap& heap, const std::string& text, std::string_view where) {
  for (size_t i = 0; i < text.size();) {
    if (static_cast<unsigned char>(text[i]) < 0x80) {
      ++i;
      continue;
    }
    const Utf8Char c = decode_utf8(text.data() + i, text.size() - i);
    if (!c.valid) return fail(Code::kInvalidArgument, "{} hold text that is not UTF-8 (byte {} of it)", where, i);
    i += c.length;
  }
  return Value::of(heap.borrow(text, Origin::kUser));
}

Result<Value> convert(Heap& heap, const Json& json, std::string_view where, int depth) {
  if (depth > kMaxJsonDepth) {
    return fail(Code::kInvalidArgument, "{} are nested more than {} levels deep", where, kMaxJsonDepth);
  }
  switch (json.type()) {
    case Json::value_t::null: return Value::none();
    case Json::value_t::boolean: return Value::of(json.get<bool>());
    case Json::value_t::number_integer: return Value::of(json.get<int64_t>());
    case Json::value_t::number_unsigned: {
      const auto n = json.get<uint64_t>();
      if (n <= uint64_t(INT64_MAX)) return Value::of(int64_t(n));
      Value v = Value::with(Kind::kBig);
      v.big = n;
      return v;
    }
    case Json::value_t::number_float: return Value::of(json.get<double>());
    case Json::value_t::string: return text_value(heap, json.get_ref<const std::string&>(), where);
    case Json::value_t::array: {
      List* list = heap.list();
      list->items.reserve(json.size());
      heap.charge(json.size() * sizeof(Value));
      for (const Json& item : json) {
        LONGKV_ASSIGN(const Value v, convert(heap, item, where, depth + 1));
        list->items.push_back(v);
      }
      return Value::of(Kind::kList, list);
    }
    case Json::value_t::object: {
      Dict* dict = heap.dict();
      heap.charge(json.size() * 2 * sizeof(Value));
      for (const auto& [key, item] : json.get_ref<const Json::object_t&>()) {
        LONGKV_ASSIGN(const Value name, text_value(heap, key, where));
        LONGKV_ASSIGN(const Value v, convert(heap, item, where, depth + 1));
        dict->set(name, v);
      }
      return Value::of(Kind::kDict, dict);
    }
    default: return fail(Code::kInvalidArgument, "{} hold binary data", where);
  }
}

}  // namespace

Result<Value> from_json(Heap& heap, const Json& json, std::string_view where) { return convert(heap, json, where, 0); }

Result<Value> messages_from_json(Heap& heap, const Json& messages) {
  if (!messages.is_array()) return fail(Code::kInvalidArgument, "messages must be a list of objects");
  if (messages.empty())
    return fail(Code::kInvalidArgument, "the conversation is empty; at least one message is needed");
  List* list = heap.list();
  for (size_t i = 0; i < messages.size(); ++i) {
    LONGKV_ASSIGN(const Value v, from_json(heap, messages[i], "messages"));
    if (!v.is(Kind::kDict)) {
      return fail(Code::kInvalidArgument, "message {} is no object with a role and content, but of type {}", i,
                  type_name(v));
    }
    const Value* reasoning = nullptr;
    for (const std::string_view key : {"reasoning_content", "thinking", "reasoning"}) {
      const Value* at = v.dict->find(key);
      if (at != nullptr && !at->is(Kind::kNone)) {
        reasoning = at;
        break;
      }
    }
    Dict* message = heap.dict();
    if (reasoning != nullptr) message->set(heap.text("thinking"), *reasoning);
    for (const auto& [key, value] : v.dict->items) {
      if (!value.is(Kind::kNone)) message->set(key, value);
    }
    if (reasoning != nullptr) message->set(heap.text("reasoning_content"), *reasoning);
    list->items.push_back(Value::of(Kind::kDict, message));
  }
  heap.charge(list->items.size() * sizeof(Value));
  return Value::of(Kind::kList, list);
}

}  // namespace longkv::jinja
