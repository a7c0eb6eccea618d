#include "eval/data/record_reader.h"

#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "eval/text.h"

namespace longkv {

namespace {

class PackedSource : public ByteSource {
 public:
  PackedSource(gzFile file, std::string path) : file_(file, gzclose), path_(std::move(path)) {}

  Result<size_t> read(char* bytes, size_t size) override {
    const int n = gzread(file_.get(), bytes, unsigned(std::min<size_t>(size, 1 << 20)));
    int error = Z_OK;
    const char* message = gzerror(file_.get(), &error);
    // A gzip stream that ends early gives its bytes and then Z_BUF_ERROR.
    if (n < 0 || (n == 0 && error == Z_BUF_ERROR)) {
      return error == Z_ERRNO ? fail(Code::kIo, "cannot read '{}': {}", path_, std::strerror(errno))
                              : fail(Code::kCorrupt, "'{}' is a damaged gzip file: {}", path_, message);
    }
    return size_t(n);
  }

 private:
  std::unique_ptr<gzFile_s, int (*)(gzFile)> file_;
  std::string path_;
};

// Deepest nesting of brackets outside of strings.
int nesting(const std::string& text) {
  int depth = 0, deepest = 0;
  bool inside = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (inside) {
      if (c == '\\') ++i;
      if (c == '"') inside = false;
    } else if (c == '"') {
      inside = true;
    } else if (c == '{' || c == '[') {
      deepest = std::max(deepest, ++depth);
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return deepest;
}

}  // namespace

Result<std::unique_ptr<ByteSource>> open_packed_source(const std::string& path) {
  gzFile file = gzopen(path.c_str(), "rbe");
  if (file == nullptr) return fail(Code::kIo, "cannot open '{}': {}", path, std::strerror(errno));
  return std::unique_ptr<ByteSource>(new PackedSource(file, path));
}

std::string RecordReader::where() const {
  return fmt::format("'{}' line {} (byte {})", name_, record_line_, record_offset_);
}

Status RecordReader::fill() {
  if (at_ < filled_ || ended_) return {};
  LONGKV_ASSIGN(filled_, source_->read(buffer_.data(), buffer_.size()));
  at_ = 0;
  hash_.update({reinterpret_cast<const uint8_t*>(buffer_.data()), filled_});
  ended_ = filled_ == 0;
  return {};
}

Result<int> RecordReader::get() {
  LONGKV_TRY(fill());
  if (ended_) return -1;
  const char c = buffer_[at_++];
  ++offset_;
  line_ += c == '\n' ? 1 : 0;
  return int(static_cast<unsigned char>(c));
}

Result<std::optional<std::string>> RecordReader::next_line() {
  std::string text;
  if (pushed_back_ >= 0) text += char(std::exchange(pushed_back_, -1));
  record_line_ = line_;
  record_offset_ = offset_ - text.size();
  while (true) {
    LONGKV_TRY(fill());
    if (!ended_) {
      const char* begin = buffer_.data() + at_;
      const auto* end = static_cast<const char*>(std::memchr(begin, '\n', filled_ - at_));
      const size_t n = end != nullptr ? size_t(end - begin) : filled_ - at_;
      if (text.size() + n > kMaxRecordBytes) {
        return fail(Code::kCorrupt, "{}: a line of more than {} bytes", where(), kMaxRecordBytes);
      }
      text.append(begin, n);
      at_ += n;
      offset_ += n;
      if (end == nullptr) continue;
      ++at_;
      ++offset_;
      ++line_;
    }
    const std::string_view trimmed = trim(text);
    if (!trimmed.empty()) return std::optional<std::string>(std::string(trimmed));
    if (ended_) return std::optional<std::string>();
    text.clear();
    record_line_ = line_;
    record_offset_ = offset_;
  }
}

Result<std::optional<std::string>> RecordReader::next_element() {
  if (array_done_) return std::optional<std::string>();
  int c = 0;
  do {
    LONGKV_ASSIGN(c, get());
  } while (c == ' ' || c == '\t' || c == '\r' || c == '\n' || c == ',');
  record_line_ = line_;
  record_offset_ = c < 0 ? offset_ : offset_ - 1;
  if (c == ']') {
    array_done_ = true;
    return std::optional<std::string>();
  }
  if (c < 0) return fail(Code::kCorrupt, "{}: the array has no end", where());
  if (c != '{') return fail(Code::kCorrupt, "{}: an object is expected", where());
  std::string text(1, '{');
  int depth = 1;
  bool inside = false, escaped = false;
  while (depth > 0) {
    LONGKV_TRY(fill());
    if (ended_) return fail(Code::kCorrupt, "{}: the object has no end", where());
    const size_t begin = at_;
    while (at_ < filled_ && depth > 0) {
      const char byte = buffer_[at_++];
      line_ += byte == '\n' ? 1 : 0;
      if (inside) {
        inside = escaped || byte != '"';
        escaped = !escaped && byte == '\\';
        continue;
      }
      inside = byte == '"';
      depth += byte == '{' || byte == '[' ? 1 : byte == '}' || byte == ']' ? -1 : 0;
    }
    offset_ += at_ - begin;
    if (text.size() + at_ - begin > kMaxRecordBytes) {
      return fail(Code::kCorrupt, "{}: an object of more than {} bytes", where(), kMaxRecordBytes);
    }
    text.append(buffer_, begin, at_ - begin);
  }
  return std::optional<std::string>(std::move(text));
}

Result<std::optional<std::string>> RecordReader::next_text() {
  if (!started_) {
    started_ = true;
    // A byte order mark, blanks, then "[" for an array or anything else for lines.
    int c = 0;
    int skip_mark = 0;
    do {
      LONGKV_ASSIGN(c, get());
      if (offset_ <= 3 && c == "\xef\xbb\xbf"[skip_mark] + 256) {
        ++skip_mark;
        c = ' ';
      }
    } while (c == ' ' || c == '\t' || c == '\r' || c == '\n');
    array_ = c == '[';
    if (!array_) pushed_back_ = c;
  }
  return array_ ? next_element() : next_line();
}

Result<std::optional<nlohmann::json>> RecordReader::next() {
  LONGKV_ASSIGN(const std::optional<std::string> text, next_text());
  if (!text) return std::optional<nlohmann::json>();
  if (const auto bad = first_bad_utf8(*text)) {
    return fail(Code::kCorrupt, "{}: byte 0x{:02x} at offset {} is not UTF-8", where(), uint8_t((*text)[*bad]),
                record_offset_ + *bad);
  }
  if (const int depth = nesting(*text); depth > kMaxDepth) {
    return fail(Code::kCorrupt, "{}: nested {} deep, {} are allowed", where(), depth, kMaxDepth);
  }
  nlohmann::json json = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) return fail(Code::kCorrupt, "{}: no JSON, or cut off", where());
  if (!json.is_object()) return fail(Code::kCorrupt, "{}: an object is expected", where());
  return std::optional<nlohmann::json>(std::move(json));
}

}  // namespace longkv
