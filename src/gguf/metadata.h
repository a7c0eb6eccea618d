// Typed, range-checked access to the key-value pairs of a GGUF file.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "longkv/status.h"

namespace longkv {

// One value as it lies in the mapped file; arrays stay unparsed until they are asked for. `bytes` is the number or bool
// itself, the characters of a string, or the elements of an array one after the other as encoded in the file.
struct GgufValue {
  uint32_t type = 0;               // a GgufType (gguf/format.h), always a known one
  uint32_t element_type = 0;       // of arrays
  uint64_t count = 0;              // of arrays; 1 otherwise
  std::span<const uint8_t> bytes;  // the encoded payload, bounds already checked
};

class Metadata {
 public:
  bool has(std::string_view key) const;
  const std::map<std::string, GgufValue, std::less<>>& all() const { return values_; }

  // Every getter: kCorrupt when the key is absent and when the value has another type or is out of range.
  // Integers accept any integer type; reals accept f32 and f64 and, as single values, must be finite.
  Result<int64_t> integer(std::string_view key, int64_t min, int64_t max) const;
  Result<double> real(std::string_view key) const;
  Result<bool> boolean(std::string_view key) const;
  Result<std::string_view> string(std::string_view key) const;
  // A scalar is broadcast to `expected` elements; an array must have exactly `expected` (any number if expected < 0).
  Result<std::vector<int64_t>> integers(std::string_view key, int64_t expected, int64_t min, int64_t max) const;
  Result<std::vector<double>> reals(std::string_view key, int64_t expected) const;
  Result<std::vector<bool>> booleans(std::string_view key, int64_t expected) const;
  Result<std::vector<std::string_view>> strings(std::string_view key) const;  // views into the mapping

  // The same with a default for an absent key; a present key of wrong type is still an error.
  Result<int64_t> integer_or(std::string_view key, int64_t min, int64_t max, int64_t fallback) const;
  Result<double> real_or(std::string_view key, double fallback) const;
  Result<bool> boolean_or(std::string_view key, bool fallback) const;
  Result<std::string> string_or(std::string_view key, std::string_view fallback) const;

  // Used by the reader. Errors: kCorrupt on a duplicate key.
  Status insert(std::string key, GgufValue value);

 private:
  std::map<std::string, GgufValue, std::less<>> values_;
};

}  // namespace longkv
