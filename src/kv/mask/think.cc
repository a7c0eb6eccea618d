#include "kv/mask/think.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kv/codec/codec.h"

namespace longkv {

int64_t think_kept(int64_t dim, double ratio, int64_t step) {
  const auto steps = int64_t(std::llround((1.0 - ratio) * double(dim) / double(step)));
  return std::clamp(steps * step, std::min(step, dim), dim);
}

void ThinkObserver::add(int layer, const float* q, int64_t n) {
  std::vector<double>& sums = sums_[size_t(layer)];
  sums.resize(size_t(shape_.kv_heads) * size_t(shape_.dim_k));
  const int64_t heads = int64_t(shape_.kv_heads) * shape_.group_size;
  for (int64_t i = 0; i < n * heads; ++i) {
    double* head = sums.data() + i % heads / shape_.group_size * shape_.dim_k;
    for (int c = 0; c < shape_.dim_k; ++c) head[c] += double(q[i * shape_.dim_k + c]) * q[i * shape_.dim_k + c];
  }
}

HeadMask ThinkObserver::mask(int layer, int kv_head, const KvHeadView& head, int64_t kept) const {
  const auto dim = size_t(shape_.dim_k);
  std::vector<double> score(dim, 0.0);
  constexpr int64_t kStep = 256;
  std::vector<float> rows(size_t(kStep) * dim);
  for (int64_t row = head.first_row; row < head.rows; row += kStep) {
    const int64_t n = std::min(kStep, head.rows - row);
    decode_k_rows(head, row, row + n, rows.data());
    for (int64_t r = 0; r < n; ++r) {
      for (size_t c = 0; c < dim; ++c) score[c] += double(rows[size_t(r) * dim + c]) * rows[size_t(r) * dim + c];
    }
  }
  const std::vector<double>& sums = sums_[size_t(layer)];
  for (size_t c = 0; c < dim && !sums.empty(); ++c) score[c] *= sums[size_t(kv_head) * dim + c];
  std::vector<uint16_t> order(dim);
  std::iota(order.begin(), order.end(), uint16_t(0));
  // Equal scores keep the lower channel; NaN counts as largest, so that it stays visible.
  std::stable_sort(order.begin(), order.end(), [&](uint16_t a, uint16_t b) {
    const double x = std::isnan(score[a]) ? INFINITY : score[a], y = std::isnan(score[b]) ? INFINITY : score[b];
    return x > y;
  });
  HeadMask mask;
  mask.channels.assign(order.begin(), order.begin() + ptrdiff_t(kept));
  std::sort(mask.channels.begin(), mask.channels.end());
  return mask;
}

}  // namespace longkv
