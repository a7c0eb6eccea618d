// Writes GGUF version 3 files: sidecars such as learned channel masks, and models made by tests and tools.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/format.h"
#include "longkv/status.h"
#include "quant/tensor_type.h"

namespace longkv {

class GgufWriter {
 public:
  // Pairs are written in the order of the calls. Errors: kInvalidArgument for a key that is empty, too long or was
  // already given.
  Status add_u32(std::string_view key, uint32_t value) { return add_number(key, GgufType::kU32, value); }
  Status add_i32(std::string_view key, int32_t value) { return add_number(key, GgufType::kI32, value); }
  Status add_u64(std::string_view key, uint64_t value) { return add_number(key, GgufType::kU64, value); }
  Status add_i64(std::string_view key, int64_t value) { return add_number(key, GgufType::kI64, value); }
  Status add_f32(std::string_view key, float value) { return add_number(key, GgufType::kF32, value); }
  Status add_f64(std::string_view key, double value) { return add_number(key, GgufType::kF64, value); }
  Status add_bool(std::string_view key, bool value) { return add_number(key, GgufType::kBool, uint8_t(value)); }
  Status add_string(std::string_view key, std::string_view value);
  Status add_strings(std::string_view key, std::span<const std::string> values);
  Status add_i32s(std::string_view key, std::span<const int32_t> values) {
    return add_numbers(key, GgufType::kI32, values);
  }
  Status add_u32s(std::string_view key, std::span<const uint32_t> values) {
    return add_numbers(key, GgufType::kU32, values);
  }
  Status add_f32s(std::string_view key, std::span<const float> values) {
    return add_numbers(key, GgufType::kF32, values);
  }

  // `data` is not copied and must live until write(). Errors: kInvalidArgument when the name is empty, longer than 63
  // bytes or taken, when there are not 1 to 4 positive dimensions, or when `data` has not exactly the bytes they need.
  Status add_tensor(std::string_view name, TensorType type, std::span<const int64_t> dims,
                    std::span<const uint8_t> data);

  // Replaces `path` only when everything is on the device (base/atomic_file.h). Errors: kIo.
  Status write(const std::string& path) const;

 private:
  struct Tensor {
    std::string name;
    uint64_t offset;
    std::span<const uint8_t> data;
  };

  Status begin_pair(std::string_view key, GgufType type);
  template <class T>
  Status add_number(std::string_view key, GgufType type, T value);
  template <class T>
  Status add_numbers(std::string_view key, GgufType element, std::span<const T> values);

  std::vector<std::string> keys_;
  std::string pairs_;    // encoded
  std::string records_;  // encoded
  std::vector<Tensor> tensors_;
  uint64_t data_end_ = 0;  // of the last tensor, from the start of the data section
};

}  // namespace longkv
