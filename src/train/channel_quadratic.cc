#include "train/channel_quadratic.h"

#include <cstddef>

namespace longkv {

void add_channel_gram(const double* gram, double weight, ChannelQuadratic& to) {
  const auto dim = int64_t(to.linear.size()), side = dim + 1;
  for (int64_t i = 0; i < dim; ++i) {
    for (int64_t j = 0; j < dim; ++j) to.h[size_t(i * dim + j)] += weight * gram[i * side + j];
    to.linear[size_t(i)] += weight * gram[i * side + dim];
  }
  to.base += weight * gram[dim * side + dim];
}

double eliminate_channels(const ChannelQuadratic& q, int64_t n, std::vector<bool>& kept, std::vector<int>& order) {
  const auto dim_k = int64_t(kept.size());
  std::vector<double> rise(kept.size());  // of dropping a channel next
  for (int64_t c = 0; c < dim_k; ++c) rise[size_t(c)] = q.h[size_t(c * dim_k + c)] - 2 * q.linear[size_t(c)];
  double sum = q.base;
  for (; n > 0; --n) {
    int64_t best = -1;
    for (int64_t c = 0; c < dim_k; ++c) {
      if (kept[size_t(c)] && (best < 0 || rise[size_t(c)] < rise[size_t(best)])) best = c;
    }
    kept[size_t(best)] = false;
    order.push_back(int(best));
    sum += rise[size_t(best)];
    for (int64_t c = 0; c < dim_k; ++c)
      rise[size_t(c)] += q.h[size_t(c * dim_k + best)] + q.h[size_t(best * dim_k + c)];
  }
  return sum;
}

}  // namespace longkv
