#include "eval/sha256.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace longkv {

namespace {

__extension__ using Wide = unsigned __int128;

// First 32 bits of the fractional parts of the cube roots of the first 64 primes.
struct Constants {
  uint32_t k[64];
  Constants() {
    int n = 0;
    for (uint64_t p = 2; n < 64; ++p) {
      bool prime = true;
      for (uint64_t d = 2; d * d <= p; ++d) prime = prime && p % d != 0;
      if (!prime) continue;
      // Largest r with r^3 <= p * 2^96, by bisection; its low 32 bits are the fraction.
      uint64_t low = 0, high = uint64_t(1) << 36;
      while (high - low > 1) {
        const uint64_t mid = (low + high) / 2;
        // mid^3 against p * 2^96 without overflow: mid < 2^36, so mid^3 < 2^108 fits 128 bits.
        (Wide(mid) * mid * mid <= Wide(p) << 96 ? low : high) = mid;
      }
      k[n++] = uint32_t(low);
    }
  }
};

}  // namespace

void Sha256::block(const uint8_t* bytes) {
  static const Constants constants;
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) {
    w[i] = uint32_t(bytes[4 * i]) << 24 | uint32_t(bytes[4 * i + 1]) << 16 | uint32_t(bytes[4 * i + 2]) << 8 |
           uint32_t(bytes[4 * i + 3]);
  }
  for (int i = 16; i < 64; ++i) {
    const uint32_t a = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const uint32_t b = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + a + w[i - 7] + b;
  }
  uint32_t s[8];
  std::copy(state_, state_ + 8, s);
  for (int i = 0; i < 64; ++i) {
    const uint32_t sum1 = std::rotr(s[4], 6) ^ std::rotr(s[4], 11) ^ std::rotr(s[4], 25);
    const uint32_t choice = (s[4] & s[5]) ^ (~s[4] & s[6]);
    const uint32_t t1 = s[7] + sum1 + choice + constants.k[i] + w[i];
    const uint32_t sum0 = std::rotr(s[0], 2) ^ std::rotr(s[0], 13) ^ std::rotr(s[0], 22);
    const uint32_t majority = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
    std::copy_backward(s, s + 7, s + 8);
    s[4] += t1;
    s[0] = t1 + sum0 + majority;
  }
  for (int i = 0; i < 8; ++i) state_[i] += s[i];
}

void Sha256::update(std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const auto at = size_t(bytes_ % 64);
    const size_t n = std::min(bytes.size(), 64 - at);
    std::memcpy(buffer_ + at, bytes.data(), n);
    bytes_ += n;
    bytes = bytes.subspan(n);
    if (at + n == 64) block(buffer_);
  }
}

std::string Sha256::hex() {
  const uint64_t bits = bytes_ * 8;
  const uint8_t one = 0x80, zero = 0;
  update({&one, 1});
  while (bytes_ % 64 != 56) update({&zero, 1});
  uint8_t length[8];
  for (int i = 0; i < 8; ++i) length[i] = uint8_t(bits >> (56 - 8 * i));
  update(length);
  std::string text;
  for (const uint32_t s : state_) text += fmt::format("{:08x}", s);
  return text;
}

std::string sha256(std::string_view text) {
  Sha256 hash;
  hash.update({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  return hash.hex();
}

}  // namespace longkv
