// Scores of tokens from some of their channels.
#pragma once

#include <cstdint>

#include "base/float16.h"

namespace longkv {

constexpr int64_t kChannelTile = 256;

// scores[j * stride + t] = sum over i of q[j * n_channels + i] * tile[channels[i] * kChannelTile + first + t] for
// `count` tokens of a tile from `first`. A token's score does not depend on the range.
void channel_scan(const f16_t* tile, const int32_t* channels, int64_t n_channels, const float* q, int n_q,
                  int64_t first, int64_t count, float* scores, int64_t stride);

}  // namespace longkv
