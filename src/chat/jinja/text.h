// Python's view of text: characters, white space, case, and how values are written.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/utf8.h"
#include "chat/jinja/value.h"
#include "longkv/status.h"

namespace longkv::jinja {

bool is_space(uint32_t code);
// First byte at or after `pos` that is no white space; last byte after which only white space follows.
size_t skip_space(std::string_view text, size_t pos);
size_t end_without_space(std::string_view text);
// Byte offset of a character; `index` is between 0 and s->length().
size_t byte_of(const Str* s, int64_t index);

// str.upper() and so on; `title` begins every word with an upper-case letter, `capitalize` the text.
enum class CaseChange { kUpper, kLower, kTitle, kCapitalize, kSwap };
const Str* change_case(Heap& heap, const Str* s, CaseChange change);

// repr() of a float: the shortest digits that read back as it.
std::string real_text(double value);

// str(value) and repr(value) appended to `out`. Errors: kInvalidArgument for a value nested too deeply.
Status append_text(TextBuilder& out, const Value& value);
Status append_repr(TextBuilder& out, const Value& value, int depth = 0);

struct JsonStyle {
  bool ensure_ascii = false;
  bool sort_keys = false;
  bool pretty = false;
  std::string indent;  // of one level
  std::string item_separator = ", ";
  std::string key_separator = ": ";
  bool from_user = false;  // a user chose indent or separators

  void add(TextBuilder& out, std::string_view text) const {
    if (from_user) {
      out.add(text, Origin::kUser);
    } else {
      out.add_neutral(text);
    }
  }
};
// json.dumps(value). Errors: kInvalidArgument for values that JSON cannot hold or that are nested too deeply.
Status append_json(TextBuilder& out, const Value& value, const JsonStyle& style, int depth = 0);

}  // namespace longkv::jinja
