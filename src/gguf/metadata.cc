#include "gguf/metadata.h"

#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "base/error.h"
#include "gguf/cursor.h"
#include "gguf/format.h"
#include "gguf/printable.h"

namespace longkv {

namespace {

template <class T>
T load(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// An integer of any width; nullopt for other types and for unsigned values above the int64 range.
std::optional<int64_t> decode_integer(uint32_t type, const uint8_t* p) {
  switch (GgufType(type)) {
    case GgufType::kU8: return load<uint8_t>(p);
    case GgufType::kI8: return load<int8_t>(p);
    case GgufType::kU16: return load<uint16_t>(p);
    case GgufType::kI16: return load<int16_t>(p);
    case GgufType::kU32: return load<uint32_t>(p);
    case GgufType::kI32: return load<int32_t>(p);
    case GgufType::kI64: return load<int64_t>(p);
    case GgufType::kU64: {
      const auto value = load<uint64_t>(p);
      if (value > uint64_t(std::numeric_limits<int64_t>::max())) return std::nullopt;
      return int64_t(value);
    }
    default: return std::nullopt;
  }
}

bool is_integer(uint32_t type) {
  return gguf_scalar_bytes(type) > 0 && type != uint32_t(GgufType::kBool) && type != uint32_t(GgufType::kF32) &&
         type != uint32_t(GgufType::kF64);
}

bool is_real(uint32_t type) { return type == uint32_t(GgufType::kF32) || type == uint32_t(GgufType::kF64); }

double decode_real(uint32_t type, const uint8_t* p) {
  return type == uint32_t(GgufType::kF32) ? double(load<float>(p)) : load<double>(p);
}

std::string describe_type(const GgufValue& value) {
  if (value.type != uint32_t(GgufType::kArray)) return gguf_type_name(value.type);
  return fmt::format("array of {} {}", value.count, gguf_type_name(value.element_type));
}

Status wrong_type(std::string_view key, const GgufValue& value, const char* expected) {
  return fail(Code::kCorrupt, "key '{}' is {}; expected {}", printable(key), describe_type(value), expected);
}

Result<const GgufValue*> lookup(const Metadata& metadata, std::string_view key) {
  const auto it = metadata.all().find(key);
  if (it == metadata.all().end()) return fail(Code::kCorrupt, "key '{}' is missing", printable(key));
  return &it->second;
}

// A scalar or array seen as a sequence of equally wide elements.
struct Elements {
  uint32_t type;
  uint64_t count;
  uint64_t stride;
  const uint8_t* data;
};

Result<Elements> elements_of(const Metadata& metadata, std::string_view key, int64_t expected,
                             bool (*accepts)(uint32_t), const char* wanted) {
  LONGKV_ASSIGN(const GgufValue* value, lookup(metadata, key));
  const bool array = value->type == uint32_t(GgufType::kArray);
  const uint32_t type = array ? value->element_type : value->type;
  if (!accepts(type)) return wrong_type(key, *value, wanted);
  if (array && expected >= 0 && value->count != uint64_t(expected)) {
    return fail(Code::kCorrupt, "key '{}' has {} elements; expected {}", printable(key), value->count, expected);
  }
  // A stride of 0 repeats the scalar.
  const uint64_t count = array ? value->count : uint64_t(expected < 0 ? 1 : expected);
  return Elements{type, count, array ? gguf_scalar_bytes(type) : 0, value->bytes.data()};
}

Result<int64_t> checked_integer(std::string_view key, uint32_t type, const uint8_t* p, int64_t min, int64_t max) {
  const auto value = decode_integer(type, p);
  if (!value) {
    return fail(Code::kCorrupt, "key '{}' is {}; expected {} to {}", printable(key), load<uint64_t>(p), min, max);
  }
  if (*value < min || *value > max) {
    return fail(Code::kCorrupt, "key '{}' is {}; expected {} to {}", printable(key), *value, min, max);
  }
  return *value;
}

bool is_bool(uint32_t type) { return type == uint32_t(GgufType::kBool); }

}  // namespace

bool Metadata::has(std::string_view key) const { return values_.find(key) != values_.end(); }

Result<int64_t> Metadata::integer(std::string_view key, int64_t min, int64_t max) const {
  LONGKV_ASSIGN(const GgufValue* value, lookup(*this, key));
  if (!is_integer(value->type)) return wrong_type(key, *value, "an integer");
  return checked_integer(key, value->type, value->bytes.data(), min, max);
}

Result<double> Metadata::real(std::string_view key) const {
  LONGKV_ASSIGN(const GgufValue* value, lookup(*this, key));
  if (!is_real(value->type)) return wrong_type(key, *value, "f32 or f64");
  const double number = decode_real(value->type, value->bytes.data());
  if (!std::isfinite(number))
    return fail(Code::kCorrupt, "key '{}' is {}; expected a finite number", printable(key), number);
  return number;
}

Result<bool> Metadata::boolean(std::string_view key) const {
  LONGKV_ASSIGN(const GgufValue* value, lookup(*this, key));
  if (!is_bool(value->type)) return wrong_type(key, *value, "a bool");
  return value->bytes[0] != 0;
}

Result<std::string_view> Metadata::string(std::string_view key) const {
  LONGKV_ASSIGN(const GgufValue* value, lookup(*this, key));
  if (value->type != uint32_t(GgufType::kString)) return wrong_type(key, *value, "a string");
  return std::string_view(reinterpret_cast<const char*>(value->bytes.data()), value->bytes.size());
}

Result<std::vector<int64_t>> Metadata::integers(std::string_view key, int64_t expected, int64_t min,
                                                int64_t max) const {
  LONGKV_ASSIGN(const Elements e, elements_of(*this, key, expected, is_integer, "integers"));
  std::vector<int64_t> out;
  out.reserve(e.count);
  for (uint64_t i = 0; i < e.count; ++i) {
    LONGKV_ASSIGN(const int64_t value, checked_integer(key, e.type, e.data + i * e.stride, min, max));
    out.push_back(value);
  }
  return out;
}

Result<std::vector<double>> Metadata::reals(std::string_view key, int64_t expected) const {
  LONGKV_ASSIGN(const Elements e, elements_of(*this, key, expected, is_real, "f32 or f64 numbers"));
  std::vector<double> out;
  out.reserve(e.count);
  for (uint64_t i = 0; i < e.count; ++i) out.push_back(decode_real(e.type, e.data + i * e.stride));
  return out;
}

Result<std::vector<bool>> Metadata::booleans(std::string_view key, int64_t expected) const {
  LONGKV_ASSIGN(const Elements e, elements_of(*this, key, expected, is_bool, "bools"));
  std::vector<bool> out;
  out.reserve(e.count);
  for (uint64_t i = 0; i < e.count; ++i) out.push_back(e.data[i * e.stride] != 0);
  return out;
}

Result<std::vector<std::string_view>> Metadata::strings(std::string_view key) const {
  LONGKV_ASSIGN(const GgufValue* value, lookup(*this, key));
  if (value->type != uint32_t(GgufType::kArray) || value->element_type != uint32_t(GgufType::kString)) {
    return wrong_type(key, *value, "an array of strings");
  }
  std::vector<std::string_view> out;
  out.reserve(value->count);
  Cursor cursor(value->bytes);
  for (uint64_t i = 0; i < value->count; ++i) {
    LONGKV_ASSIGN(const auto text, cursor.string(kGgufMaxString, "array string"));
    out.push_back(text);
  }
  return out;
}

Result<int64_t> Metadata::integer_or(std::string_view key, int64_t min, int64_t max, int64_t fallback) const {
  if (!has(key)) return fallback;
  return integer(key, min, max);
}

Result<double> Metadata::real_or(std::string_view key, double fallback) const {
  if (!has(key)) return fallback;
  return real(key);
}

Result<bool> Metadata::boolean_or(std::string_view key, bool fallback) const {
  if (!has(key)) return fallback;
  return boolean(key);
}

Result<std::string> Metadata::string_or(std::string_view key, std::string_view fallback) const {
  if (!has(key)) return std::string(fallback);
  LONGKV_ASSIGN(const auto text, string(key));
  return std::string(text);
}

Status Metadata::insert(std::string key, GgufValue value) {
  const auto [it, inserted] = values_.emplace(std::move(key), value);
  if (!inserted) return fail(Code::kCorrupt, "key '{}' appears twice", printable(it->first));
  return {};
}

}  // namespace longkv
