// Exact lookup of strings by open addressing. The strings lie elsewhere and must outlive the index.
#pragma once

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace longkv {

class StringIndex {
 public:
  // Room for `count` strings at half load.
  explicit StringIndex(size_t count = 0) {
    size_t slots = 16;
    while (slots < 2 * count) slots *= 2;
    slots_.resize(slots);
  }

  // The value of `key`, or -1.
  int32_t find(std::string_view key) const {
    const uint64_t hash = XXH3_64bits(key.data(), key.size());
    for (size_t i = hash & mask();; i = (i + 1) & mask()) {
      const Slot& slot = slots_[i];
      if (slot.value < 0) return -1;
      if (slot.hash == static_cast<uint32_t>(hash >> 32) && slot.key == key) return slot.value;
    }
  }

  // Keeps the first value when the key is already there. `value` >= 0.
  void insert(std::string_view key, int32_t value) {
    if (2 * (used_ + 1) > slots_.size()) grow();
    const uint64_t hash = XXH3_64bits(key.data(), key.size());
    for (size_t i = hash & mask();; i = (i + 1) & mask()) {
      Slot& slot = slots_[i];
      if (slot.value < 0) {
        slot = {key, static_cast<uint32_t>(hash >> 32), value};
        ++used_;
        return;
      }
      if (slot.hash == static_cast<uint32_t>(hash >> 32) && slot.key == key) return;
    }
  }

  size_t size() const { return used_; }

 private:
  struct Slot {
    std::string_view key;
    uint32_t hash = 0;
    int32_t value = -1;
  };

  size_t mask() const { return slots_.size() - 1; }
  void grow() {
    StringIndex larger(slots_.size());
    for (const Slot& slot : slots_) {
      if (slot.value >= 0) larger.insert(slot.key, slot.value);
    }
    *this = std::move(larger);
  }

  std::vector<Slot> slots_;
  size_t used_ = 0;
};

}  // namespace longkv
