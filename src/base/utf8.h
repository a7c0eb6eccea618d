// UTF-8, one character at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace longkv {

constexpr uint32_t kReplacementChar = 0xFFFD;

// Decodes the character at bytes[0]; `available` > 0. A byte that begins no well-formed sequence (RFC 3629: no overlong
// forms, surrogates or values above 10FFFF) counts as one U+FFFD of length 1, so that every byte of a text is covered.
struct Utf8Char {
  uint32_t code = 0;
  uint8_t length = 0;
  bool valid = true;
};
Utf8Char decode_utf8(const char* bytes, size_t available);

// Number of leading bytes of `bytes` that may still become one well-formed character when more bytes follow;
// 0 if the bytes are complete or can never become one. Used on a tail of at most 3 bytes.
size_t incomplete_utf8(std::string_view bytes);

// Appends the character `code`, at most 10FFFF.
void append_utf8(std::string& out, uint32_t code);

}  // namespace longkv
