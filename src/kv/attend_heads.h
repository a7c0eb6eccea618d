// The number of query heads of a tile as a constant, for kernels that keep sums of every head in registers. Every
// source has its own copy, since levels are compiled with other flags.
#pragma once

#include <type_traits>

namespace longkv {
namespace {

// heads: 1 to 4. Calls f(std::integral_constant<int, heads>()).
template <class F>
inline void with_heads(int heads, const F& f) {
  switch (heads) {
    case 1: return f(std::integral_constant<int, 1>());
    case 2: return f(std::integral_constant<int, 2>());
    case 3: return f(std::integral_constant<int, 3>());
    default: return f(std::integral_constant<int, 4>());
  }
}

}  // namespace
}  // namespace longkv
