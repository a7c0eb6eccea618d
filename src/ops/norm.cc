#include "ops/norm.h"

#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/norm.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "base/checked.h"

HWY_BEFORE_NAMESPACE();
namespace longkv::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

void rms_norm_row(const float* x, const float* weight, float eps, int64_t dim, float* y) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = int64_t(hn::Lanes(d));
  auto s0 = hn::Zero(d), s1 = hn::Zero(d);
  int64_t i = 0;
  for (; i + 2 * lanes <= dim; i += 2 * lanes) {
    const auto a = hn::LoadU(d, x + i), b = hn::LoadU(d, x + i + lanes);
    s0 = hn::MulAdd(a, a, s0);
    s1 = hn::MulAdd(b, b, s1);
  }
  float sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(s0, s1)));
  for (; i < dim; ++i) sum += x[i] * x[i];
  const float inv = 1.0f / std::sqrt(sum / float(dim) + eps);
  const auto v_inv = hn::Set(d, inv);
  for (i = 0; i + lanes <= dim; i += lanes) {
    hn::StoreU(hn::Mul(hn::Mul(hn::LoadU(d, x + i), v_inv), hn::LoadU(d, weight + i)), d, y + i);
  }
  for (; i < dim; ++i) y[i] = x[i] * inv * weight[i];
}

}  // namespace longkv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(rms_norm_row);

void rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows, int64_t dim, float* y,
              int64_t y_stride, ThreadPool& pool) {
  const auto row = HWY_DYNAMIC_DISPATCH(rms_norm_row);
  // Tasks of about 16K values: large enough to hide the hand-off, fixed by the shape alone.
  const int64_t per_task = dim >= 16384 ? 1 : 16384 / dim;
  pool.run(ceil_div(rows, per_task), [&](int64_t task, int) {
    const int64_t end = (task + 1) * per_task < rows ? (task + 1) * per_task : rows;
    for (int64_t r = task * per_task; r < end; ++r) row(x + r * x_stride, weight, eps, dim, y + r * y_stride);
  });
}

}  // namespace longkv
#endif
