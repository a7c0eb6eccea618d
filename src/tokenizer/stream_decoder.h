// Bytes of tokens in, whole UTF-8 characters out.
#pragma once

#include <string>
#include <string_view>

namespace longkv {

// Tokens may end in the middle of a character. A possible beginning of one is held back until it is complete; bytes
// that can never become a character give U+FFFD at once, one for each byte that begins no well-formed sequence.
class StreamDecoder {
 public:
  // The characters completed by `bytes`; always valid UTF-8.
  std::string push(std::string_view bytes);
  // U+FFFD if a beginning of a character is held, else nothing. The decoder is then as new.
  std::string flush();
  // Whether flush() would replace something: the text ended inside of a character.
  bool holds_partial() const { return !held_.empty(); }

 private:
  std::string held_;  // at most 3 bytes
};

}  // namespace longkv
