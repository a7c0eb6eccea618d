#include "base/utf8.h"

namespace longkv {

namespace {

// Sequence length announced by a lead byte; 0 for bytes that cannot lead.
int lead_length(uint8_t byte) {
  if (byte < 0x80) return 1;
  if (byte >= 0xC2 && byte <= 0xDF) return 2;
  if (byte >= 0xE0 && byte <= 0xEF) return 3;
  if (byte >= 0xF0 && byte <= 0xF4) return 4;
  return 0;
}

// The second byte's range excludes overlong forms, surrogates and values above 10FFFF.
bool second_byte_ok(uint8_t lead, uint8_t second) {
  const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  return second >= low && second <= high;
}

bool continuation(uint8_t byte) { return (byte & 0xC0) == 0x80; }

}  // namespace

Utf8Char decode_utf8(const char* bytes, size_t available) {
  const auto* b = reinterpret_cast<const uint8_t*>(bytes);
  const int length = lead_length(b[0]);
  if (length == 1) return {b[0], 1, true};
  if (length == 0 || static_cast<size_t>(length) > available || !second_byte_ok(b[0], b[1])) {
    return {kReplacementChar, 1, false};
  }
  uint32_t code = b[0] & (0xFFu >> (length + 1));
  for (int i = 1; i < length; ++i) {
    if (!continuation(b[i])) return {kReplacementChar, 1, false};
    code = code << 6 | (b[i] & 0x3F);
  }
  return {code, static_cast<uint8_t>(length), true};
}

size_t incomplete_utf8(std::string_view bytes) {
  if (bytes.empty()) return 0;
  const auto* b = reinterpret_cast<const uint8_t*>(bytes.data());
  const auto length = static_cast<size_t>(lead_length(b[0]));
  if (length < 2 || bytes.size() >= length) return 0;
  if (bytes.size() >= 2 && !second_byte_ok(b[0], b[1])) return 0;
  for (size_t i = 2; i < bytes.size(); ++i) {
    if (!continuation(b[i])) return 0;
  }
  return bytes.size();
}

void append_utf8(std::string& out, uint32_t code) {
  if (code < 0x80) {
    out += char(code);
  } else if (code < 0x800) {
    out += {char(0xC0 | (code >> 6)), char(0x80 | (code & 0x3F))};
  } else if (code < 0x10000) {
    out += {char(0xE0 | (code >> 12)), char(0x80 | ((code >> 6) & 0x3F)), char(0x80 | (code & 0x3F))};
  } else {
    out += {char(0xF0 | (code >> 18)), char(0x80 | ((code >> 12) & 0x3F)), char(0x80 | ((code >> 6) & 0x3F)),
            char(0x80 | (code & 0x3F))};
  }
}

}  // namespace longkv
