// Python's operators on values.
#pragma once

#include <string_view>

#include "chat/jinja/ast.h"
#include "chat/jinja/value.h"
#include "longkv/status.h"

namespace longkv::jinja {

// Levels to which nested values are compared, printed and written as JSON.
constexpr int kMaxValueDepth = 200;

// An error of the rendering; where it happened is added by the interpreter.
Status value_error(std::string_view reason);
// "'x' is undefined" and the like, for a value that is.
Status undefined_error(const Value& undefined);

Result<bool> equal(const Value& a, const Value& b, int depth = 0);
// For keys of dicts: never fails, unequal when nested too deeply.
bool equal_keys(const Value& a, const Value& b);
// -1, 0, 1. Errors: values without an order.
Result<int> order(const Value& a, const Value& b, int depth = 0);
Result<bool> compare(Compare op, const Value& a, const Value& b);
Result<bool> contains(const Value& container, const Value& item);

// a OP b for kAdd to kPower.
Result<Value> arithmetic(Heap& heap, NodeKind op, const Value& a, const Value& b);
Result<Value> negative(const Value& v);
// `format % arguments`: s, r, d, i, u, x, X, o, e, E, f, F, g, G, c, % with flags, width and precision.
Result<Value> format_percent(Heap& heap, const Str* format, const Value& arguments);
// format.format(*positional, **named): fields {}, {0}, {name}, {name.attribute}, {name[key]} with !s and !r and the
// usual specifications of width, alignment and precision.
Result<Value> format_braces(Heap& heap, const Str* format, const std::vector<Value>& positional,
                            const std::vector<std::pair<std::string_view, Value>>& named);

// The values that a for loop takes one by one. Reads generators to their end.
// Errors: values without items ("'int' object is not iterable").
Result<std::vector<Value>> items_of(Heap& heap, const Value& v);
// len(). Errors: values without a length.
Result<int64_t> length_of(const Value& v);

// str(v) as a string value; a string is itself.
Result<const Str*> text_of(Heap& heap, const Value& v);

}  // namespace longkv::jinja
