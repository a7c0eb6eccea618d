#include "kv/select/aggregate.h"

#include <cfloat>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kv/select/aggregate.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/fast_exp-inl.h"
#include "ops/tail-inl.h"

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;

// Full vectors over [0, n) and one masked rest: body(i, load, store).
template <class Body>
HWY_INLINE void for_each_vector(int64_t n, const Body& body) {
  const D d;
  const int64_t lanes = int64_t(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    body(
        i, [&](const float* p) { return hn::LoadU(d, p + i); }, [&](auto v, float* p) { hn::StoreU(v, d, p + i); },
        hn::FirstN(d, size_t(lanes)));
  }
  if (i < n) {
    const auto left = size_t(n - i);
    body(
        i, [&](const float* p) { return load_first(d, p + i, left); },
        [&](auto v, float* p) { store_first(v, d, p + i, left); }, hn::FirstN(d, left));
  }
}

// NaN becomes the lowest number, infinities become finite, so that sums and differences stay ordered.
template <class V>
HWY_INLINE V finite(V v) {
  const D d;
  const V low = hn::Set(d, -FLT_MAX);
  v = hn::IfThenElse(hn::IsNaN(v), low, v);
  return hn::Min(hn::Max(v, low), hn::Set(d, FLT_MAX));
}

// `seen` becomes NaN where v is, and stays it.
template <class V>
HWY_INLINE void note_nan(V v, V& seen) {
  seen = hn::Add(seen, hn::IfThenElseZero(hn::IsNaN(v), v));
}

bool Reduce(bool max, float* scores, int64_t stride, int heads, int64_t n, float* out) {
  auto nan = hn::Zero(D());
  for_each_vector(n, [&](int64_t, auto load, auto store, auto) {
    const auto first = load(scores);
    note_nan(first, nan);
    auto sum = finite(first);
    for (int j = 1; j < heads; ++j) {
      const auto next = load(scores + j * stride);
      note_nan(next, nan);
      const auto s = finite(next);
      sum = max ? hn::Max(sum, s) : hn::Add(sum, s);
    }
    store(finite(sum), out);
  });
  return !hn::AllFalse(D(), hn::IsNaN(nan));
}

// exp(scale * (score - largest)) in place of the scores of a head. Returns one over their sum, or 0.
float Exponentials(float* row, int64_t n, float scale, hn::Vec<D>& nan) {
  const D d;
  auto peak_lanes = hn::Set(d, -FLT_MAX);
  for_each_vector(n, [&](int64_t, auto load, auto, auto mask) {
    const auto s = load(row);
    note_nan(s, nan);
    peak_lanes = hn::IfThenElse(mask, hn::Max(peak_lanes, finite(s)), peak_lanes);
  });
  const auto peak = hn::Set(d, hn::GetLane(hn::MaxOfLanes(d, peak_lanes)));
  auto sum_lanes = hn::Zero(d);
  for_each_vector(n, [&](int64_t, auto load, auto store, auto mask) {
    const auto e = fast_exp2(d, hn::Mul(hn::Sub(finite(load(row)), peak), hn::Set(d, scale * kLog2E)));
    sum_lanes = hn::Add(sum_lanes, hn::IfThenElseZero(mask, e));
    store(e, row);
  });
  const float sum = hn::GetLane(hn::SumOfLanes(d, sum_lanes));
  return sum > 0 ? 1.0f / sum : 0.0f;
}

// Shares of some heads are added in one pass, in the heads' order.
bool SoftmaxSum(float* scores, int64_t stride, int heads, int64_t n, float scale, float* out) {
  const D d;
  constexpr int kAtOnce = 8;
  float share[kAtOnce];
  auto nan = hn::Zero(d);
  for (int first = 0; first < heads; first += kAtOnce) {
    const int count = HWY_MIN(kAtOnce, heads - first);
    float* rows = scores + first * stride;
    for (int j = 0; j < count; ++j) share[j] = Exponentials(rows + j * stride, n, scale, nan);
    for_each_vector(n, [&](int64_t, auto load, auto store, auto) {
      auto sum = hn::Mul(load(rows), hn::Set(d, share[0]));
      if (first > 0) sum = hn::Add(load(out), sum);
      for (int j = 1; j < count; ++j) sum = hn::Add(sum, hn::Mul(load(rows + j * stride), hn::Set(d, share[j])));
      store(sum, out);
    });
  }
  return !hn::AllFalse(D(), hn::IsNaN(nan));
}

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(Reduce);
HWY_EXPORT(SoftmaxSum);

bool aggregate_scores(Aggregate kind, float* scores, int64_t stride, int heads, int64_t n, float scale, float* out) {
  if (kind == Aggregate::kSoftmaxSum) return HWY_DYNAMIC_DISPATCH(SoftmaxSum)(scores, stride, heads, n, scale, out);
  return HWY_DYNAMIC_DISPATCH(Reduce)(kind == Aggregate::kMax, scores, stride, heads, n, out);
}

}  // namespace longkv
#endif
