#include "eval/data/csv_reader.h"

#include <fmt/format.h>

#include "base/error.h"
#include "eval/text.h"

namespace longkv {

std::string CsvReader::where() const { return fmt::format("'{}' line {}", name_, row_line_); }

Result<int> CsvReader::get() {
  if (at_ == filled_) {
    if (ended_) return -1;
    LONGKV_ASSIGN(filled_, source_->read(buffer_.data(), buffer_.size()));
    at_ = 0;
    hash_.update({reinterpret_cast<const uint8_t*>(buffer_.data()), filled_});
    ended_ = filled_ == 0;
    if (ended_) return -1;
  }
  const char c = buffer_[at_++];
  line_ += c == '\n' ? 1 : 0;
  return int(static_cast<unsigned char>(c));
}

Result<std::optional<std::vector<std::string>>> CsvReader::row() {
  std::vector<std::string> cells(1);
  row_line_ = line_;
  size_t bytes = 0;
  bool quoted = false, after_quote = false, any = false;
  while (true) {
    LONGKV_ASSIGN(const int c, get());
    if (c < 0) {
      if (quoted) return fail(Code::kCorrupt, "{}: a quotation without end", where());
      return any ? std::optional(std::move(cells)) : std::nullopt;
    }
    any = true;
    if (++bytes > RecordReader::kMaxRecordBytes) {
      return fail(Code::kCorrupt, "{}: a row of more than {} bytes", where(), RecordReader::kMaxRecordBytes);
    }
    if (quoted) {
      if (c == '"') {
        quoted = false;
        after_quote = true;
      } else {
        cells.back() += char(c);
      }
      continue;
    }
    if (c == '"' && (after_quote || cells.back().empty())) {
      if (after_quote) cells.back() += '"';  // two of them stand for one
      quoted = true;
      after_quote = false;
      continue;
    }
    after_quote = false;
    if (c == ',') {
      cells.emplace_back();
    } else if (c == '\n') {
      if (cells.size() > 1 || !cells[0].empty()) return std::optional(std::move(cells));
      row_line_ = line_;  // an empty line
      any = false;
    } else if (c != '\r') {
      cells.back() += char(c);
    }
  }
}

Result<std::optional<nlohmann::json>> CsvReader::next() {
  if (columns_.empty()) {
    LONGKV_ASSIGN(auto head, row());
    if (!head) return std::optional<nlohmann::json>();
    columns_ = std::move(*head);
    if (columns_[0].starts_with("\xef\xbb\xbf")) columns_[0].erase(0, 3);
  }
  LONGKV_ASSIGN(const auto cells, row());
  if (!cells) return std::optional<nlohmann::json>();
  if (cells->size() != columns_.size()) {
    return fail(Code::kCorrupt, "{}: {} cells, the first row names {}", where(), cells->size(), columns_.size());
  }
  nlohmann::json record = nlohmann::json::object();
  for (size_t i = 0; i < columns_.size(); ++i) {
    const std::string& cell = (*cells)[i];
    if (first_bad_utf8(cell)) return fail(Code::kCorrupt, "{}: the cell of {} is not UTF-8", where(), columns_[i]);
    nlohmann::json list;
    if (cell.starts_with('[') && cell.size() < (size_t(1) << 20)) list = nlohmann::json::parse(cell, nullptr, false);
    record[columns_[i]] = list.is_array() ? list : nlohmann::json(cell);
  }
  return std::optional(std::move(record));
}

}  // namespace longkv
