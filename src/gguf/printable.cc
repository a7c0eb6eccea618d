#include "gguf/printable.h"

#include <fmt/format.h>

#include <cstdint>

namespace longkv {

namespace {

// Length of the well-formed UTF-8 sequence at the start of `s`, 0 if there is none (Unicode 15, table 3-7).
size_t utf8_length(std::string_view s) {
  const auto byte = [&](size_t i) { return uint8_t(s[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead < 0xc2 || lead > 0xf4) return 0;
  const size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  if (s.size() < length) return 0;
  uint8_t low = 0x80, high = 0xbf;
  if (lead == 0xe0) low = 0xa0;
  if (lead == 0xed) high = 0x9f;
  if (lead == 0xf0) low = 0x90;
  if (lead == 0xf4) high = 0x8f;
  if (byte(1) < low || byte(1) > high) return 0;
  for (size_t i = 2; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  return length;
}

}  // namespace

std::string printable(std::string_view text, size_t max_bytes) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    if (at >= max_bytes) return out + "...";
    const size_t length = utf8_length(text.substr(at));
    const uint8_t lead = uint8_t(text[at]);
    // U+0080 to U+009F (C2 80 .. C2 9F) are control codes too.
    const bool control = lead < 0x20 || lead == 0x7f || (length == 2 && lead == 0xc2 && uint8_t(text[at + 1]) < 0xa0);
    if (lead == '\n') {
      out += "\\n";
      at += 1;
    } else if (length == 0 || control) {
      const size_t bytes = length == 0 ? 1 : length;
      for (size_t i = 0; i < bytes; ++i) out += fmt::format("\\x{:02x}", uint8_t(text[at + i]));
      at += bytes;
    } else {
      out += text.substr(at, length);
      at += length;
    }
  }
  return out;
}

}  // namespace longkv
