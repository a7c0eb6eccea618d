// Numbers of the GGUF container format, and the bounds longkv puts on them.
#pragma once

#include <cstdint>

namespace longkv {

enum class GgufType : uint32_t {
  kU8 = 0,
  kI8 = 1,
  kU16 = 2,
  kI16 = 3,
  kU32 = 4,
  kI32 = 5,
  kF32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kU64 = 10,
  kI64 = 11,
  kF64 = 12,
};

constexpr uint32_t kGgufTypeCount = 13;
constexpr uint64_t kGgufDefaultAlignment = 32;
constexpr uint64_t kGgufMinAlignment = 8;  // of the format; fp32 data is then aligned for the CPU
constexpr uint64_t kGgufMaxAlignment = uint64_t(1) << 24;
constexpr uint64_t kGgufMaxString = uint64_t(1) << 30;
constexpr uint64_t kGgufMaxArray = uint64_t(1) << 30;
constexpr uint64_t kGgufMaxKey = 65535;
constexpr uint64_t kGgufMaxTensorName = 63;
constexpr int kGgufMaxDims = 4;
constexpr int kGgufMaxNesting = 8;  // arrays inside arrays

// Bytes of a number or bool; 0 for strings, arrays and unknown ids.
constexpr uint64_t gguf_scalar_bytes(uint32_t type) {
  switch (GgufType(type)) {
    case GgufType::kU8:
    case GgufType::kI8:
    case GgufType::kBool: return 1;
    case GgufType::kU16:
    case GgufType::kI16: return 2;
    case GgufType::kU32:
    case GgufType::kI32:
    case GgufType::kF32: return 4;
    case GgufType::kU64:
    case GgufType::kI64:
    case GgufType::kF64: return 8;
    default: return 0;
  }
}

// "u32", "string", ...; "unknown" for other ids.
const char* gguf_type_name(uint32_t type);

// Name of a tensor type id that exists or existed in the format but that longkv cannot read; nullptr otherwise.
const char* gguf_foreign_tensor_type(uint32_t id);
// Ids whose formats were withdrawn: the model must be converted again.
bool gguf_retired_tensor_type(uint32_t id);

}  // namespace longkv
