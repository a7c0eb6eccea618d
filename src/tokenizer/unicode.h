// UTF-8 decoding and the character classes that pre-tokenizers distinguish.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace longkv {

// Class bits of a code point. A letter that is neither upper nor lower is a modifier or other letter (Lm, Lo).
enum CharClass : uint8_t {
  kLetter = 1,   // \p{L}
  kUpper = 2,    // Lu, Lt
  kLower = 4,    // Ll
  kNumber = 8,   // \p{N}
  kPunct = 16,   // \p{P}
  kSymbol = 32,  // \p{S}
  kMark = 64,    // \p{M}
  kSpace = 128,  // White_Space, which is \s of the tokenizers' regex engines
};

// One class byte per code point, 0x110000 of them, expanded on first use.
const uint8_t* char_class_table();
// Version of Unicode that the table was generated from.
const char* unicode_version();

// One character of a text. Past the end: length 0 and no class bits.
struct Char {
  uint32_t code = 0;
  uint8_t cls = 0;
  uint8_t length = 0;

  bool is(unsigned bits) const { return (cls & bits) != 0; }
};

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

// Reads characters of one segment; scanners never look outside of it.
class CharReader {
 public:
  CharReader(const char* data, size_t end) : data_(data), end_(end), table_(char_class_table()) {}

  size_t end() const { return end_; }
  Char at(size_t pos) const {
    if (pos >= end_) return {};
    const auto byte = static_cast<uint8_t>(data_[pos]);
    if (byte < 0x80) return {byte, table_[byte], 1};
    const Utf8Char c = decode_utf8(data_ + pos, end_ - pos);
    return {c.code, table_[c.code], c.length};
  }
  // End of the run of characters that satisfy `in`, starting at pos.
  template <class Predicate>
  size_t run(size_t pos, Predicate in) const {
    for (Char c = at(pos); c.length != 0 && in(c); c = at(pos)) pos += c.length;
    return pos;
  }

 private:
  const char* data_;
  size_t end_;
  const uint8_t* table_;
};

namespace unicode_detail {
extern const char kVersion[];
extern const size_t kRunCount;
extern const uint32_t kRuns[];
}  // namespace unicode_detail

}  // namespace longkv
