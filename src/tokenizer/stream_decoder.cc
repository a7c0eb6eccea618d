#include "tokenizer/stream_decoder.h"

#include "tokenizer/unicode.h"

namespace longkv {

namespace {
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
}

std::string StreamDecoder::push(std::string_view bytes) {
  held_ += bytes;
  std::string out;
  size_t pos = 0;
  while (pos < held_.size()) {
    const Utf8Char c = decode_utf8(held_.data() + pos, held_.size() - pos);
    if (!c.valid && incomplete_utf8(std::string_view(held_).substr(pos)) > 0) break;
    if (c.valid) {
      out.append(held_, pos, c.length);
    } else {
      out += kReplacement;
    }
    pos += c.length;
  }
  held_.erase(0, pos);
  return out;
}

std::string StreamDecoder::flush() {
  const bool partial = holds_partial();
  held_.clear();
  return partial ? std::string(kReplacement) : std::string();
}

}  // namespace longkv
