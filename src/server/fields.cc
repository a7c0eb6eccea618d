#include "server/fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>
#include <utility>

namespace longkv::server {

namespace {

constexpr int kMaxDepth = 64;
constexpr int kMaxMembers = 1024;

// A whole number that 64 bits do not hold: JSON's reader would make a rounded one of it without a word.
bool too_long(std::string_view number) {
  if (number.find_first_of(".eE") != std::string_view::npos) return false;
  int64_t negative = 0;
  uint64_t positive = 0;
  const char *begin = number.data(), *end = begin + number.size();
  const auto read =
      number.front() == '-' ? std::from_chars(begin, end, negative) : std::from_chars(begin, end, positive);
  return read.ec == std::errc::result_out_of_range;
}

// What is wrong with the shape of a text, looked at first, so that nothing recursive meets deep nesting, nothing that
// looks for members one by one meets many, and no number is altered.
std::optional<ApiError> bad_shape(const std::string& text) {
  struct Level {
    bool object = false;
    int members = 0;
  };
  Level levels[kMaxDepth + 1];
  int depth = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        quoted = false;
      }
    } else if (c == '"') {
      quoted = true;
    } else if (c == '-' || (c >= '0' && c <= '9')) {
      const size_t end = std::min(text.find_first_not_of("0123456789+-.eE", i), text.size());
      const std::string_view number = std::string_view(text).substr(i, end - i);
      if (too_long(number)) {
        const std::string shown(number.substr(0, 48));
        return ApiError{.status = 422,
                        .message = fmt::format("the number {}{} of the body does not fit 64 bits and would be altered; "
                                               "send it as a string",
                                               shown, number.size() > shown.size() ? "..." : "")};
      }
      i = end - 1;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxDepth) return ApiError{.message = fmt::format("the body is nested deeper than {}", kMaxDepth)};
      levels[depth] = {c == '{', 1};
    } else if (c == ']' || c == '}') {
      depth = std::max(depth - 1, 0);
    } else if (c == ',' && levels[depth].object && ++levels[depth].members > kMaxMembers) {
      return ApiError{.message = fmt::format("an object of the body has more than {} members", kMaxMembers)};
    }
  }
  return {};
}

}  // namespace

std::optional<ApiError> parse_body(const std::string& body, nlohmann::ordered_json& out) {
  if (body.empty()) return ApiError{.message = "the body is empty; a JSON object is expected"};
  if (auto wrong = bad_shape(body)) return wrong;
  try {
    out = nlohmann::ordered_json::parse(body);
  } catch (const nlohmann::ordered_json::exception& e) {
    std::string what = e.what();
    // The library quotes what it read last, which may be somebody's text.
    what = what.substr(0, what.find("; last read"));
    return ApiError{.message = "the body is not JSON: " + what.substr(0, 200)};
  }
  if (!out.is_object()) return ApiError{.message = "the body must be a JSON object"};
  return {};
}

std::optional<int64_t> whole_number(const nlohmann::ordered_json& value) {
  if (value.is_number_float()) {
    const double number = value.get<double>();
    if (std::floor(number) != number || std::fabs(number) >= 0x1p63) return {};
    return int64_t(number);
  }
  const bool huge = value.is_number_unsigned() && value.get<uint64_t>() > uint64_t(INT64_MAX);
  if (!value.is_number_integer() || huge) return {};
  return value.get<int64_t>();
}

size_t utf8_characters(const std::string& utf8) {
  return size_t(std::count_if(utf8.begin(), utf8.end(), [](char c) { return (uint8_t(c) & 0xc0) != 0x80; }));
}

const nlohmann::ordered_json* Fields::any(const char* name) {
  known_.insert(name);
  const auto at = json_.find(name);
  return at == json_.end() || at->is_null() ? nullptr : &*at;
}

std::optional<int64_t> Fields::integer(const char* name, int64_t least, int64_t most) {
  const nlohmann::ordered_json* value = any(name);
  if (value == nullptr) return {};
  const std::optional<int64_t> number = whole_number(*value);
  if (!number || *number < least || *number > most) {
    fail(name, fmt::format("'{}' must be a whole number from {} to {}", name, least, most));
    return {};
  }
  return number;
}

std::optional<double> Fields::number(const char* name, double least, double most) {
  const nlohmann::ordered_json* value = any(name);
  if (value == nullptr) return {};
  const double number = value->is_number() ? value->get<double>() : NAN;
  if (!(number >= least && number <= most)) {
    fail(name, fmt::format("'{}' must be a number from {} to {}", name, least, most));
    return {};
  }
  return number;
}

std::optional<bool> Fields::boolean(const char* name) {
  const nlohmann::ordered_json* value = any(name);
  if (value == nullptr) return {};
  if (!value->is_boolean()) {
    fail(name, fmt::format("'{}' must be true or false", name));
    return {};
  }
  return value->get<bool>();
}

std::optional<std::string> Fields::text(const char* name, size_t most_characters) {
  const nlohmann::ordered_json* value = any(name);
  if (value == nullptr) return {};
  if (!value->is_string() || utf8_characters(value->get_ref<const std::string&>()) > most_characters) {
    fail(name, fmt::format("'{}' must be a string of at most {} characters", name, most_characters));
    return {};
  }
  return value->get<std::string>();
}

void Fields::ignore(std::initializer_list<const char*> names) {
  for (const char* name : names) known_.insert(name);
}

void Fields::must_be(const char* name, const nlohmann::ordered_json& value, const char* why) {
  const nlohmann::ordered_json* found = any(name);
  if (found != nullptr && *found != value) fail(name, fmt::format("'{}': {}", name, why));
}

void Fields::fail(const char* name, const std::string& message) {
  if (!error_) error_ = ApiError{.message = message, .param = name};
}

void Fields::fail(const char* name, const Status& status) {
  if (error_) return;
  error_ = api_error(status);
  error_->param = name;
}

void Fields::contradicts(const char* name, const std::string& message) {
  if (!error_) error_ = ApiError{.status = 422, .message = message, .param = name};
}

const std::optional<ApiError>& Fields::finish() {
  if (error_) return error_;
  for (const auto& [name, value] : json_.items()) {
    if (known_.contains(name)) continue;
    const std::string shown = name.substr(0, 64);
    error_ = ApiError{.message = "Unrecognized request argument supplied: " + shown, .param = shown};
    break;
  }
  return error_;
}

}  // namespace longkv::server
