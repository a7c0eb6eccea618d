// Which channels a learned mask keeps.
#pragma once

#include <cstdint>
#include <vector>

#include "kv/types.h"

namespace longkv {

// Channels kept per layer and KV head, [layers][kv_heads]. Layers that learn nothing (sliding windows) count 0 here and
// are left out everywhere.
using ChannelCounts = std::vector<int64_t>;

struct MaskShape {
  int layers = 0;
  int kv_heads = 0;
  int dim_k = 0;
  int dim_v = 0;
  std::vector<bool> learns;   // [layers]
  std::vector<bool> streams;  // [heads], those that keep nothing in any case; empty: none
  int64_t heads() const { return int64_t(layers) * kv_heads; }
  bool head_learns(int64_t head) const { return learns[size_t(head / kv_heads)]; }
  bool head_streams(int64_t head) const { return !streams.empty() && streams[size_t(head)]; }
  int64_t learned_heads() const;
};

// LeanK's rule (compression of K by `ratio` in all): a global threshold at the quantile `ratio` of all alpha, then
// every head's count rounded to the nearest multiple of `align`. Ties at the threshold are broken by rank, so that many
// equal alphas never keep everything.
ChannelCounts counts_by_threshold(const MaskShape& shape, const std::vector<float>& alpha, double ratio, int64_t align);

// Counts in multiples of `align` that lose least within `share` of all K and V bytes of old rows, where a head without
// channels needs no V either (kv/region_store.h): the best of all, by the loss of the first heads within every budget.
// loss: [heads][dim_k / align + 1], loss of keeping i * align channels. A shape with dim_v = 0 pays for K alone.
ChannelCounts counts_by_bytes(const MaskShape& shape, const std::vector<double>& loss, double share, int64_t align);

// 1 for the counts[h] largest alpha of every head, ties to lower channels; 0 for the others. Heads that learn nothing
// keep 1.
std::vector<float> largest_channels(const MaskShape& shape, const std::vector<float>& alpha,
                                    const ChannelCounts& counts);

// Channels kept of all that could be dropped.
double share_kept(const MaskShape& shape, const ChannelCounts& counts);
// Bytes of K and V of old rows kept, of all.
double share_of_bytes(const MaskShape& shape, const ChannelCounts& counts);

}  // namespace longkv
