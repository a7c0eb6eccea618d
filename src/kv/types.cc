#include "kv/types.h"

#include <utility>

namespace longkv {

namespace {
constexpr std::pair<KvType, const char*> kNames[] = {
    {KvType::kF32, "f32"},   {KvType::kF16, "f16"}, {KvType::kBf16, "bf16"},   {KvType::kQ8_0, "q8_0"},
    {KvType::kQ4_0, "q4_0"}, {KvType::kFp8, "fp8"}, {KvType::kKivi2, "kivi2"}, {KvType::kKivi4, "kivi4"},
};
}  // namespace

const char* kv_type_name(KvType type) {
  for (const auto& [t, name] : kNames) {
    if (t == type) return name;
  }
  return "unknown";
}

std::optional<KvType> parse_kv_type(std::string_view name) {
  for (const auto& [type, n] : kNames) {
    if (name == n) return type;
  }
  return std::nullopt;
}

int64_t kv_row_bytes(KvType type, int64_t dim) {
  switch (type) {
    case KvType::kF32: return dim * 4;
    case KvType::kF16:
    case KvType::kBf16: return dim * 2;
    case KvType::kQ8_0: return dim + dim / kKvQuantGroup * 2;
    case KvType::kQ4_0: return dim / 2 + dim / kKvQuantGroup * 2;
    case KvType::kFp8: return dim + 2;
    case KvType::kKivi2: return dim * 3 / 8;
    case KvType::kKivi4: return dim * 5 / 8;
  }
  return 0;
}

}  // namespace longkv
