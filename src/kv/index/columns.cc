#include "kv/index/columns.h"

#include <limits>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kv/index/columns.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::CappedTag<float, size_t(kColumnTile)>;
using V = hn::Vec<D>;
constexpr int kLanes = int(hn::MaxLanes(D()));
constexpr int kVecs = int(kColumnTile) / kLanes;
constexpr int kRows = 4;  // accumulators of four rows and a tile's vectors fill 16 registers on AVX2

template <int kN>
HWY_INLINE void products(const float* x, int64_t dim, const float* tile, V (&sum)[kN][kVecs]) {
  const D d;
  for (auto& row : sum) {
    for (V& v : row) v = hn::Zero(d);
  }
  for (int64_t c = 0; c < dim; ++c) {
    V k[kVecs];
    for (int i = 0; i < kVecs; ++i) k[i] = hn::LoadU(d, tile + c * kColumnTile + i * kLanes);
    for (int r = 0; r < kN; ++r) {
      const V xc = hn::Set(d, x[r * dim + c]);
      for (int i = 0; i < kVecs; ++i) sum[r][i] = hn::MulAdd(xc, k[i], sum[r][i]);
    }
  }
}

template <int kN>
HWY_INLINE void store_products(const float* x, int64_t dim, const float* tile, float* out, int64_t stride) {
  V sum[kN][kVecs];
  products<kN>(x, dim, tile, sum);
  for (int r = 0; r < kN; ++r) {
    for (int i = 0; i < kVecs; ++i) hn::StoreU(sum[r][i], D(), out + r * stride + i * kLanes);
  }
}

void ColumnProducts(const float* x, int64_t n, int64_t dim, const float* tile, float* out, int64_t stride) {
  int64_t i = 0;
  for (; i + kRows <= n; i += kRows) store_products<kRows>(x + i * dim, dim, tile, out + i * stride, stride);
  for (; i < n; ++i) store_products<1>(x + i * dim, dim, tile, out + i * stride, stride);
}

// Best value and tile of each lane, for kN rows over one tile.
template <int kN>
HWY_INLINE void improve(const float* x, int64_t dim, const float* tile, float index, float* value, float* where) {
  const D d;
  V sum[kN][kVecs];
  products<kN>(x, dim, tile, sum);
  for (int r = 0; r < kN; ++r) {
    for (int i = 0; i < kVecs; ++i) {
      float* at = value + r * kColumnTile + i * kLanes;
      float* tiles = where + r * kColumnTile + i * kLanes;
      const V old = hn::LoadU(d, at);
      const auto better = hn::Gt(sum[r][i], old);
      hn::StoreU(hn::IfThenElse(better, sum[r][i], old), d, at);
      hn::StoreU(hn::IfThenElse(better, hn::Set(d, index), hn::LoadU(d, tiles)), d, tiles);
    }
  }
}

void BestColumns(const float* x, int64_t n, int64_t dim, const float* tiles, int64_t n_tiles, int32_t* best) {
  constexpr int64_t kAtOnce = 64;  // rows whose values stay near while tiles pass
  float value[kAtOnce * kColumnTile], where[kAtOnce * kColumnTile];
  for (int64_t first = 0; first < n; first += kAtOnce) {
    const int64_t count = HWY_MIN(kAtOnce, n - first);
    for (int64_t i = 0; i < count * kColumnTile; ++i) {
      value[i] = -std::numeric_limits<float>::infinity();
      where[i] = 0.0f;
    }
    for (int64_t t = 0; t < n_tiles; ++t) {
      const float* tile = tiles + t * dim * kColumnTile;
      int64_t i = 0;
      for (; i + kRows <= count; i += kRows) {
        improve<kRows>(x + (first + i) * dim, dim, tile, float(t), value + i * kColumnTile, where + i * kColumnTile);
      }
      for (; i < count; ++i) {
        improve<1>(x + (first + i) * dim, dim, tile, float(t), value + i * kColumnTile, where + i * kColumnTile);
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      const float* v = value + i * kColumnTile;
      const float* w = where + i * kColumnTile;
      int64_t winner = 0;
      for (int64_t c = 0; c < kColumnTile; ++c) {
        // NOLINTNEXTLINE(clang-analyzer-core.UndefinedBinaryOperatorResult): set above for every lane
        const int64_t column = int64_t(w[c]) * kColumnTile + c;
        const int64_t held = int64_t(w[winner]) * kColumnTile + winner;
        if (v[c] > v[winner] || (v[c] == v[winner] && column < held)) winner = c;
      }
      best[first + i] = int32_t(int64_t(w[winner]) * kColumnTile + winner);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(ColumnProducts);
HWY_EXPORT(BestColumns);

void column_products(const float* x, int64_t n, int64_t dim, const float* tile, float* out, int64_t stride) {
  HWY_DYNAMIC_DISPATCH(ColumnProducts)(x, n, dim, tile, out, stride);
}

void best_columns(const float* x, int64_t n, int64_t dim, const float* tiles, int64_t n_tiles, int32_t* best) {
  HWY_DYNAMIC_DISPATCH(BestColumns)(x, n, dim, tiles, n_tiles, best);
}

}  // namespace longkv
#endif
