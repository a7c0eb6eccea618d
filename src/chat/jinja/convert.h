// JSON of a request to values of the interpreter. Text stays where it is, so the JSON must outlive the rendering.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "chat/jinja/value.h"
#include "longkv/status.h"

namespace longkv::jinja {

// Errors: kInvalidArgument for nesting beyond 200 levels, text that is not UTF-8, numbers beyond 64 bits. `where` names
// the value in messages.
Result<Value> from_json(Heap& heap, const nlohmann::ordered_json& json, std::string_view where);
// Messages as Transformers hands them to templates: nulls dropped, reasoning under both of its names.
Result<Value> messages_from_json(Heap& heap, const nlohmann::ordered_json& messages);

}  // namespace longkv::jinja
