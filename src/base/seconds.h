// Time that has passed, from the steady clock.
#pragma once

#include <chrono>

namespace longkv {

inline double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace longkv
