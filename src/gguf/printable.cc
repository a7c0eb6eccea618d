#include "gguf/printable.h"

#include <fmt/format.h>

#include <cstdint>

#include "base/utf8.h"

namespace longkv {

std::string printable(std::string_view text, size_t max_bytes) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    if (at >= max_bytes) return out + "...";
    const Utf8Char c = decode_utf8(text.data() + at, text.size() - at);
    // U+0080 to U+009F are control codes too.
    const bool control = c.code < 0x20 || (c.code >= 0x7f && c.code < 0xa0);
    if (c.code == '\n') {
      out += "\\n";
    } else if (!c.valid || control) {
      for (size_t i = 0; i < c.length; ++i) out += fmt::format("\\x{:02x}", uint8_t(text[at + i]));
    } else {
      out += text.substr(at, c.length);
    }
    at += c.length;
  }
  return out;
}

}  // namespace longkv
