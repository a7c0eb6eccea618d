// The parts of a decoded token's attention that do not depend on how rows are stored: the running softmax over tiles of
// 16 rows, the product with their values, and what a block of threads leaves behind.
#pragma once

#include "cuda/key_row.cuh"
#include "cuda/kv.h"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"

namespace longkv::card {

constexpr int kTokenWarps = 4;
constexpr int kTokenTile = 16;  // rows that a warp takes at a time, and query heads of a block of threads

// The partial of a block without rows, whose sums are not read (merge_partials()).
__device__ __forceinline__ void leave_nothing(const DecodeScratch& scratch, int first_head, int heads, int split) {
  if (int(threadIdx.x) < heads) scratch.lse[scratch.at(first_head + int(threadIdx.x), split)] = kMinusInfinity;
}

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Heads [first, first + heads) of q [heads][dim] as fragments, chunk(i) of eight channels for products 2 i and 2 i + 1.
template <int kChunks, class Chunk>
__device__ __forceinline__ void load_query(const half_t* q, int dim, int heads, int g, const Chunk& chunk,
                                           uint32_t (&to)[2 * kChunks][4]) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    uint4 upper = make_uint4(0, 0, 0, 0), lower = upper;
    const half_t* from = q + chunk(i) * 8;
    if (g < heads) upper = *reinterpret_cast<const uint4*>(from + g * dim);
    if (g + 8 < heads) lower = *reinterpret_cast<const uint4*>(from + (g + 8) * dim);
    to[2 * i][0] = upper.x, to[2 * i][1] = lower.x, to[2 * i][2] = upper.y, to[2 * i][3] = lower.y;
    to[2 * i + 1][0] = upper.z, to[2 * i + 1][1] = lower.z, to[2 * i + 1][2] = upper.w, to[2 * i + 1][3] = lower.w;
  }
}

// `top` of a head of which no row was seen: a number, so that masked scores weigh 0 against it and what is not a number
// stays so.
constexpr float kNothing = -1e30f;

// What a warp has of the rows that it passed. Channel of out[8 pass + j][e]: 8 (kRuns ? column * kPasses + pass :
// 8 pass + column) + j with column 2 c + e % 2, of head g + 8 (e / 2).
template <int kDim, bool kRuns, int kWarps = kTokenWarps>
struct TokenSums {
  static constexpr int kPasses = (kDim + 63) / 64;  // of 64 channels of V
  float out[kPasses * 8][4];
  float top[2], sum[2];  // of heads g and g + 8

  __device__ __forceinline__ TokenSums() {
#pragma unroll
    for (int i = 0; i < kPasses * 8; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[i][e] = 0.0f;
    }
    top[0] = top[1] = kNothing;
    sum[0] = sum[1] = 0.0f;
  }

  // Scores of rows 8 h + 2 c + e % 2 under heads g + 8 (e / 2), in units of log 2, minus infinity where masked, become
  // weights; keep: what the sums of before still count.
  __device__ __forceinline__ void weigh(float (&s)[2][4], float (&keep)[2]) {
    float best[2] = {kMinusInfinity, kMinusInfinity};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 4; ++e) best[e / 2] = fmaxf(best[e / 2], s[h][e]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      best[r] = fmaxf(best[r], __shfl_xor_sync(kAllLanes, best[r], 1));
      best[r] = fmaxf(best[r], __shfl_xor_sync(kAllLanes, best[r], 2));
      const float next = fmaxf(top[r], best[r]);
      keep[r] = exp2_fast(top[r] - next);
      top[r] = next;
      sum[r] *= keep[r];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[h][e] = exp2_fast(s[h][e] - top[e / 2]);
        sum[e / 2] += s[h][e];
      }
    }
  }

  // value(r, pass): eight channels, two to a word, of row 2 c + r % 2 + 8 (r / 2).
  template <class Value, class Rows>
  __device__ __forceinline__ void add(const float (&s)[2][4], const float (&keep)[2], const Rows& value,
                                      const Value* tag) {
    const uint32_t weights[4] = {pack_pair(s[0][0], s[0][1], tag), pack_pair(s[0][2], s[0][3], tag),
                                 pack_pair(s[1][0], s[1][1], tag), pack_pair(s[1][2], s[1][3], tag)};
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint4 rows_of[4] = {value(0, pass), value(1, pass), value(2, pass), value(3, pass)};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float* o = out[pass * 8 + j];
        o[0] *= keep[0], o[1] *= keep[0], o[2] *= keep[1], o[3] *= keep[1];
        const unsigned halves = j % 2 == 0 ? 0x5410u : 0x7632u;
        const uint32_t b0 = __byte_perm(word_of(rows_of[0], j / 2), word_of(rows_of[1], j / 2), halves);
        const uint32_t b1 = __byte_perm(word_of(rows_of[2], j / 2), word_of(rows_of[3], j / 2), halves);
        mma(o, weights, b0, b1, tag);
      }
    }
  }

  struct Shared {
    float merged[kTokenTile][kDim + 4];  // rows of different heads start in different banks
    float maxima[kWarps][kTokenTile], sums[kWarps][kTokenTile];
  };
  // The warps' sums, added up in order, so that every run gives the same, as the block's partial.
  __device__ __forceinline__ void leave(Shared& shared, const DecodeScratch& scratch, int first_head, int heads,
                                        int split) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    auto& merged = shared.merged;
    auto& maxima = shared.maxima;
    auto& sums = shared.sums;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 1);
      sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 2);
      if (c == 0) maxima[warp][g + 8 * r] = top[r], sums[warp][g + 8 * r] = sum[r];
    }
    __syncthreads();
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float all = kNothing;
      for (int w = 0; w < kWarps; ++w) all = fmaxf(all, maxima[w][g + 8 * r]);
      factor[r] = exp2_fast(top[r] - all);
    }
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              if (g + 8 * (e / 2) >= heads) continue;
              const int column = 2 * c + e % 2;
              const int channel = (kRuns ? column * kPasses + pass : pass * 8 + column) * 8 + j;
              if (kDim % 64 != 0 && channel >= kDim) continue;
              float& to = merged[g + 8 * (e / 2)][channel];
              const float x = out[pass * 8 + j][e] * factor[e / 2];
              to = w == 0 ? x : to + x;
            }
          }
        }
      }
      __syncthreads();
    }
    for (int i = threadIdx.x; i < heads * kDim; i += blockDim.x) {
      const int h = i / kDim, channel = i % kDim;
      float all = kNothing, total = 0.0f;
      for (int w = 0; w < kWarps; ++w) all = fmaxf(all, maxima[w][h]);
      for (int w = 0; w < kWarps; ++w) total += sums[w][h] * exp2_fast(maxima[w][h] - all);
      const int64_t at = scratch.at(first_head + h, split);
      scratch.out[at * kDim + channel] = total != 0.0f ? merged[h][channel] / total : 0.0f;
      if (channel == 0) scratch.lse[at] = total != 0.0f ? all * kLn2 + logf(total) : kMinusInfinity;
    }
  }
};

}  // namespace longkv::card
