// The character classes that pre-tokenizers distinguish, and reading a text by them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/utf8.h"

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

// One character of a text. Past the end: length 0 and no class bits.
struct Char {
  uint32_t code = 0;
  uint8_t cls = 0;
  uint8_t length = 0;

  bool is(unsigned bits) const { return (cls & bits) != 0; }
};

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
extern const size_t kRunCount;
extern const uint32_t kRuns[];
}  // namespace unicode_detail

}  // namespace longkv
