// Members of a request's JSON object: read with their types and limits; the first mistake is kept, unknown names are
// one.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "server/api_error.h"

namespace longkv::server {

// Text of a request's body to JSON, members in the order in which they came: templates show them so. Errors: not JSON,
// not an object, nested deeper than 64, an object of more than 1024 members, a whole number of more than 64 bits.
std::optional<ApiError> parse_body(const std::string& body, nlohmann::ordered_json& out);

// A whole number, also one written with a point (3.0: some clients know no integers); nullopt where it is none or not
// of 64 bits.
std::optional<int64_t> whole_number(const nlohmann::ordered_json& value);

// Characters of a text that is known to be UTF-8.
size_t utf8_characters(const std::string& utf8);

class Fields {
 public:
  // `json` must be an object and outlive this.
  explicit Fields(const nlohmann::ordered_json& json) : json_(json) {}

  // Absent and null are the same: nullptr or nullopt.
  const nlohmann::ordered_json* any(const char* name);
  std::optional<int64_t> integer(const char* name, int64_t least, int64_t most);
  std::optional<double> number(const char* name, double least, double most);
  std::optional<bool> boolean(const char* name);
  std::optional<std::string> text(const char* name, size_t most_characters);
  // Names that mean nothing here and are accepted, as OpenAI does.
  void ignore(std::initializer_list<const char*> names);
  // Names that would change the answer if they had another value than this.
  void must_be(const char* name, const nlohmann::ordered_json& value, const char* why);

  void fail(const char* name, const std::string& message);
  void fail(const char* name, const Status& status);
  // The same for what is written as it should be and cannot be done, because it contradicts itself: HTTP's 422.
  void contradicts(const char* name, const std::string& message);
  bool failed() const { return error_.has_value(); }
  // After everything was read.
  const std::optional<ApiError>& finish();

 private:
  const nlohmann::ordered_json& json_;
  std::set<std::string, std::less<>> known_;
  std::optional<ApiError> error_;
};

}  // namespace longkv::server
