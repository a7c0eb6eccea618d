// Description of a model file for people and programs: `longkv inspect`.
#pragma once

#include <string>

#include "gguf/gguf.h"

namespace longkv {

// Metadata (long strings and arrays abbreviated), the tensor table, and totals per tensor type.
// Text ends with a newline and holds no control characters of the file.
//
// JSON: {"path", "version", "file_bytes", "metadata": {key: {"type", "value"} or {"type": "array", "element_type",
// "count", "first": [...]}}, "tensors": [{"name", "type", "dims", "bytes"}], "totals": {"tensors", "parameters",
// "bytes", "bits_per_weight", "by_type": {type: {"tensors", "parameters", "bytes"}}}}. Strings are complete, arrays
// keep their first elements; bytes that are not UTF-8 become U+FFFD; numbers that JSON lacks (NaN, infinity) are null.
std::string describe_gguf(const GgufFile& file, bool json);

}  // namespace longkv
