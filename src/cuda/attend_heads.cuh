// Attention of a decoded token whose rows are what products have sixteen of, and up to eight query heads of a KV head
// the other side: the running softmax, the sums over rows, and what a block of threads leaves behind.
//
// A lane 4 g + c has the scores of rows g and g + 8 of a tile under heads 2 c and 2 c + 1; their transposes are the
// weights that products with values want. Of values it has rows 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 and of every 32
// channels 4 g to 4 g + 3, as codes that are not decoded: a code is a half below 2^-14, times 2^24 and divided by its
// place, a power of two that belongs to j of channel 4 g + j.
#pragma once

#include "cuda/attend_token.cuh"

namespace longkv::card {

constexpr int kColumns = 8;  // query heads of a block of threads
constexpr float kCodeUnit = 0x1p24f;

__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
  return half2_bits(__hmul2(bits_half2(a), bits_half2(b)));
}
// The transpose of eight rows of eight halves; a lane has two neighbours of row lane / 4.
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
  uint32_t turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

// Weights are halves, and so are their products with a row's scales: what they count from is chosen so that neither
// falls below the normal halves where that can be helped, or leaves their range. The largest weight is 2^above when it
// is chosen, and may grow to 2^(above + kRoom); scales may grow by kRoom binades too. Of scales of 2^e about the
// product's 2^6 is aimed at, which leaves 2^(6 + 1 + 2 kRoom) = 2^15 as the largest product.
template <int kDim, int kWarps>
struct HeadSums {
  static constexpr int kRoom = 4, kMostAbove = 15 - kRoom;
  // Of tile t of 16 channels: [2 s + e] is channel 32 (t / 2) + 4 g + 2 (t % 2) + s of head 2 c + e. extra: [e] what is
  // added to channels 32 g to 32 g + 31, [2 + e] where g is 0 the weights.
  float out[kDim / 16][4] = {}, extra[4] = {};
  float top[2] = {kNothing, kNothing};  // weights count from here; it follows scores only where one is far above it
  float above = 0.0f;
  uint32_t limit = 0;  // the largest scale that `above` allows, a half, twice

  // Scores in units of log 2 of kTiles tiles, of rows g + 8 (e / 2) under heads 2 c + e % 2, to weights of rows 2 c,
  // 2 c + 1 and 2 c + 8, 2 c + 9 under head g. scales: magnitudes of a lane's share of the rows' scales of values, two
  // halves.
  template <int kTiles>
  __device__ __forceinline__ void weigh(const float (&s)[kTiles][4], uint32_t scales, uint32_t (&weights)[kTiles][2]) {
    const __half* const tag = nullptr;
    float best[2] = {s[0][0], s[0][1]};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (t > 0 || e > 1) best[e % 2] = fmaxf(best[e % 2], s[t][e]);
    }
    const float far = above + float(kRoom);
    const bool grown = !__hble2(bits_half2(scales), bits_half2(limit));
    if (__any_sync(kAllLanes, best[0] > top[0] + far || best[1] > top[1] + far || grown)) {
      const uint32_t largest = __reduce_max_sync(kAllLanes, max(scales & 0xffffu, scales >> 16));
      const int binade = int(largest >> 10) - 15;
      const auto next_above = float(min(kMostAbove, 6 - binade));
      limit = (min(largest >> 10, 31u - (kRoom + 1)) + (kRoom + 1)) << 10;
      limit |= limit << 16;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float from = fmaxf(top[e] + above, best[e]);
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) from = fmaxf(from, __shfl_xor_sync(kAllLanes, from, lanes));
        from -= next_above;
        const float keep = exp2_fast(top[e] - from);
        top[e] = from;
        extra[e] *= keep, extra[2 + e] *= keep;
#pragma unroll
        for (int t = 0; t < kDim / 16; ++t) out[t][e] *= keep, out[t][2 + e] *= keep;
      }
      above = next_above;
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        weights[t][r] =
            transpose(pack_pair(exp2_fast(s[t][2 * r] - top[0]), exp2_fast(s[t][2 * r + 1] - top[1]), tag));
    }
  }
  // To `to`, which `extra` counts: weights, and their products with one number of a row for each 32 channels: upper of
  // rows 2 c and 2 c + 1, lower of 2 c + 8 and 2 c + 9, of channels 32 g..., 0 where there are none.
  static __device__ __forceinline__ void add_extra(float (&to)[4], const uint32_t (&weights)[2], uint32_t upper,
                                                   uint32_t lower, int g) {
    const __half* const tag = nullptr;
    const uint32_t ones = g == 0 ? 0x3c003c00u : 0u;
    const uint32_t a[4] = {upper, ones, lower, ones};
    mma(to, a, weights[0], weights[1], tag);
  }

  struct Shared {
    float merged[kColumns][kDim + 4];
    float maxima[kWarps][kColumns], sums[kWarps][kColumns];
  };
  // The warps' sums, added up in order, so that every run gives the same. unit(j): what one is worth of the sums of
  // channels 4 g + j.
  template <class Unit>
  __device__ __forceinline__ void leave(Shared& shared, const DecodeScratch& scratch, int first_head, int heads,
                                        int split, const Unit& unit) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    auto& [merged, maxima, sums] = shared;
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (g == 0) maxima[warp][2 * c + e] = top[e], sums[warp][2 * c + e] = extra[2 + e];
    __syncthreads();
    float factor[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float all = kNothing;
      for (int w = 0; w < kWarps; ++w) all = fmaxf(all, maxima[w][2 * c + e]);
      factor[e] = exp2_fast(top[e] - all);
    }
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) {
#pragma unroll
        for (int t = 0; t < kDim / 16; ++t) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float more = __shfl_sync(kAllLanes, extra[e], 4 * (t / 2) + c);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const int j = 2 * (t % 2) + r;
              const float x = fmaf(out[t][2 * r + e], unit(j), more) * factor[e];
              float& to = merged[2 * c + e][32 * (t / 2) + 4 * g + j];
              to = w == 0 ? x : to + x;
            }
          }
        }
      }
      __syncthreads();
    }
    for (int i = int(threadIdx.x); i < heads * kDim; i += kWarps * 32) {
      const int h = i / kDim, channel = i % kDim;
      float all = kNothing, total = 0.0f;
      for (int w = 0; w < kWarps; ++w) all = fmaxf(all, maxima[w][h]);
      for (int w = 0; w < kWarps; ++w) total += sums[w][h] * exp2_fast(maxima[w][h] - all);
      const int64_t to = scratch.at(first_head + h, split);
      scratch.out[to * kDim + channel] = total != 0.0f ? merged[h][channel] / total : 0.0f;
      if (channel == 0) scratch.lse[to] = total != 0.0f ? all * kLn2 + logf(total) : kMinusInfinity;
    }
  }
};

// Words of shared memory, `bytes` of at most kBytes, in the widest words that both allow; kBytes: 4, 8 or a multiple of 16.
template <int kBytes, class From, int N>
__device__ __forceinline__ void load_chunks(uint32_t (&to)[N], const From* from, int bytes) {
  static_assert(4 * N >= kBytes && (kBytes == 4 || kBytes == 8 || kBytes % 16 == 0));
  if (bytes == kBytes) {
    if constexpr (kBytes % 16 == 0) {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) {
        const uint4 w = reinterpret_cast<const uint4*>(from)[i];
        to[4 * i] = w.x, to[4 * i + 1] = w.y, to[4 * i + 2] = w.z, to[4 * i + 3] = w.w;
      }
    } else if constexpr (kBytes == 8) {
      const uint2 w = *reinterpret_cast<const uint2*>(from);
      to[0] = w.x, to[1] = w.y;
    } else {
      to[0] = *reinterpret_cast<const uint32_t*>(from);
    }
    return;
  }
  const auto* parts = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
  for (int i = 0; i < kBytes / 4; ++i) {
    to[i] = 4 * i < bytes ? parts[2 * i] : 0;
    if (4 * i + 2 < bytes) to[i] |= uint32_t(parts[2 * i + 1]) << 16;
  }
}

}  // namespace longkv::card
