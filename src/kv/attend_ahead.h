// Prefetching of rows that will be multiplied soon. Every source has its own copy, since levels are compiled with other
// flags.
#pragma once

#include <cstdint>

#include "kv/attend_quant.h"

namespace longkv {
namespace {

// Prefetches rows [begin, end) of those that are wanted next; kFar: also what lies behind them. Inlined always: GCC
// takes a function that does nothing but prefetch for one without effects and drops calls of it.
template <bool kFar>
__attribute__((always_inline)) inline void prefetch_rows(const AheadRows& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end && r < a.near_rows; ++r) {
    for (int64_t b = 0; b < a.bytes; b += 64) {
      __builtin_prefetch(a.near[r] + b, 0, 3);
      if (kFar && a.far_offset != 0) __builtin_prefetch(a.near[r] + a.far_offset + b, 0, 2);
    }
  }
}

}  // namespace
}  // namespace longkv
