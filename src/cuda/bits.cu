// The scan is a product on integer tensor cores: 16 tokens by four query heads. A lane holds 32 bits of a token; one
// mask takes the same bit of its four bytes, which are four channels as unsigned bytes, 0 or a power of two. Queries
// are integers in two signed bytes each, high and low, in neighbouring columns, so that a lane has both sums of a head.
// The sums start as the bits of a large float, so that they are floats without a conversion.
//
// What a warp takes at a time is a chunk of 64 tokens, copied to shared memory two chunks ahead. Of a chunk, for dim
// channels in groups of 32:
//   codes       32-bit words [tile pairs 2][words of a lane dim / 128][lane 32][tile of the pair 2][row g, g + 8], so
//               that a lane's words lie side by side; with 64 channels two lanes share a word, which holds both
//               lanes' bits in the halves of its bytes
//   a word      bit p of byte j: channel 32 G + 8 c + 4 (p % 2) + j of group G = p / 2, c = lane % 4
//   magnitudes  halves [tile 4][g 8][row g, g + 8][group], each times 2^(3 - 2 (G % 4)): what the bit's place is worth
//               comes off the sums that way
#include <cuda_fp16.h>

#include "cuda/async.cuh"
#include "cuda/bits.h"
#include "cuda/choice.cuh"
#include "cuda/key_row.cuh"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"
#include "cuda/radix.cuh"

namespace longkv::card {

namespace {

constexpr int kParts = BitsScratch::kParts;
constexpr int kThreads = 256;
constexpr int kChunk = CardBits::kChunk;

// In-place Hadamard transform of the row whose channel 32 j + lane is x[j]; kValues: a power of two.
template <int kValues>
__device__ __forceinline__ void hadamard(float (&x)[kValues], int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      const float other = __shfl_xor_sync(kAllLanes, x[j], step);
      x[j] = lane & step ? other - x[j] : x[j] + other;
    }
  }
#pragma unroll
  for (int step = 1; step < kValues; step *= 2) {
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      if (j & step) continue;
      const float a = x[j], b = x[j + step];
      x[j] = a + b;
      x[j + step] = a - b;
    }
  }
  const float norm = rsqrtf(float(32 * kValues));
#pragma unroll
  for (int j = 0; j < kValues; ++j) x[j] *= norm;
}

// Places of a row's code word and of its magnitudes, in words and halves from the head's first.
template <int kDim>
__device__ __forceinline__ int64_t code_at(int64_t position, int word) {
  const int tile = int(position % kChunk) / 16, row = int(position % 16), g = row % 8, second = row / 8;
  const int64_t chunk = position / kChunk * (kChunk * kDim / 32);
  if (kDim == 64) return chunk + (((tile / 2 * 8 + g) * 2 + word) * 2 + tile % 2) * 2 + second;
  constexpr int kLaneWords = kDim == 64 ? 1 : kDim / 128;
  const int lane = g * 4 + word / kLaneWords;
  return chunk + (((tile / 2 * kLaneWords + word % kLaneWords) * 32 + lane) * 2 + tile % 2) * 2 + second;
}
template <int kDim>
__device__ __forceinline__ int64_t size_at(int64_t position, int group) {
  const int tile = int(position % kChunk) / 16, row = int(position % 16);
  return position / kChunk * (kChunk * kDim / 32) + ((tile * 8 + row % 8) * 2 + row / 8) * (kDim / 32) + group;
}

// A warp a row.
template <int kDim, class Rows>
__device__ __forceinline__ void write_row(const Rows& rows, const CardBits& bits, int head, int64_t position) {
  constexpr int kWords = kDim / 32;
  const int lane = threadIdx.x % 32;
  const KeyRow row = key_row(rows, head, position);
  float x[kWords];
#pragma unroll
  for (int j = 0; j < kWords; ++j) x[j] = row.at(32 * j + lane);
  if (bits.rotate) hadamard(x, lane);
  const int64_t base = head * bits.tokens * kWords;
  uint32_t mine = 0;  // lane w: word w
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
    const unsigned signs = __ballot_sync(kAllLanes, x[j] >= 0.0f);
    const float sum = warp_sum(fabsf(x[j])), square = warp_sum(x[j] * x[j]);
    const float size = !bits.unbiased ? sum / 32.0f : sum == 0.0f ? 0.0f : square / sum;
    if (lane == j) {
      const float scaled = fminf(size * (8.0f / float(1 << (2 * (j % 4)))), 65504.0f);
      bits.magnitudes[base + size_at<kDim>(position, j)] = __half_as_ushort(__float2half_rn(scaled));
    }
    // The word's share of this group: of lanes c whose bits it holds, two runs of four channels.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int c = kDim == 64 ? 2 * lane + i : kDim == 128 ? lane : lane / 2;
      const int plane = kDim == 64 ? 4 * (i & 1) + 2 * j : 2 * (j % 4);
      const bool here = kDim == 64 ? i < 2 : i == 0 && (kDim == 128 || lane % 2 == j / 4);
      if (!here) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t run = signs >> ((8 * c + 4 * h) & 31) & 15u;
        mine |= (run * 0x00204081u & 0x01010101u) << (plane + h);
      }
    }
  }
  if (lane < kWords) bits.codes[base + code_at<kDim>(position, lane)] = mine;
}

template <int kDim>
__global__ void __launch_bounds__(kThreads) write_kernel(CardKv kv, CardBits bits, int64_t first, int64_t n) {
  const int64_t row = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (row < n) write_row<kDim>(kv, bits, int(blockIdx.y), first + row);
}
template <int kDim, class Rows>
__global__ void write_last_kernel(Rows rows, CardBits bits, const int64_t* position) {
  let_next_start();
  wait_for_previous();
  write_row<kDim>(rows, bits, int(blockIdx.x), *position);
}

struct ScanArgs {
  const half_t* q;
  bool bfloat;
  int group, kv_heads;
  CardBits bits;
  ChoiceRules rules;
  float scale;
  const int64_t* position;
  BitsScratch scratch;
};

// Sums of 16 tokens (unsigned bytes) by 8 columns (signed bytes) over 32 channels, from `from` on.
__device__ __forceinline__ void mma_bytes(int (&to)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                          const int4& from) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(from.x), "r"(from.y), "r"(from.z),
        "r"(from.w));
}

constexpr int kScanWarps = 4, kStages = 3, kHeadSet = 4;
constexpr int kLargestQuery = 63 * 64 + 31;  // in two bytes: 64 * high + low, of which one may be doubled
constexpr float kExact = 12582912.0f;        // 1.5 * 2^23: floats about it are the integers

// Two of four values that lanes hold of `step` lanes apart are summed, the pair that `upper` says.
__device__ __forceinline__ float fold(float a, float b, bool upper, int step) {
  const float keep = upper ? b : a, give = upper ? a : b;
  return keep + __shfl_xor_sync(kAllLanes, give, step);
}

// kSets: of four query heads.
template <int kDim, int kSets>
__global__ void __launch_bounds__(kScanWarps * 32, kDim <= 128 && kSets == 1 ? 6 : 1) scan_kernel(ScanArgs p) {
  constexpr int kGroups = kDim / 32, kLaneWords = kDim == 64 ? 1 : kDim / 128;
  constexpr int kCodeBytes = kChunk * kDim / 8, kChunkBytes = kCodeBytes + kChunk * kGroups * 2;
  __shared__ __align__(16) uint8_t staged[kScanWarps][kStages][kChunkBytes];
  __shared__ __align__(16) int8_t queries[kSets * kHeadSet][2][kDim];  // high and low parts, as products take them
  __shared__ __align__(16) int4 starts[kSets * kHeadSet][kGroups];
  __shared__ float units[kSets * kHeadSet];
  __shared__ float tops[kScanWarps][kSets * kHeadSet], sums[kScanWarps][kSets * kHeadSet];
  let_next_start();
  wait_for_previous();
  const CardBits& bits = p.bits;
  const Choice choice = choice_of(*p.position, bits.block, p.rules);
  if (choice.all) return;
  const int kv_head = int(blockIdx.y), first_head = int(blockIdx.z) * kSets * kHeadSet;
  const int heads = min(kSets * kHeadSet, p.group - first_head);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;

  const int64_t tile_begin = choice.begin * (bits.block / 16), tile_end = choice.end * (bits.block / 16);
  const int64_t stride = int64_t(gridDim.x) * kScanWarps, chunk_end = (tile_end + 3) / 4;
  int64_t chunk = tile_begin / 4 + int64_t(blockIdx.x) * kScanWarps + warp;
  const auto* codes = reinterpret_cast<const uint8_t*>(bits.codes) + kv_head * bits.tokens * (kDim / 8);
  const auto* sizes = reinterpret_cast<const uint8_t*>(bits.magnitudes) + kv_head * bits.tokens * (kGroups * 2);
  const auto fetch = [&](int64_t at, int stage) {
    if (at < chunk_end) {
      uint8_t* to = staged[warp][stage];
#pragma unroll
      for (int i = 0; i < kCodeBytes; i += 512) copy_ahead(to + i + lane * 16, codes + at * kCodeBytes + i + lane * 16);
#pragma unroll
      for (int i = 0; i < kChunkBytes - kCodeBytes; i += 512) {
        if (i + lane * 16 < kChunkBytes - kCodeBytes)
          copy_ahead(to + kCodeBytes + i + lane * 16, sizes + at * (kChunkBytes - kCodeBytes) + i + lane * 16);
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) fetch(chunk + i * stride, i);

  // Queries as integers; what one of them is worth, in units of the softmax's exponent and of log 2.
  for (int h = warp; h < kSets * kHeadSet; h += kScanWarps) {
    float x[kGroups] = {};
    float largest = 0.0f;
    if (h < heads) {
      const half_t* from = p.q + int64_t(kv_head * p.group + first_head + h) * kDim;
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const half_t v = from[32 * j + lane];
        x[j] = p.bfloat ? __uint_as_float(uint32_t(v) << 16) : __half2float(__ushort_as_half(v));
      }
      if (bits.rotate) hadamard(x, lane);
#pragma unroll
      for (int j = 0; j < kGroups; ++j) largest = fmaxf(largest, fabsf(x[j]));
      largest = warp_max(largest);
    }
    const float inverse = largest > 0.0f ? float(kLargestQuery) / largest : 0.0f;
    // Of the two bits of a channel's byte that products take together the second is worth twice the first.
    const int first_bit = lane % 8 < 4 ? 2 : 1;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const int v = __float2int_rn(x[j] * inverse), high = (v + 32) >> 6, low = v - 64 * high, place = 2 * (j % 4);
      queries[h][0][32 * j + lane] = int8_t(high * first_bit);
      queries[h][1][32 * j + lane] = int8_t(low * first_bit);
      // Of sums: a query's own sum comes off, as a bit that is not set counts -1.
      const int of_high = __float_as_int(kExact) - (__reduce_add_sync(kAllLanes, high) << place);
      const int of_low = __float_as_int(kExact) - (__reduce_add_sync(kAllLanes, low) << place);
      if (lane == 0) starts[h][j] = make_int4(of_high, of_low, of_high, of_low);
    }
    // Above 0 also for a query of zeros, so that minus infinity stays what it is.
    if (lane == 0) units[h] = fmaxf(largest / float(kLargestQuery) * 0.125f * p.scale * kLog2E, 1e-30f);
  }
  __syncthreads();
  uint32_t q[kSets][kGroups][2];
  int4 start[kSets][kGroups];
  float unit[kSets];
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
    unit[set] = units[set * kHeadSet + c];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int8_t* column = queries[set * kHeadSet + g / 2][g % 2] + 32 * group + 8 * c;
      q[set][group][0] = *reinterpret_cast<const uint32_t*>(column);
      q[set][group][1] = *reinterpret_cast<const uint32_t*>(column + 4);
      start[set][group] = starts[set * kHeadSet + c][group];
    }
  }
  // Exponentials count from `top`, which follows the scores only when one is far above it. Of head c of a set.
  constexpr float kFar = 0x1p40f;
  float top[kSets], sum[kSets];
#pragma unroll
  for (int set = 0; set < kSets; ++set) top[set] = kMinusInfinity, sum[set] = 0.0f;
  int stage = 0;
  for (; chunk < chunk_end; chunk += stride) {
    await_copies<kStages - 2>();
    __syncwarp();
    // To where the chunk before this one was, which every lane has read.
    fetch(chunk + (kStages - 1) * stride, stage == 0 ? kStages - 1 : stage - 1);
    const uint8_t* here = staged[warp][stage];
    float x[kSets][4][2];  // scores of a lane's eight tokens
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint4 words[kLaneWords];
#pragma unroll
      for (int w = 0; w < kLaneWords; ++w) {
        const int at = kDim == 64 ? (pair * 8 + g) * 2 + c / 2 : (pair * kLaneWords + w) * 32 + lane;
        words[w] = reinterpret_cast<const uint4*>(here)[at];
        if (kDim == 64 && c % 2 == 1) {
          words[w].x >>= 4, words[w].y >>= 4, words[w].z >>= 4, words[w].w >>= 4;
        }
      }
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int tile = 2 * pair + t;
        float size[2][kGroups];
        {
          const auto* from = reinterpret_cast<const uint2*>(here + kCodeBytes) + (tile * 8 + g) * (kGroups / 2);
          uint32_t raw[kGroups];
#pragma unroll
          for (int i = 0; i < kGroups; i += 4) {
            if constexpr (kGroups % 4 == 0) {
              const uint4 v = *reinterpret_cast<const uint4*>(from + i / 2);
              raw[i] = v.x, raw[i + 1] = v.y, raw[i + 2] = v.z, raw[i + 3] = v.w;
            } else {
              raw[0] = from->x, raw[1] = from->y;
            }
          }
#pragma unroll
          for (int i = 0; i < kGroups; ++i) {
            const float2 both = __half22float2(bits_half2(raw[i]));
            size[2 * i / kGroups][2 * i % kGroups] = both.x, size[2 * i / kGroups][2 * i % kGroups + 1] = both.y;
          }
        }
        float s[kSets][2] = {};
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const int plane = 2 * (group % 4);
          const uint4& word = words[group / 4];
          const uint32_t upper = t == 0 ? word.x : word.z, lower = t == 0 ? word.y : word.w;
          const uint32_t a[4] = {upper & 0x01010101u << plane, lower & 0x01010101u << plane,
                                 upper & 0x02020202u << plane, lower & 0x02020202u << plane};
#pragma unroll
          for (int set = 0; set < kSets; ++set) {
            int d[4];
            mma_bytes(d, a, q[set][group], start[set][group]);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              // 64 high + low, exactly: kExact / 64 more is subtracted from high, for what is too much of low.
              const float high = __int_as_float(d[2 * r]) - (kExact + kExact / 64.0f);
              s[set][r] += size[r][group] * fmaf(high, 64.0f, __int_as_float(d[2 * r + 1]));
            }
          }
        }
#pragma unroll
        for (int set = 0; set < kSets; ++set) x[set][tile][0] = s[set][0], x[set][tile][1] = s[set][1];
      }
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
    if (chunk * 4 < tile_begin || chunk * 4 + 4 > tile_end) {  // tiles that are not to be chosen from
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const bool there = chunk * 4 + t >= tile_begin && chunk * 4 + t < tile_end;
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
          if (!there) x[set][t][0] = x[set][t][1] = kMinusInfinity;
        }
      }
    }
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      float mass[4];
      const auto weigh = [&] {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          mass[t] =
              exp2_fast(fmaf(x[set][t][0], unit[set], -top[set])) + exp2_fast(fmaf(x[set][t][1], unit[set], -top[set]));
        }
        return (mass[0] + mass[1]) + (mass[2] + mass[3]);
      };
      float all = weigh();
      if (__any_sync(kAllLanes, !(all <= kFar))) {  // also where nothing was seen before
        float best = fmaxf(x[set][0][0], x[set][0][1]);
#pragma unroll
        for (int t = 1; t < 4; ++t) best = fmaxf(best, fmaxf(x[set][t][0], x[set][t][1]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, step));
        best *= unit[set];
        if (best > top[set]) {
          sum[set] *= exp2_fast(top[set] - best);
          top[set] = best;
        }
        all = weigh();
      }
      sum[set] += all;
      // Lanes of the same c hold other tokens: bits 0 and 1 of g say in the end whose sum a lane has.
      const float low = fold(mass[0], mass[1], g & 1, 4), high = fold(mass[2], mass[3], g & 1, 4);
      float of_tile = fold(low, high, g & 2, 8);
      of_tile += __shfl_xor_sync(kAllLanes, of_tile, 16);
      const int64_t tile = chunk * 4 + (g & 3);
      if (g < 4 && set * kHeadSet + c < heads && tile < tile_end) {
        p.scratch.masses[int64_t(kv_head * p.group + first_head + set * kHeadSet + c) * (bits.tokens / 16) + tile] =
            of_tile > 0.0f ? top[set] + __log2f(of_tile) : kMinusInfinity;
      }
    }
  }
  await_copies<0>();
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum[set] += __shfl_xor_sync(kAllLanes, sum[set], step);
    if (g == 0) tops[warp][set * kHeadSet + c] = top[set], sums[warp][set * kHeadSet + c] = sum[set];
  }
  __syncthreads();
  if (int(threadIdx.x) < heads) {
    float all = kMinusInfinity, total = 0.0f;
    for (int w = 0; w < kScanWarps; ++w) all = fmaxf(all, tops[w][threadIdx.x]);
    for (int w = 0; w < kScanWarps; ++w)
      if (tops[w][threadIdx.x] != kMinusInfinity) total += sums[w][threadIdx.x] * exp2_fast(tops[w][threadIdx.x] - all);
    const int64_t at = int64_t(kv_head * p.group + first_head + threadIdx.x) * kParts + blockIdx.x;
    reinterpret_cast<float2*>(p.scratch.partial)[at] = make_float2(all, total);
  }
}

// Shares of the query heads' masses, added up in their order, and the tops of every kTopRun blocks.
__global__ void __launch_bounds__(kThreads) share_kernel(ScanArgs p, float* scores, uint32_t* tops) {
  __shared__ float offsets[16];  // log2 of a head's whole mass
  let_next_start();
  wait_for_previous();
  const Choice choice = choice_of(*p.position, p.bits.block, p.rules);
  if (choice.all) return;
  const int kv_head = int(blockIdx.y), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int h = warp; h < p.group; h += kThreads / 32) {
    const auto* partial = reinterpret_cast<const float2*>(p.scratch.partial) + int64_t(kv_head * p.group + h) * kParts;
    float top = kMinusInfinity, total = 0.0f;
    for (int i = lane; i < kParts; i += 32) top = fmaxf(top, partial[i].x);
    top = warp_max(top);
    for (int i = lane; i < kParts; i += 32)
      if (partial[i].x != kMinusInfinity) total += partial[i].y * exp2_fast(partial[i].x - top);
    total = warp_sum(total);
    if (lane == 0) offsets[h] = total > 0.0f ? top + __log2f(total) : 0.0f;
  }
  __syncthreads();
  const int64_t stride = int64_t(gridDim.x) * kThreads, origin = choice.begin / kTopRun * kTopRun;
  // All lanes of a warp stay in the loop: tops are those of half warps.
  for (int64_t b = origin + int64_t(blockIdx.x) * kThreads + threadIdx.x; b - lane < choice.end; b += stride) {
    const bool there = b >= choice.begin && b < choice.end;
    float sum = 0.0f;
    const int tiles = p.bits.block / 16;
    for (int h = 0; h < p.group && there; ++h) {
      const float* mass = p.scratch.masses + int64_t(kv_head * p.group + h) * (p.bits.tokens / 16) + b * tiles;
      for (int t = 0; t < tiles; ++t) sum += exp2_fast(mass[t] - offsets[h]);
    }
    if (there) scores[kv_head * p.bits.capacity + b] = sum;
    uint32_t top = there ? order_key(sum) : 0;
#pragma unroll
    for (int step = kTopRun / 2; step > 0; step /= 2) top = max(top, __shfl_xor_sync(kAllLanes, top, step));
    if (lane % kTopRun == 0 && b < choice.end) tops[kv_head * top_count(p.bits.capacity) + b / kTopRun] = top;
  }
}

template <int kDim>
Status scan(const ScanArgs& p, float* scores, CardStreamHandle stream) {
  const dim3 grid(kParts, unsigned(p.kv_heads), unsigned((p.group + 2 * kHeadSet - 1) / (2 * kHeadSet)));
  LONGKV_TRY(p.group <= kHeadSet ? launch_close("score_bits", scan_kernel<kDim, 1>, grid, kScanWarps * 32, stream, p)
                                 : launch_close("score_bits", scan_kernel<kDim, 2>, grid, kScanWarps * 32, stream, p));
  return launch_close("share_masses", share_kernel, dim3(64, unsigned(p.kv_heads)), kThreads, stream, p, scores,
                      score_tops(scores, p.kv_heads, p.bits.capacity));
}

template <class Rows>
Status write_last(const Rows& rows, const CardBits& bits, const int64_t* position, CardStreamHandle stream) {
  const auto heads = unsigned(rows.kv_heads);
  switch (rows.dim) {
    case 64: return launch_close("write_bits", write_last_kernel<64, Rows>, heads, 32, stream, rows, bits, position);
    case 128: return launch_close("write_bits", write_last_kernel<128, Rows>, heads, 32, stream, rows, bits, position);
    case 256: return launch_close("write_bits", write_last_kernel<256, Rows>, heads, 32, stream, rows, bits, position);
    default: return Status(Code::kUnsupported, "write_bits: head dimension");
  }
}

}  // namespace

CardBits place_bits(int block, int kv_heads, int dim, int64_t capacity, bool rotate, bool unbiased, uint8_t* memory) {
  CardBits bits;
  bits.block = block;
  bits.capacity = capacity;
  bits.tokens = CardBits::tokens_of(block, capacity);
  bits.rotate = rotate, bits.unbiased = unbiased;
  bits.codes = reinterpret_cast<uint32_t*>(memory);
  bits.magnitudes = reinterpret_cast<half_t*>(bits.codes + kv_heads * bits.tokens * (dim / 32));
  return bits;
}
BitsScratch BitsScratch::at(uint8_t* memory, int heads) {
  auto* partial = reinterpret_cast<float*>(memory);
  return {partial + int64_t(heads) * kParts * 2, partial};
}

Status write_bits(const CardKv& kv, const CardBits& bits, int64_t first, int64_t n, CardStreamHandle stream) {
  if (n <= 0) return {};
  const dim3 grid(unsigned((n + kThreads / 32 - 1) / (kThreads / 32)), unsigned(kv.kv_heads));
  switch (kv.dim) {
    case 64: write_kernel<64><<<grid, kThreads, 0, stream>>>(kv, bits, first, n); break;
    case 128: write_kernel<128><<<grid, kThreads, 0, stream>>>(kv, bits, first, n); break;
    case 256: write_kernel<256><<<grid, kThreads, 0, stream>>>(kv, bits, first, n); break;
    default: return Status(Code::kUnsupported, "write_bits: head dimension");
  }
  return launched("write_bits");
}
Status write_bits_last(const CardKv& kv, const CardBits& bits, const int64_t* position, CardStreamHandle stream) {
  return write_last(kv, bits, position, stream);
}
Status write_bits_last(const BlockStore& rows, const CardBits& bits, const int64_t* position, CardStreamHandle stream) {
  return write_last(rows, bits, position, stream);
}

Status score_bits(const half_t* q, int heads, const CardKv& kv, const CardBits& bits, const ChoiceRules& rules,
                  float scale, const int64_t* position, const BitsScratch& scratch, float* scores,
                  CardStreamHandle stream) {
  const int group = heads / kv.kv_heads;
  if (group > 16) return Status(Code::kUnsupported, "score_bits: more than 16 query heads share a KV head");
  const ScanArgs p{q, kv.type == KvType::kBf16, group, kv.kv_heads, bits, rules, scale, position, scratch};
  switch (kv.dim) {
    case 64: return scan<64>(p, scores, stream);
    case 128: return scan<128>(p, scores, stream);
    case 256: return scan<256>(p, scores, stream);
    default: return Status(Code::kUnsupported, "score_bits: head dimension");
  }
}

}  // namespace longkv::card
