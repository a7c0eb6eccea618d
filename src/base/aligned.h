// Scratch memory of floats on cache lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace longkv {

struct AlignedDeleter {
  void operator()(float* p) const { std::free(p); }
};
using AlignedFloats = std::unique_ptr<float, AlignedDeleter>;

// Not initialised. Throws std::bad_alloc as the standard containers do: never null.
inline AlignedFloats aligned_floats(size_t count) {
  constexpr size_t kLine = 64, kPerLine = kLine / sizeof(float);
  if (count > (SIZE_MAX - kLine) / sizeof(float)) throw std::bad_alloc();
  const size_t lines = count == 0 ? 1 : (count + kPerLine - 1) / kPerLine;
  AlignedFloats memory(static_cast<float*>(std::aligned_alloc(kLine, lines * kLine)));
  if (!memory) throw std::bad_alloc();
  return memory;
}

}  // namespace longkv
