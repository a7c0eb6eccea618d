// The filters of Jinja2 that templates use, with Transformers' tojson.
#pragma once

#include <span>
#include <string_view>

#include "chat/jinja/interpreter.h"

namespace longkv::jinja {

using FilterFunction = Result<Value> (*)(Interpreter&, const Value& input, const Arguments&);

struct NamedFilter {
  std::string_view name;
  FilterFunction function;
};

bool known_filter(std::string_view name);
// Null for an unknown name.
FilterFunction find_filter(std::string_view name);

// Appended by the files that hold them.
std::span<const NamedFilter> text_filters();
std::span<const NamedFilter> sequence_filters();
std::span<const NamedFilter> value_filters();

}  // namespace longkv::jinja
