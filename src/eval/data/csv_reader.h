// Rows of a CSV file (RFC 4180) as objects keyed by the first row: kvpress-style tables.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "eval/data/record_reader.h"
#include "longkv/status.h"

namespace longkv {

class CsvReader {
 public:
  CsvReader(std::unique_ptr<ByteSource> source, std::string name)
      : source_(std::move(source)), name_(std::move(name)), buffer_(1 << 16, '\0') {}

  // The next row; nothing at the end. A cell that begins with "[" and is a list of JSON becomes that list.
  // Errors: kCorrupt with the line: another number of cells than the first row has, a quotation without end, not UTF-8,
  // a row of more than RecordReader::kMaxRecordBytes.
  Result<std::optional<nlohmann::json>> next();

  std::string where() const;
  std::string sha256_so_far() const { return Sha256(hash_).hex(); }

 private:
  Result<int> get();
  Result<std::optional<std::vector<std::string>>> row();

  std::unique_ptr<ByteSource> source_;
  std::string name_;
  std::string buffer_;
  size_t at_ = 0, filled_ = 0;
  bool ended_ = false;
  int64_t line_ = 1, row_line_ = 1;
  std::vector<std::string> columns_;
  Sha256 hash_;
};

}  // namespace longkv
