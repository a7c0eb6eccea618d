#include "quant/tensor_type.h"

#include <limits>

#include "base/checked.h"
#include "base/error.h"
#include "quant/block_formats.h"

namespace longkv {

namespace {

struct Entry {
  TensorType type;
  TensorTypeInfo info;
};

constexpr Entry kTypes[] = {
    {TensorType::kF32, {"f32", 1, 4}},
    {TensorType::kF16, {"f16", 1, 2}},
    {TensorType::kBF16, {"bf16", 1, 2}},
    {TensorType::kQ4_0, {"q4_0", kSmallBlock, sizeof(BlockQ4_0)}},
    {TensorType::kQ4_1, {"q4_1", kSmallBlock, sizeof(BlockQ4_1)}},
    {TensorType::kQ5_0, {"q5_0", kSmallBlock, sizeof(BlockQ5_0)}},
    {TensorType::kQ5_1, {"q5_1", kSmallBlock, sizeof(BlockQ5_1)}},
    {TensorType::kQ8_0, {"q8_0", kSmallBlock, sizeof(BlockQ8_0)}},
    {TensorType::kQ2_K, {"q2_K", kSuperBlock, sizeof(BlockQ2_K)}},
    {TensorType::kQ3_K, {"q3_K", kSuperBlock, sizeof(BlockQ3_K)}},
    {TensorType::kQ4_K, {"q4_K", kSuperBlock, sizeof(BlockQ4_K)}},
    {TensorType::kQ5_K, {"q5_K", kSuperBlock, sizeof(BlockQ5_K)}},
    {TensorType::kQ6_K, {"q6_K", kSuperBlock, sizeof(BlockQ6_K)}},
    {TensorType::kIQ4_NL, {"iq4_nl", kSmallBlock, sizeof(BlockIQ4_NL)}},
    {TensorType::kIQ4_XS, {"iq4_xs", kSuperBlock, sizeof(BlockIQ4_XS)}},
};

}  // namespace

const TensorTypeInfo* tensor_type_info(TensorType type) {
  for (const Entry& entry : kTypes) {
    if (entry.type == type) return &entry.info;
  }
  return nullptr;
}

Result<int64_t> row_bytes(TensorType type, int64_t cols) {
  const TensorTypeInfo* info = tensor_type_info(type);
  if (info == nullptr) return fail(Code::kUnsupported, "tensor type {} is not supported", uint32_t(type));
  if (cols < 0 || cols % info->block_values != 0) {
    return fail(Code::kCorrupt, "a row of {} values is not a whole number of {} blocks ({} values each)", cols,
                info->name, info->block_values);
  }
  const auto bytes = checked_mul(uint64_t(cols / info->block_values), uint64_t(info->block_bytes));
  if (!bytes || *bytes > uint64_t(std::numeric_limits<int64_t>::max())) {
    return fail(Code::kCorrupt, "a row of {} {} values is larger than 2^63 bytes", cols, info->name);
  }
  return int64_t(*bytes);
}

}  // namespace longkv
