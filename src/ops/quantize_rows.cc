#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantize_rows.cc"
#include "ops/quantize_rows.h"

#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include "base/checked.h"

HWY_BEFORE_NAMESPACE();
namespace longkv::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// One row. scale = amax / 127 per group of 32 and q = round_to_even(x * (127 / amax)): the same IEEE operations at
// every level, so all levels give the same bits. A NaN or infinity in a group makes its scale NaN (and q zero), which
// every product of the row then shows. A group whose amax is below 2^-120, where 127 / amax overflows, becomes zeros;
// its values lie 80 binary orders below the smallest half-precision weight scale.
void QuantizeRow(const float* HWY_RESTRICT x, int64_t cols, int8_t* HWY_RESTRICT q, float* HWY_RESTRICT scale,
                 int16_t* HWY_RESTRICT sum16) {
  const hn::CappedTag<float, 16> df;
  const hn::RebindToSigned<decltype(df)> di32;
  const hn::Rebind<int8_t, decltype(df)> di8;
  const int64_t lanes = int64_t(hn::Lanes(df));
  const auto magnitude_mask = hn::Set(di32, 0x7fffffff);
  for (int64_t group = 0; group < cols / kActivationGroup; ++group, x += kActivationGroup, q += kActivationGroup) {
    // Magnitudes compare like integers, and NaN lies above infinity there.
    auto largest = hn::Zero(di32);
    for (int64_t i = 0; i < kActivationGroup; i += lanes) {
      largest = hn::Max(largest, hn::And(hn::BitCast(di32, hn::LoadU(df, x + i)), magnitude_mask));
    }
    const int32_t amax_bits = hn::GetLane(hn::MaxOfLanes(di32, largest));
    float amax;
    __builtin_memcpy(&amax, &amax_bits, sizeof(amax));
    const bool finite = amax_bits < 0x7f800000;
    if (!finite || amax < 0x1p-120f) {
      scale[group] = finite ? 0.0f : __builtin_nanf("");
      for (int64_t i = 0; i < kActivationGroup; ++i) q[i] = 0;
      sum16[2 * group] = sum16[2 * group + 1] = 0;
      continue;
    }
    scale[group] = amax / 127.0f;
    const auto inverse = hn::Set(df, 127.0f / amax);
    for (int64_t half = 0; half < 2; ++half) {
      auto sum = hn::Zero(di32);
      for (int64_t i = 16 * half; i < 16 * (half + 1); i += lanes) {
        const auto rounded = hn::NearestInt(hn::Mul(hn::LoadU(df, x + i), inverse));
        sum = hn::Add(sum, rounded);
        hn::StoreU(hn::DemoteTo(di8, rounded), di8, q + i);
      }
      sum16[2 * group + half] = int16_t(hn::GetLane(hn::SumOfLanes(di32, sum)));
    }
  }
}

}  // namespace longkv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(QuantizeRow);

namespace {

// A row of a small model takes less time than waking a worker; above this many values the rows are shared out.
constexpr int64_t kSerialValues = 16384;
// Values per task: a multiple of the group, the same split for any thread count.
constexpr int64_t kTaskValues = 8192;

template <class T>
void grow(std::vector<T>& v, int64_t n) {
  if (int64_t(v.size()) < n) v.resize(size_t(n));
}

}  // namespace

void QuantizedRows::assign(const float* x, int64_t new_tokens, int64_t new_cols, int64_t stride, ThreadPool& pool) {
  tokens = new_tokens;
  cols = new_cols;
  grow(q, tokens * cols);
  grow(scale, tokens * (cols / kActivationGroup));
  grow(sum16, tokens * (cols / 16));
  const auto quantize = HWY_DYNAMIC_DISPATCH(QuantizeRow);
  const auto part = [&](int64_t token, int64_t begin, int64_t end) {
    const int64_t at = token * cols + begin;
    quantize(x + token * stride + begin, end - begin, q.data() + at, scale.data() + at / kActivationGroup,
             sum16.data() + at / 16);
  };
  if (tokens * cols <= kSerialValues) {
    for (int64_t t = 0; t < tokens; ++t) part(t, 0, cols);
    return;
  }
  if (cols >= kTaskValues) {
    const int64_t parts = ceil_div(cols, kTaskValues);
    pool.run(tokens * parts, [&](int64_t task, int) {
      const int64_t begin = task % parts * kTaskValues;
      part(task / parts, begin, begin + kTaskValues < cols ? begin + kTaskValues : cols);
    });
    return;
  }
  const int64_t rows = kTaskValues / cols;
  pool.run(ceil_div(tokens, rows), [&](int64_t task, int) {
    const int64_t end = (task + 1) * rows < tokens ? (task + 1) * rows : tokens;
    for (int64_t t = task * rows; t < end; ++t) part(t, 0, cols);
  });
}

}  // namespace longkv
#endif
