#include "train/channel_counts.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace longkv {

int64_t MaskShape::learned_heads() const { return kv_heads * std::count(learns.begin(), learns.end(), true); }

ChannelCounts counts_by_threshold(const MaskShape& shape, const std::vector<float>& alpha, double ratio,
                                  int64_t align) {
  std::vector<int64_t> order;
  for (int64_t i = 0; i < int64_t(alpha.size()); ++i) {
    if (shape.head_learns(i / shape.dim_k)) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return alpha[size_t(a)] > alpha[size_t(b)]; });
  order.resize(size_t(std::llround(double(order.size()) * (1.0 - ratio))));
  ChannelCounts counts(size_t(shape.heads()), 0);
  for (int64_t i : order) ++counts[size_t(i / shape.dim_k)];
  for (int64_t& n : counts) n = std::min<int64_t>((n + align / 2) / align * align, shape.dim_k);
  return counts;
}

ChannelCounts counts_by_bytes(const MaskShape& shape, const std::vector<double>& loss, double share, int64_t align) {
  const int64_t steps = shape.dim_k / align, levels = steps + 1;
  const auto bytes_of = [&](int64_t level) { return level == 0 ? int64_t{0} : level * align + shape.dim_v; };
  struct Segment {
    int64_t head, to, bytes;
    double gain;  // loss saved per byte
  };
  std::vector<Segment> segments;
  for (int64_t h = 0; h < shape.heads(); ++h) {
    if (!shape.head_learns(h) || shape.head_streams(h)) continue;
    const double* curve = loss.data() + h * levels;
    int64_t at = 0;
    while (at < steps) {
      // The steepest way down from here is the hull's next segment; of equal ones the longest.
      int64_t best = at + 1;
      double gain = -1;
      for (int64_t to = at + 1; to <= steps; ++to) {
        const double g = (curve[at] - curve[to]) / double(bytes_of(to) - bytes_of(at));
        if (g >= gain) {
          gain = g;
          best = to;
        }
      }
      segments.push_back({h, best, bytes_of(best) - bytes_of(at), gain});
      at = best;
    }
  }
  // Within a head gains fall, so a stable sort keeps a head's segments in order.
  std::stable_sort(segments.begin(), segments.end(),
                   [](const Segment& a, const Segment& b) { return a.gain > b.gain; });
  int64_t left = int64_t(share * double(shape.learned_heads() * (shape.dim_k + shape.dim_v)));
  ChannelCounts counts(size_t(shape.heads()), 0);
  std::vector<bool> closed(counts.size(), false);
  for (const Segment& s : segments) {
    if (closed[size_t(s.head)]) continue;
    if (s.bytes > left) {
      closed[size_t(s.head)] = true;  // what follows in this head builds on the segment that did not fit
      continue;
    }
    left -= s.bytes;
    counts[size_t(s.head)] = s.to * align;
  }
  return counts;
}

std::vector<float> largest_channels(const MaskShape& shape, const std::vector<float>& alpha,
                                    const ChannelCounts& counts) {
  std::vector<float> mask(alpha.size(), 1.0f);
  std::vector<int> order(size_t(shape.dim_k));
  for (int64_t h = 0; h < shape.heads(); ++h) {
    if (!shape.head_learns(h)) continue;
    const float* a = alpha.data() + h * shape.dim_k;
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int x, int y) { return a[x] > a[y]; });
    for (int64_t i = counts[size_t(h)]; i < shape.dim_k; ++i) mask[size_t(h * shape.dim_k + order[size_t(i)])] = 0.0f;
  }
  return mask;
}

double share_kept(const MaskShape& shape, const ChannelCounts& counts) {
  const int64_t all = shape.learned_heads() * shape.dim_k;
  return all == 0 ? 1.0 : double(std::accumulate(counts.begin(), counts.end(), int64_t{0})) / double(all);
}

double share_of_bytes(const MaskShape& shape, const ChannelCounts& counts) {
  int64_t kept = 0;
  for (int64_t n : counts) kept += n + (n > 0 ? shape.dim_v : 0);
  const int64_t all = shape.learned_heads() * (shape.dim_k + shape.dim_v);
  return all == 0 ? 1.0 : double(kept) / double(all);
}

}  // namespace longkv
