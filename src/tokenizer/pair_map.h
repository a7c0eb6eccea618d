// Open-addressing map from two 32-bit numbers to a PairMerge.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "tokenizer/merger.h"

namespace longkv {

class PairMap {
 public:
  explicit PairMap(size_t count = 0) {
    size_t slots = 16;
    while (slots < 2 * count) slots *= 2;
    slots_.resize(slots);
  }

  // nullptr when the pair is absent.
  const PairMerge* find(uint32_t left, uint32_t right) const {
    const uint64_t key = make_key(left, right);
    for (size_t i = slot_of(key);; i = (i + 1) & (slots_.size() - 1)) {
      if (slots_[i].key == key) return &slots_[i].value;
      if (slots_[i].key == kEmpty) return nullptr;
    }
  }

  // Keeps the first value of a pair. The pair (2^32-1, 2^32-1) is reserved.
  void insert(uint32_t left, uint32_t right, PairMerge value) {
    if (2 * (used_ + 1) > slots_.size()) grow();
    const uint64_t key = make_key(left, right);
    for (size_t i = slot_of(key);; i = (i + 1) & (slots_.size() - 1)) {
      if (slots_[i].key == key) return;
      if (slots_[i].key == kEmpty) {
        slots_[i] = {key, value};
        ++used_;
        return;
      }
    }
  }

  size_t size() const { return used_; }

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  struct Slot {
    uint64_t key = kEmpty;
    PairMerge value;
  };

  static uint64_t make_key(uint32_t left, uint32_t right) { return uint64_t{left} << 32 | right; }
  // Fibonacci hashing after folding the halves; the multiplier is 2^64 divided by the golden ratio.
  size_t slot_of(uint64_t key) const {
    key ^= key >> 29;
    return static_cast<size_t>((key * 0x9E3779B97F4A7C15u) >> 20) & (slots_.size() - 1);
  }
  void grow() {
    PairMap larger(slots_.size());
    for (const Slot& slot : slots_) {
      if (slot.key != kEmpty) {
        larger.insert(static_cast<uint32_t>(slot.key >> 32), static_cast<uint32_t>(slot.key), slot.value);
      }
    }
    *this = std::move(larger);
  }

  std::vector<Slot> slots_;
  size_t used_ = 0;
};

}  // namespace longkv
