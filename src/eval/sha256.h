// SHA-256 (FIPS 180-4) of input files, so that a result names exactly what it was computed from.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace longkv {

class Sha256 {
 public:
  void update(std::span<const uint8_t> bytes);
  std::string hex();  // finishes

 private:
  void block(const uint8_t* bytes);

  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t buffer_[64] = {};
  uint64_t bytes_ = 0;
};

std::string sha256(std::string_view text);

}  // namespace longkv
