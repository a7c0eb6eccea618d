#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace longkv::test {

// IEEE 754 binary16 by its definition, in double: not every compiler that builds the tests has a half type.
inline double half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  double v = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  if (exponent == 31) v = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::nan("");
  return bits & 0x8000 ? -v : v;
}

// The nearest half, ties to even; `v` is not NaN.
inline uint16_t nearest_half(double v) {
  const uint16_t sign = std::signbit(v) ? 0x8000 : 0, infinity = 0x7c00;
  const double a = std::fabs(v);
  if (a >= 65536.0) return sign | infinity;
  const int exponent = a == 0 ? -14 : std::max(std::ilogb(a), -14);
  // Steps of this binade; 1024 and 2048 of them carry into the exponent by themselves.
  const int steps = int(std::nearbyint(std::ldexp(a, 10 - exponent)));
  return sign | uint16_t(std::min(((exponent + 14) << 10) + steps, int(infinity)));
}

}  // namespace longkv::test
