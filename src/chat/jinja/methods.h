// Methods of strings, lists and dicts that a template may call. Methods that would change their object are refused, as
// in Jinja's immutable sandbox.
#pragma once

#include <string_view>

#include "chat/jinja/interpreter.h"

namespace longkv::jinja {

enum class MethodKind { kNone, kCallable, kForbidden };

// What stands behind object.name where `object` is a string, list, tuple or dict. `canonical` gets the name with the
// lifetime of the program.
MethodKind method_kind(const Value& object, std::string_view name, std::string_view& canonical);
Result<Value> call_method(Interpreter& in, const Value& object, std::string_view name, const Arguments& arguments);

// The halves of call_method.
Result<Value> call_text_method(Interpreter& in, const Str* s, std::string_view name, const Arguments& arguments);
Result<Value> call_container_method(Interpreter& in, const Value& object, std::string_view name,
                                    const Arguments& arguments);
// Methods that cut or search a string (methods_split.cc).
Result<Value> split_text(Interpreter& in, const Str* s, const Arguments& arguments, bool from_right);
Result<Value> split_lines(Interpreter& in, const Str* s, bool keep_ends);
// Bytes of `s` that stripping leaves. Without `chars`, white space is stripped.
const Str* strip_text(Heap& heap, const Str* s, const Str* chars, bool left, bool right);
// The first `count` (all: -1) occurrences of `from`.
Result<const Str*> replace_text(Interpreter& in, const Str* s, const Str* from, const Str* to, int64_t count);

}  // namespace longkv::jinja
