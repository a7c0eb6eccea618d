// The tests behind "is": is defined, is string, is in [...] and so on.
#pragma once

#include <string_view>

#include "chat/jinja/interpreter.h"

namespace longkv::jinja {

using TestFunction = Result<bool> (*)(Interpreter&, const Value& input, const Arguments&);

bool known_test(std::string_view name);
// Null for an unknown name.
TestFunction find_test(std::string_view name);

}  // namespace longkv::jinja
