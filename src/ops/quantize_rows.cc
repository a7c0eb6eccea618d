#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantize_rows.cc"
#include "ops/quantize_rows.h"

#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include <algorithm>

#include "base/checked.h"
#include "base/cpu.h"

#ifndef LONGKV_QUANTIZE_ROWS_ONCE
#define LONGKV_QUANTIZE_ROWS_ONCE
namespace longkv {
// 254 / scale must not overflow. What lies below is 80 binary orders under any half-precision scale of weights.
inline constexpr float kLeastFineScale = 0x1p-100f;
}  // namespace longkv
#endif

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

// Rounds what q leaves of one group of x, in steps of fine_scale. |x - scale * q| is at most half of scale and three
// roundings of values up to 127 scale, far less than the half step that would round to 128.
void QuantizeRemainder(const float* HWY_RESTRICT x, const int8_t* HWY_RESTRICT q, float scale,
                       int8_t* HWY_RESTRICT fine_q, int16_t* HWY_RESTRICT sum16) {
  const hn::CappedTag<float, 16> df;
  const hn::RebindToSigned<decltype(df)> di32;
  const hn::Rebind<int8_t, decltype(df)> di8;
  const int64_t lanes = int64_t(hn::Lanes(df));
  const auto step = hn::Set(df, scale), inverse = hn::Set(df, float(kFineSteps) / scale);
  for (int64_t half = 0; half < 2; ++half) {
    auto sum = hn::Zero(di32);
    for (int64_t i = 16 * half; i < 16 * (half + 1); i += lanes) {
      const auto coarse = hn::ConvertTo(df, hn::PromoteTo(di32, hn::LoadU(di8, q + i)));
      const auto rounded = hn::NearestInt(hn::Mul(hn::Sub(hn::LoadU(df, x + i), hn::Mul(coarse, step)), inverse));
      sum = hn::Add(sum, rounded);
      hn::StoreU(hn::DemoteTo(di8, rounded), di8, fine_q + i);
    }
    sum16[half] = int16_t(hn::GetLane(hn::SumOfLanes(di32, sum)));
  }
}

// Both terms in one 16-bit number, for every group of a row. A group whose scale marks it (NaN) or is too small for
// the division gets zeros.
void WidenRow(const float* HWY_RESTRICT x, const float* HWY_RESTRICT scale, int64_t cols, int16_t* HWY_RESTRICT wide,
              float* HWY_RESTRICT wide_scale) {
  const hn::CappedTag<float, 16> df;
  const hn::Rebind<int16_t, decltype(df)> di16;
  const int64_t lanes = int64_t(hn::Lanes(df));
  for (int64_t group = 0; group < cols / kActivationGroup; ++group, x += kActivationGroup, wide += kActivationGroup) {
    wide_scale[group] = scale[group] / float(kFineSteps);
    if (!(scale[group] >= kLeastFineScale)) {
      for (int64_t i = 0; i < kActivationGroup; ++i) wide[i] = 0;
      continue;
    }
    const auto inverse = hn::Set(df, float(kFineSteps) / scale[group]);
    for (int64_t i = 0; i < kActivationGroup; i += lanes) {
      hn::StoreU(hn::DemoteTo(di16, hn::NearestInt(hn::Mul(hn::LoadU(df, x + i), inverse))), di16, wide + i);
    }
  }
}

}  // namespace longkv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(QuantizeRow);
HWY_EXPORT(QuantizeRemainder);
HWY_EXPORT(WidenRow);

namespace {

// A row of a small model takes less time than waking a worker; above this many values the rows are shared out.
constexpr int64_t kSerialValues = 16384;
// Values per task: a multiple of the group, the same split for any thread count.
constexpr int64_t kTaskValues = 8192;

using QuantizeRowFn = void (*)(const float* x, int64_t cols, int8_t* q, float* scale, int16_t* sum16);

QuantizeRowFn quantize_row() {
#if defined(__x86_64__)
  if (active_isa() >= IsaLevel::kAvx512) return quantize_row_avx512;
#endif
  return HWY_DYNAMIC_DISPATCH(QuantizeRow);
}

template <class T>
void grow(std::vector<T>& v, int64_t n) {
  if (int64_t(v.size()) < n) v.resize(size_t(n));
}

// Marks the groups of one row with 0 (second term) or -1.
void choose_groups(const float* scale, int64_t groups, double from, int32_t* term) {
  // Four sums at a time: a single one would wait for itself.
  double sums[4] = {};
  int64_t i = 0;
  for (; i + 4 <= groups; i += 4) {
    for (int k = 0; k < 4; ++k) sums[k] += double(scale[i + k]) * scale[i + k];
  }
  for (; i < groups; ++i) sums[0] += double(scale[i]) * scale[i];
  const double sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  const double least = from * sum / double(groups);
  for (int64_t g = 0; g < groups; ++g) {
    term[g] = double(scale[g]) * scale[g] > least && scale[g] >= kLeastFineScale ? 0 : -1;
  }
}

}  // namespace

void QuantizedRows::add_fine_terms(ThreadPool& pool, double from) {
  const int64_t groups = cols / kActivationGroup;
  grow(fine_term, tokens * groups);
  grow(fine_first, groups + 1);
  const int64_t rows = ceil_div(kTaskValues, cols);
  const auto for_tokens = [&](const auto& fn) {
    pool.run(ceil_div(tokens, rows), [&](int64_t task, int) {
      const int64_t end = (task + 1) * rows < tokens ? (task + 1) * rows : tokens;
      for (int64_t t = task * rows; t < end; ++t) fn(t);
    });
  };
  for_tokens([&](int64_t t) { choose_groups(scale.data() + t * groups, groups, from, fine_term.data() + t * groups); });

  // Counts, then first terms, then places.
  int32_t* first = fine_first.data();
  for (int64_t g = 0; g <= groups; ++g) first[g] = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const int32_t* term = fine_term.data() + t * groups;
    for (int64_t g = 0; g < groups; ++g) first[g + 1] += term[g] + 1;
  }
  for (int64_t g = 0; g < groups; ++g) first[g + 1] += first[g];
  const int64_t terms = first[groups];
  grow(fine_token, terms);
  grow(fine_q, terms * kActivationGroup);
  grow(fine_scale, terms);
  grow(fine_sum16, terms * 2);
  for (int64_t t = 0; t < tokens; ++t) {
    int32_t* term = fine_term.data() + t * groups;
    for (int64_t g = 0; g < groups; ++g) {
      if (term[g] < 0) continue;
      term[g] = first[g]++;
      fine_token[size_t(term[g])] = int32_t(t);
    }
  }
  for (int64_t g = groups; g > 0; --g) first[g] = first[g - 1];
  first[0] = 0;

  const auto quantize = HWY_DYNAMIC_DISPATCH(QuantizeRemainder);
  for_tokens([&](int64_t t) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t term = fine_term[size_t(t * groups + g)];
      if (term < 0) continue;
      const float coarse = scale[size_t(t * groups + g)];
      fine_scale[size_t(term)] = coarse / float(kFineSteps);
      quantize(source + t * source_stride + g * kActivationGroup, q.data() + t * cols + g * kActivationGroup, coarse,
               fine_q.data() + term * kActivationGroup, fine_sum16.data() + 2 * term);
    }
  });
}

void QuantizedRows::widen(int64_t t, int16_t* wide, float* wide_scale) const {
  HWY_DYNAMIC_DISPATCH(WidenRow)
  (source + t * source_stride, scale.data() + t * (cols / kActivationGroup), cols, wide, wide_scale);
}

void QuantizedRows::assign(const float* x, int64_t new_tokens, int64_t new_cols, int64_t stride, ThreadPool& pool,
                           double fine_from) {
  tokens = new_tokens;
  cols = new_cols;
  source = x;
  source_stride = stride;
  grow(q, tokens * cols);
  grow(scale, tokens * (cols / kActivationGroup));
  grow(sum16, tokens * (cols / 16));
  const QuantizeRowFn quantize = quantize_row();
  const auto part = [&](int64_t token, int64_t begin, int64_t end) {
    const int64_t at = token * cols + begin;
    quantize(x + token * stride + begin, end - begin, q.data() + at, scale.data() + at / kActivationGroup,
             sum16.data() + at / 16);
  };
  if (tokens * cols <= kSerialValues) {
    for (int64_t t = 0; t < tokens; ++t) part(t, 0, cols);
  } else if (cols >= kTaskValues) {
    const int64_t parts = ceil_div(cols, kTaskValues);
    pool.run(tokens * parts, [&](int64_t task, int) {
      const int64_t begin = task % parts * kTaskValues;
      part(task / parts, begin, begin + kTaskValues < cols ? begin + kTaskValues : cols);
    });
  } else {
    const int64_t rows = kTaskValues / cols;
    pool.run(ceil_div(tokens, rows), [&](int64_t task, int) {
      const int64_t end = (task + 1) * rows < tokens ? (task + 1) * rows : tokens;
      for (int64_t t = task * rows; t < end; ++t) part(t, 0, cols);
    });
  }
  add_fine_terms(pool, fine_from);
}

}  // namespace longkv
#endif
