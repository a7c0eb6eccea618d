// Several arrays in one buffer of a card.
#pragma once

#include <cstdint>

#include "base/checked.h"

namespace longkv {

// Hands out pieces of one buffer, 256 bytes apart. With memory nullptr it only counts.
class Carver {
 public:
  explicit Carver(uint8_t* memory) : memory_(memory) {}
  template <class T>
  T* take(int64_t n) {
    T* p = reinterpret_cast<T*>(memory_ == nullptr ? nullptr : memory_ + used_);
    used_ += round_up(n * int64_t(sizeof(T)), 256);
    return p;
  }
  int64_t used() const { return used_; }

 private:
  uint8_t* memory_;
  int64_t used_ = 0;
};

}  // namespace longkv
