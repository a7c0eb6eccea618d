// Tokens to a Program. Nesting is bounded, whatever the text.
#pragma once

#include <string_view>

#include "chat/jinja/ast.h"
#include "longkv/status.h"

namespace longkv::jinja {

// Levels of nested blocks and expressions that a template may have.
constexpr int kMaxNesting = 200;

// Errors: kInvalidArgument with the line ("line 3: expected ..."); kUnsupported for statements that need other files.
Result<Program> parse_template(std::string_view source);

}  // namespace longkv::jinja
