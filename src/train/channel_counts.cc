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
  const int64_t levels = shape.dim_k / align + 1, unit = std::gcd(align, int64_t(shape.dim_v));
  const auto cost = [&](int64_t level) { return level == 0 ? int64_t{0} : (level * align + shape.dim_v) / unit; };
  const auto budget = int64_t(share * double(shape.learned_heads() * (shape.dim_k + shape.dim_v)) / double(unit));
  // least[b]: loss of the heads so far within b units; chosen: the level that each head takes to reach it.
  std::vector<double> least(size_t(budget) + 1, 0.0), next(least.size());
  std::vector<int64_t> open;
  for (int64_t h = 0; h < shape.heads(); ++h) {
    if (shape.head_learns(h) && !shape.head_streams(h)) open.push_back(h);
  }
  std::vector<std::vector<uint16_t>> chosen(open.size(), std::vector<uint16_t>(least.size(), 0));
  for (size_t i = 0; i < open.size(); ++i) {
    const double* curve = loss.data() + open[i] * levels;
    for (int64_t b = 0; b <= budget; ++b) {
      next[size_t(b)] = least[size_t(b)] + curve[0];
      for (int64_t level = 1; level < levels && cost(level) <= b; ++level) {
        const double sum = least[size_t(b - cost(level))] + curve[level];
        if (sum > next[size_t(b)]) continue;  // of equal losses the one with more channels
        next[size_t(b)] = sum;
        chosen[i][size_t(b)] = uint16_t(level);
      }
    }
    least.swap(next);
  }
  ChannelCounts counts(size_t(shape.heads()), 0);
  int64_t left = budget;
  for (size_t i = open.size(); i-- > 0;) {
    const int64_t level = chosen[i][size_t(left)];
    counts[size_t(open[i])] = level * align;
    left -= cost(level);
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
