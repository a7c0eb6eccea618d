#include "ops/elementwise.h"

#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/elementwise.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// After highway.h: the maths library is compiled once for each target.
#include <hwy/contrib/math/math-inl.h>

#include "base/checked.h"
#include "ops/tail-inl.h"

HWY_BEFORE_NAMESPACE();
namespace longkv::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

// tanh(x) = 1 - 2 / (exp(2x) + 1); beyond |x| = 10 the result is 1 in fp32.
HWY_INLINE V tanh_of(D d, V x) {
  const V clamped = hn::Min(hn::Max(x, hn::Set(d, -10.0f)), hn::Set(d, 10.0f));
  const V e = hn::Exp(d, hn::Add(clamped, clamped));
  const V t = hn::Sub(hn::Set(d, 1.0f), hn::Div(hn::Set(d, 2.0f), hn::Add(e, hn::Set(d, 1.0f))));
  return hn::IfThenElse(hn::Eq(x, x), t, x);  // NaN stays NaN
}

struct SiluMul {
  const float* up;
  V operator()(D d, V g, int64_t i, size_t n) const {
    const V e = hn::Exp(d, hn::Min(hn::Max(hn::Neg(g), hn::Set(d, -87.0f)), hn::Set(d, 87.0f)));
    const V s = hn::Div(g, hn::Add(hn::Set(d, 1.0f), e));
    return hn::Mul(s, load_first(d, up + i, n));
  }
};

struct GeluMul {
  const float* up;
  V operator()(D d, V g, int64_t i, size_t n) const {
    const V g3 = hn::Mul(hn::Mul(g, g), g);
    const V inner = hn::Mul(hn::Set(d, 0.7978845608028654f), hn::MulAdd(hn::Set(d, 0.044715f), g3, g));
    const V half = hn::Mul(hn::Set(d, 0.5f), g);
    const V y = hn::MulAdd(half, tanh_of(d, inner), half);
    return hn::Mul(y, load_first(d, up + i, n));
  }
};

struct Softcap {
  float cap;
  V operator()(D d, V x, int64_t, size_t) const {
    return hn::Mul(hn::Set(d, cap), tanh_of(d, hn::Div(x, hn::Set(d, cap))));
  }
};

// Applies f to y[0, n) in place; the last vector is a masked one so that every value takes the same path.
template <class F>
HWY_INLINE void map(float* y, int64_t n, const F& f) {
  const D d;
  const int64_t lanes = int64_t(hn::Lanes(d));
  for (int64_t i = 0; i < n; i += lanes) {
    const size_t left = size_t(n - i < lanes ? n - i : lanes);
    store_first(f(d, load_first(d, y + i, left), i, left), d, y + i, left);
  }
}

void silu_mul(float* gate, const float* up, int64_t n) { map(gate, n, SiluMul{up}); }
void gelu_mul(float* gate, const float* up, int64_t n) { map(gate, n, GeluMul{up}); }
void softcap(float* y, float cap, int64_t n) { map(y, n, Softcap{cap}); }

void add(float* y, const float* x, int64_t n) {
  const D d;
  const int64_t lanes = int64_t(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(hn::Add(hn::LoadU(d, y + i), hn::LoadU(d, x + i)), d, y + i);
  for (; i < n; ++i) y[i] += x[i];
}

void scale(float* y, float s, int64_t n) {
  const D d;
  const int64_t lanes = int64_t(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(hn::Mul(hn::LoadU(d, y + i), hn::Set(d, s)), d, y + i);
  for (; i < n; ++i) y[i] *= s;
}

}  // namespace longkv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(silu_mul);
HWY_EXPORT(gelu_mul);
HWY_EXPORT(softcap);
HWY_EXPORT(add);
HWY_EXPORT(scale);

namespace {

constexpr int64_t kPerTask = 16384;  // values; a multiple of every vector length

template <class Fn>
void split(int64_t n, ThreadPool& pool, const Fn& fn) {
  pool.run(ceil_div(n, kPerTask), [&](int64_t task, int) {
    const int64_t begin = task * kPerTask;
    fn(begin, n - begin < kPerTask ? n - begin : kPerTask);
  });
}

}  // namespace

void add_in_place(float* y, const float* x, int64_t n, ThreadPool& pool) {
  const auto f = HWY_DYNAMIC_DISPATCH(add);
  split(n, pool, [&](int64_t begin, int64_t count) { f(y + begin, x + begin, count); });
}

void add_bias(float* y, const float* bias, int64_t rows, int64_t cols, ThreadPool& pool) {
  const auto f = HWY_DYNAMIC_DISPATCH(add);
  const int64_t per_task = cols >= kPerTask ? 1 : kPerTask / cols;
  pool.run(ceil_div(rows, per_task), [&](int64_t task, int) {
    const int64_t end = (task + 1) * per_task < rows ? (task + 1) * per_task : rows;
    for (int64_t r = task * per_task; r < end; ++r) f(y + r * cols, bias, cols);
  });
}

void gate_mul(Activation activation, float* gate, const float* up, int64_t n, ThreadPool& pool) {
  const auto f = activation == Activation::kSilu ? HWY_DYNAMIC_DISPATCH(silu_mul) : HWY_DYNAMIC_DISPATCH(gelu_mul);
  split(n, pool, [&](int64_t begin, int64_t count) { f(gate + begin, up + begin, count); });
}

void scale_in_place(float* y, float s, int64_t n, ThreadPool& pool) {
  const auto f = HWY_DYNAMIC_DISPATCH(scale);
  split(n, pool, [&](int64_t begin, int64_t count) { f(y + begin, s, count); });
}

void softcap_in_place(float* y, float cap, int64_t n, ThreadPool& pool) {
  const auto f = HWY_DYNAMIC_DISPATCH(softcap);
  split(n, pool, [&](int64_t begin, int64_t count) { f(y + begin, cap, count); });
}

}  // namespace longkv
#endif
