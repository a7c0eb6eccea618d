// Builds GGUF files for tests: valid ones with few words, and ones with any chosen mistake.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/format.h"
#include "quant/tensor_type.h"

namespace longkv::test {

// Little-endian bytes, appended in order.
class Bytes {
 public:
  template <class T>
  Bytes& number(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Bytes& raw(std::string_view bytes) {
    out_.append(bytes);
    return *this;
  }
  // 64-bit length and text.
  Bytes& text(std::string_view s) { return number<uint64_t>(s.size()).raw(s); }
  // Header of an array; its elements follow by further calls.
  Bytes& array(GgufType element, uint64_t count) { return number(uint32_t(element)).number(count); }

  const std::string& str() const { return out_; }

 private:
  std::string out_;
};

class MkGguf {
 public:
  // Mistakes of the header; the defaults are right.
  std::string magic = "GGUF";
  uint32_t version = 3;
  std::optional<uint64_t> tensor_count;
  std::optional<uint64_t> pair_count;
  uint64_t alignment = kGgufDefaultAlignment;  // of the data; write the key yourself when it differs
  std::string trailing;                        // bytes behind the last tensor

  MkGguf& u8(std::string_view key, uint8_t v) { return scalar(key, GgufType::kU8, v); }
  MkGguf& i8(std::string_view key, int8_t v) { return scalar(key, GgufType::kI8, v); }
  MkGguf& u16(std::string_view key, uint16_t v) { return scalar(key, GgufType::kU16, v); }
  MkGguf& i16(std::string_view key, int16_t v) { return scalar(key, GgufType::kI16, v); }
  MkGguf& u32(std::string_view key, uint32_t v) { return scalar(key, GgufType::kU32, v); }
  MkGguf& i32(std::string_view key, int32_t v) { return scalar(key, GgufType::kI32, v); }
  MkGguf& u64(std::string_view key, uint64_t v) { return scalar(key, GgufType::kU64, v); }
  MkGguf& i64(std::string_view key, int64_t v) { return scalar(key, GgufType::kI64, v); }
  MkGguf& f32(std::string_view key, float v) { return scalar(key, GgufType::kF32, v); }
  MkGguf& f64(std::string_view key, double v) { return scalar(key, GgufType::kF64, v); }
  MkGguf& boolean(std::string_view key, bool v) { return scalar(key, GgufType::kBool, uint8_t(v)); }
  MkGguf& string(std::string_view key, std::string_view v);
  MkGguf& strings(std::string_view key, const std::vector<std::string>& v);
  MkGguf& i32s(std::string_view key, const std::vector<int32_t>& v) { return array(key, GgufType::kI32, v); }
  MkGguf& u32s(std::string_view key, const std::vector<uint32_t>& v) { return array(key, GgufType::kU32, v); }
  MkGguf& f32s(std::string_view key, const std::vector<float>& v) { return array(key, GgufType::kF32, v); }
  MkGguf& bools(std::string_view key, const std::vector<uint8_t>& v) { return array(key, GgufType::kBool, v); }
  // Any type id with any payload.
  MkGguf& raw_pair(std::string_view key, uint32_t type, std::string_view payload);

  // A tensor whose data follow the previous one's at the next multiple of `alignment`.
  MkGguf& tensor(std::string_view name, TensorType type, const std::vector<uint64_t>& dims, std::string_view data);
  // The same with as many zero bytes as the dimensions need.
  MkGguf& zeros(std::string_view name, TensorType type, const std::vector<uint64_t>& dims);
  MkGguf& f32_tensor(std::string_view name, const std::vector<uint64_t>& dims, const std::vector<float>& values);
  // Only a record, true or not; adds no data. `n_dims` may differ from dims.size().
  MkGguf& raw_record(std::string_view name, uint32_t type, const std::vector<uint64_t>& dims, uint64_t offset,
                     std::optional<uint32_t> n_dims = std::nullopt);

  std::string bytes() const;
  // Writes bytes() to a temporary file and returns its path.
  std::string write(const std::string& name) const;

 private:
  template <class T>
  MkGguf& scalar(std::string_view key, GgufType type, T v) {
    return raw_pair(key, uint32_t(type), Bytes().number(v).str());
  }
  template <class T>
  MkGguf& array(std::string_view key, GgufType element, const std::vector<T>& v) {
    Bytes b;
    b.array(element, v.size());
    for (const T& x : v) b.number(x);
    return raw_pair(key, uint32_t(GgufType::kArray), b.str());
  }

  Bytes pairs_;
  Bytes records_;
  std::string data_;
  uint64_t pairs_written_ = 0;
  uint64_t records_written_ = 0;
};

// Writes `content` to a temporary file and returns its path.
std::string write_temp(const std::string& name, std::string_view content);

}  // namespace longkv::test
