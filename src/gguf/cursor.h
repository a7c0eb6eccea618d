// Bounded reading of little-endian values from a span of untrusted bytes.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include "base/error.h"

namespace longkv {

static_assert(std::endian::native == std::endian::little, "GGUF payloads are read in place");

class Cursor {
 public:
  explicit Cursor(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  uint64_t position() const { return at_; }
  uint64_t left() const { return bytes_.size() - at_; }

  // The next `n` bytes, of what the error message calls `what`. Errors: kCorrupt when fewer are left.
  Result<std::span<const uint8_t>> take(uint64_t n, std::string_view what) {
    if (n > left()) {
      return fail(Code::kCorrupt, "file truncated or corrupt: {} at byte {} needs {} bytes, {} are left", what, at_, n,
                  left());
    }
    const auto out = bytes_.subspan(at_, n);
    at_ += n;
    return out;
  }

  template <class T>
  Result<T> number(std::string_view what) {
    LONGKV_ASSIGN(const auto raw, take(sizeof(T), what));
    T value;
    std::memcpy(&value, raw.data(), sizeof value);
    return value;
  }

  // A 64-bit length and that many bytes.
  Result<std::string_view> string(uint64_t max_length, std::string_view what) {
    LONGKV_ASSIGN(const uint64_t length, number<uint64_t>(what));
    if (length > max_length) {
      return fail(Code::kCorrupt, "{} at byte {} claims {} bytes; at most {} are allowed", what, at_, length,
                  max_length);
    }
    LONGKV_ASSIGN(const auto raw, take(length, what));
    return std::string_view(reinterpret_cast<const char*>(raw.data()), raw.size());
  }

 private:
  std::span<const uint8_t> bytes_;
  uint64_t at_ = 0;
};

}  // namespace longkv
