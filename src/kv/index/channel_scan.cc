#include "kv/index/channel_scan.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kv/index/channel_scan.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
constexpr int64_t kTokens = 16;  // scored together
using D = hn::CappedTag<float, size_t(kTokens)>;
using V = hn::Vec<D>;
constexpr int kLanes = int(hn::MaxLanes(D()));
constexpr int kVecs = int(kTokens) / kLanes;
constexpr int kMaxHeads = 4;

template <int kHeads>
void scan_heads(const f16_t* tile, const int32_t* channels, int64_t n_channels, const float* q, int64_t first,
                int64_t count, float* scores, int64_t stride) {
  const D d;
  const hn::Rebind<hwy::float16_t, D> dh;
  alignas(64) float edge[kTokens];
  // Whole vectors from a multiple of their length: a tile has whole ones, and what lies outside is dropped.
  for (int64_t t = first / kTokens * kTokens; t < first + count; t += kTokens) {
    V sum[kHeads][kVecs];
    for (auto& row : sum) {
      for (V& v : row) v = hn::Zero(d);
    }
    for (int64_t i = 0; i < n_channels; ++i) {
      const auto* k = reinterpret_cast<const hwy::float16_t*>(tile + channels[i] * kChannelTile + t);
      V key[kVecs];
      for (int v = 0; v < kVecs; ++v) key[v] = hn::PromoteTo(d, hn::LoadU(dh, k + v * kLanes));
      for (int j = 0; j < kHeads; ++j) {
        const V qc = hn::Set(d, q[j * n_channels + i]);
        for (int v = 0; v < kVecs; ++v) sum[j][v] = hn::MulAdd(qc, key[v], sum[j][v]);
      }
    }
    const int64_t begin = std::max(first, t), end = std::min(first + count, t + kTokens);
    for (int j = 0; j < kHeads; ++j) {
      for (int v = 0; v < kVecs; ++v) hn::Store(sum[j][v], d, edge + v * kLanes);
      std::copy(edge + begin - t, edge + end - t, scores + j * stride + begin - first);
    }
  }
}

void ChannelScan(const f16_t* tile, const int32_t* channels, int64_t n_channels, const float* q, int n_q, int64_t first,
                 int64_t count, float* scores, int64_t stride) {
  for (int j = 0; j < n_q; j += kMaxHeads) {
    const float* own = q + j * n_channels;
    float* out = scores + j * stride;
    switch (n_q - j) {
      case 1: scan_heads<1>(tile, channels, n_channels, own, first, count, out, stride); break;
      case 2: scan_heads<2>(tile, channels, n_channels, own, first, count, out, stride); break;
      case 3: scan_heads<3>(tile, channels, n_channels, own, first, count, out, stride); break;
      default: scan_heads<kMaxHeads>(tile, channels, n_channels, own, first, count, out, stride);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(ChannelScan);

void channel_scan(const f16_t* tile, const int32_t* channels, int64_t n_channels, const float* q, int n_q,
                  int64_t first, int64_t count, float* scores, int64_t stride) {
  HWY_DYNAMIC_DISPATCH(ChannelScan)(tile, channels, n_channels, q, n_q, first, count, scores, stride);
}

}  // namespace longkv
#endif
