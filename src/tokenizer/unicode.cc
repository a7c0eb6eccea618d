#include "tokenizer/unicode.h"

#include <algorithm>
#include <memory>

namespace longkv {

namespace {

constexpr size_t kCodePoints = 0x110000;

std::unique_ptr<uint8_t[]> expand_runs() {
  auto table = std::make_unique<uint8_t[]>(kCodePoints);
  for (size_t i = 0; i < unicode_detail::kRunCount; ++i) {
    const uint32_t first = unicode_detail::kRuns[i] >> 8;
    const uint32_t next = i + 1 < unicode_detail::kRunCount ? unicode_detail::kRuns[i + 1] >> 8 : kCodePoints;
    std::fill(table.get() + first, table.get() + next, static_cast<uint8_t>(unicode_detail::kRuns[i] & 0xFF));
  }
  return table;
}

}  // namespace

const uint8_t* char_class_table() {
  static const std::unique_ptr<uint8_t[]> table = expand_runs();
  return table.get();
}

}  // namespace longkv
