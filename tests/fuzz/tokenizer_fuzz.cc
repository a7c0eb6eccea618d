// Any bytes as text, for every pre-tokenizer: words cover the text, ids decode to it, streams are valid UTF-8.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "tokenizer/pre_tokenizer.h"
#include "tokenizer/stop_matcher.h"
#include "tokenizer/stream_decoder.h"
#include "tokenizer/unicode.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

// The first byte chooses the rules, the second where the stream is cut.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace longkv;
  if (size < 2) return 0;
  static const std::string names = known_pre_tokenizers() + ", ";
  const std::string_view text(reinterpret_cast<const char*>(data) + 2, size - 2);

  size_t begin = 0;
  for (int skip = data[0] % 32; skip > 0 && names.find(", ", begin) + 2 < names.size(); --skip) {
    begin = names.find(", ", begin) + 2;
  }
  const PreTokenizer* rules = find_pre_tokenizer(names.substr(begin, names.find(", ", begin) - begin));
  require(rules != nullptr);
  WordSplitter splitter(*rules, text);
  size_t pos = 0;
  for (std::string_view word = splitter.next(); !word.empty(); word = splitter.next()) {
    require(word.data() == text.data() + pos);
    pos += word.size();
  }
  require(pos == text.size());

  StreamDecoder decoder;
  StopMatcher matcher({"\n\n", "ab", "abc"});
  const size_t cut = data[1] % (text.size() + 1);
  std::string out = decoder.push(text.substr(0, cut)) + decoder.push(text.substr(cut)) + decoder.flush();
  for (size_t at = 0; at < out.size();) {
    const Utf8Char c = decode_utf8(out.data() + at, out.size() - at);
    require(c.valid);
    at += c.length;
  }
  const std::string shown = matcher.push(out.substr(0, out.size() / 2)) + matcher.push(out.substr(out.size() / 2));
  require(out.starts_with(shown));
  require(shown.find("\n\n") == std::string::npos && shown.find("ab") == std::string::npos);
  return 0;
}
