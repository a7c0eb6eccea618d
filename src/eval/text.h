// Small operations on text that generators, readers and scorers share.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/trim.h"
#include "longkv/status.h"

namespace longkv {

std::string lower_ascii(std::string_view text);
std::vector<std::string> split_white(std::string_view text);
std::vector<std::string> split_lines(std::string_view text);
std::string join(const std::vector<std::string>& pieces, std::string_view separator);
std::string replace_all(std::string text, std::string_view from, std::string_view to);
bool is_digit(char c);
// Runs of ASCII digits, in order.
std::vector<std::string> digit_runs(std::string_view text);
// Whether `word` occurs with neither a letter, a digit nor an underscore beside it.
bool has_word(std::string_view text, std::string_view word);

// Offset of the first byte that is no UTF-8.
std::optional<size_t> first_bad_utf8(std::string_view text);
std::vector<uint32_t> code_points(std::string_view text);  // invalid bytes as U+FFFD

// The whole of a file, unpacked when it is gzip. Errors: kIo, kCorrupt (damaged gzip), kInvalidArgument above `limit`.
Result<std::string> read_packed_file(const std::string& path, uint64_t limit = uint64_t(1) << 31);

}  // namespace longkv
