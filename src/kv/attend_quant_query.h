// Rounding of a query head as attend_quant.h says; where the numbers go is the level's. Every source has its own copy,
// since levels are compiled with other flags.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "kv/types.h"

namespace longkv {
namespace {

// NaN becomes infinity, which no step can serve.
inline float query_magnitude(const float* q, int64_t n) {
  float amax = 0.0f;
  for (int64_t c = 0; c < n; ++c) amax = q[c] == q[c] ? std::fmax(amax, std::fabs(q[c])) : INFINITY;
  return amax;
}

// q ~ scale * value, for channel c of a group g of kKvQuantGroup: put(g, c, value), |value| <= 127 (q4_0) or 32767
// (q8_0); then end(g, scale, sum of the group's values).
template <class Put, class End>
inline void round_quant_query(KvType type, const float* q, int64_t dim, const Put& put, const End& end) {
  const bool q4 = type == KvType::kQ4_0;
  const float levels = q4 ? 127.0f : 32767.0f;
  float amax = query_magnitude(q, dim);
  for (int64_t g = 0; g < dim / kKvQuantGroup; ++g, q += kKvQuantGroup) {
    if (q4) amax = query_magnitude(q, kKvQuantGroup);
    // Scores of a query that is not finite are NaN; below 2^-100 the inverse would not be finite.
    const bool finite = amax <= std::numeric_limits<float>::max();
    const float scale = finite ? (amax < 0x1p-100f ? 0.0f : amax / levels) : NAN;
    const float inverse = finite && scale > 0.0f ? levels / amax : 0.0f;
    int32_t total = 0;
    for (int64_t c = 0; c < kKvQuantGroup; ++c) {
      const auto value = int32_t(inverse == 0.0f ? 0.0f : std::nearbyint(q[c] * inverse));
      total += value;
      put(g, c, value);
    }
    end(g, scale, total);
  }
}

}  // namespace
}  // namespace longkv
