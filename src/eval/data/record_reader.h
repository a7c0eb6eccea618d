// JSON records of a user's file, one at a time: lines of JSON or one array of objects, plain, gzip or a member of a zip
// archive. Files are data alone: nothing in them is executed, expanded or used as a path.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "eval/sha256.h"
#include "longkv/status.h"

namespace longkv {

// Bytes from first to last. Errors: kIo, kCorrupt.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  // Fills at most `size` bytes; 0 at the end.
  virtual Result<size_t> read(char* bytes, size_t size) = 0;
};

Result<std::unique_ptr<ByteSource>> open_packed_source(const std::string& path);

// Members of a zip archive (stored or deflated, no encryption, no zip64). Errors: kIo, kCorrupt, kUnsupported.
struct ZipMember {
  std::string name;
  uint64_t offset = 0, packed_bytes = 0, bytes = 0;  // offset of its local header
  uint32_t crc = 0;
  int method = 0;
};
Result<std::vector<ZipMember>> list_zip(const std::string& path);
Result<std::unique_ptr<ByteSource>> open_zip_member(const std::string& path, const ZipMember& member);

class RecordReader {
 public:
  static constexpr size_t kMaxRecordBytes = size_t(64) << 20;
  static constexpr int kMaxDepth = 64;

  RecordReader(std::unique_ptr<ByteSource> source, std::string name)
      : source_(std::move(source)), name_(std::move(name)), buffer_(1 << 16, '\0') {}

  // The next object; nothing at the end. Empty lines are passed over, \r\n ends a line too.
  // Errors: kCorrupt with line number and byte offset: no JSON, no object, not UTF-8, nested too deep, too long.
  Result<std::optional<nlohmann::json>> next();

  int64_t line() const { return record_line_; }  // where the last record begins, from 1
  uint64_t offset() const { return record_offset_; }
  std::string where() const;
  // Of everything read so far; the whole file once next() gave nothing.
  std::string sha256_so_far() const { return Sha256(hash_).hex(); }

 private:
  Status fill();      // at_ < filled_ afterwards, or ended_
  Result<int> get();  // a byte, -1 at the end
  Result<std::optional<std::string>> next_text();
  Result<std::optional<std::string>> next_line();
  Result<std::optional<std::string>> next_element();

  std::unique_ptr<ByteSource> source_;
  std::string name_;
  std::string buffer_;
  size_t at_ = 0, filled_ = 0;
  bool ended_ = false, started_ = false, array_ = false, array_done_ = false;
  int pushed_back_ = -1;  // the first byte that is no blank, read to tell lines from an array
  int64_t line_ = 1, record_line_ = 0;
  uint64_t offset_ = 0, record_offset_ = 0;
  Sha256 hash_;
};

}  // namespace longkv
