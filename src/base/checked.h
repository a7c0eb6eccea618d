// Overflow-checked arithmetic for every number that comes from a file or a user.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

namespace longkv {

inline std::optional<uint64_t> checked_add(uint64_t a, uint64_t b) {
  uint64_t r;
  if (__builtin_add_overflow(a, b, &r)) return std::nullopt;
  return r;
}

inline std::optional<uint64_t> checked_mul(uint64_t a, uint64_t b) {
  uint64_t r;
  if (__builtin_mul_overflow(a, b, &r)) return std::nullopt;
  return r;
}

// Rounds `v` up to a multiple of `alignment` (a power of two); nullopt on overflow.
inline std::optional<uint64_t> checked_align(uint64_t v, uint64_t alignment) {
  auto sum = checked_add(v, alignment - 1);
  if (!sum) return std::nullopt;
  return *sum & ~(alignment - 1);
}

// For numbers of our own that cannot overflow.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace longkv
