#include "eval/text.h"

#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "tokenizer/unicode.h"

namespace longkv {

namespace {

bool is_white(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
bool is_word(char c) {
  return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (c & 0x80) != 0;
}

}  // namespace

bool is_digit(char c) { return c >= '0' && c <= '9'; }

std::string lower_ascii(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c;
  return out;
}

std::vector<std::string> split_white(std::string_view text) {
  std::vector<std::string> words;
  for (size_t i = 0; i < text.size();) {
    while (i < text.size() && is_white(text[i])) ++i;
    const size_t begin = i;
    while (i < text.size() && !is_white(text[i])) ++i;
    if (i > begin) words.emplace_back(text.substr(begin, i - begin));
  }
  return words;
}

std::vector<std::string> split_lines(std::string_view text) {
  std::vector<std::string> lines;
  while (true) {
    const size_t end = text.find('\n');
    lines.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) return lines;
    text.remove_prefix(end + 1);
  }
}

std::string join(const std::vector<std::string>& pieces, std::string_view separator) {
  std::string out;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (i > 0) out += separator;
    out += pieces[i];
  }
  return out;
}

std::string replace_all(std::string text, std::string_view from, std::string_view to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
  return text;
}

std::vector<std::string> digit_runs(std::string_view text) {
  std::vector<std::string> runs;
  for (size_t i = 0; i < text.size(); ++i) {
    if (!is_digit(text[i])) continue;
    if (i == 0 || !is_digit(text[i - 1])) runs.emplace_back();
    runs.back() += text[i];
  }
  return runs;
}

bool has_word(std::string_view text, std::string_view word) {
  if (word.empty()) return false;
  for (size_t at = text.find(word); at != std::string_view::npos; at = text.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at == 0 || !is_word(text[at - 1])) && (end == text.size() || !is_word(text[end]))) return true;
  }
  return false;
}

std::optional<size_t> first_bad_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = decode_utf8(text.data() + i, text.size() - i);
    if (!c.valid) return i;
    i += c.length;
  }
  return std::nullopt;
}

std::vector<uint32_t> code_points(std::string_view text) {
  std::vector<uint32_t> codes;
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = decode_utf8(text.data() + i, text.size() - i);
    codes.push_back(c.code);
    i += c.length;
  }
  return codes;
}

Result<std::string> read_packed_file(const std::string& path, uint64_t limit) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return fail(Code::kIo, "cannot open '{}': {}", path, std::strerror(errno));
  if (S_ISDIR(info.st_mode)) return fail(Code::kIo, "'{}' is a directory, a file is needed", path);
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzopen(path.c_str(), "rbe"), gzclose);
  if (!file) return fail(Code::kIo, "cannot open '{}': {}", path, std::strerror(errno));
  std::string text;
  char buffer[1 << 16];
  int n = 0;
  while ((n = gzread(file.get(), buffer, sizeof(buffer))) > 0) {
    text.append(buffer, size_t(n));
    if (text.size() > limit) return fail(Code::kInvalidArgument, "'{}' is larger than {} bytes", path, limit);
  }
  int error = Z_OK;
  const char* message = gzerror(file.get(), &error);
  if (n < 0 || (error != Z_OK && error != Z_STREAM_END)) {
    return error == Z_ERRNO ? fail(Code::kIo, "cannot read '{}': {}", path, std::strerror(errno))
                            : fail(Code::kCorrupt, "'{}' is a damaged gzip file: {}", path, message);
  }
  return text;
}

}  // namespace longkv
