// The scan is a product on integer tensor cores: 16 tokens by four query heads. A lane holds 32 bits of a token; one
// mask takes the same bit of its four bytes, which are four channels as unsigned bytes, 0 or a power of two. Queries
// are integers in two signed bytes each, high and low, in neighbouring columns, so that a lane has both sums of a head.
// The sums start as the bits of a large float, so that they are floats without a conversion; what the float adds to a
// token's score is taken off as a product of its magnitudes with that float.
// Chunks (bits_rows.cuh) are copied to shared memory two ahead.
#include <cuda_fp16.h>

#include "cuda/async.cuh"
#include "cuda/bits_rows.cuh"
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

// `factor` times the sums of what rows g ([0]) and g + 8 ([2]) hold, halves of which a lane has two; 0 where there are
// none. (The factor is above 0: ptxas 13.0 negates only one half of a constant pair below.)
__device__ __forceinline__ void take_offsets(float (&to)[4], uint32_t upper, uint32_t lower, uint32_t factor) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
      : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
      : "r"(upper), "r"(lower), "r"(factor), "f"(0.0f));
}

constexpr int kScanWarps = 4, kStages = 3, kHeadSet = 4;
constexpr int kLargestQuery = 31 * 64 + 31;  // in two bytes, 64 * high + low; sums times their place stay below 2^22
constexpr float kExact = 24576.0f;           // 1.5 * 2^14: floats about it are the multiples of 2^-9
constexpr float kExactUnit = 0x1p-9f;

// Two of four values that lanes hold of `step` lanes apart are summed, the pair that `upper` says.
__device__ __forceinline__ float fold(float a, float b, bool upper, int step) {
  const float keep = upper ? b : a, give = upper ? a : b;
  return keep + __shfl_xor_sync(kAllLanes, give, step);
}

// kSets: of four query heads.
template <int kDim, int kSets>
__global__ void __launch_bounds__(kScanWarps * 32, kDim <= 128 && kSets == 1 ? 4 : 1) scan_kernel(ScanArgs p) {
  constexpr int kGroups = kDim / 32, kLaneWords = kDim == 64 ? 1 : kDim / 128;
  constexpr int kCodeBytes = kChunk * kDim / 8, kSizeBytes = kChunk * kGroups * 2,
                kChunkBytes = kCodeBytes + kSizeBytes;
  __shared__ __align__(16) uint8_t staged[kScanWarps][kStages][kChunkBytes];
  __shared__ __align__(16) int8_t queries[kSets * kHeadSet][2][kDim];  // high and low parts, as products take them
  __shared__ __align__(16) int4 starts[kSets * kHeadSet][kGroups];
  __shared__ float units[kSets * kHeadSet];
  __shared__ float tops[kScanWarps][kSets * kHeadSet], sums[kScanWarps][kSets * kHeadSet];
  const CardBits& bits = p.bits;
  const int kv_head = int(blockIdx.y), first_head = int(blockIdx.z) * kSets * kHeadSet;
  const int heads = min(kSets * kHeadSet, p.group - first_head);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const auto* codes = reinterpret_cast<const uint8_t*>(bits.codes) + kv_head * bits.tokens * (kDim / 8);
  const auto* sizes = reinterpret_cast<const uint8_t*>(bits.magnitudes) + kv_head * bits.tokens * (kGroups * 2);
  const int64_t stride = int64_t(gridDim.x) * kScanWarps, mine = int64_t(blockIdx.x) * kScanWarps + warp;
  let_next_start();
  {
    // Where the scan begins depends on few rows: what it reads first is on its way while the kernel before this one
    // ends.
    constexpr int kLines = kChunkBytes / 128, kCodeLines = kCodeBytes / 128;
    const int64_t begin = p.rules.sink / bits.block * bits.block / kChunk + mine;
    for (int i = lane; i < kStages * kLines; i += 32) {
      const int64_t at = begin + i / kLines * stride;
      const int line = i % kLines;
      if (at * kChunk < bits.tokens) {
        prefetch_line(line < kCodeLines ? codes + at * kCodeBytes + line * 128
                                        : sizes + at * kSizeBytes + (line - kCodeLines) * 128);
      }
    }
  }
  wait_for_previous();
  const Choice choice = choice_of(*p.position, bits.block, p.rules);
  if (choice.all) return;

  const int64_t tile_begin = choice.begin * (bits.block / 16), tile_end = choice.end * (bits.block / 16);
  const int64_t first_chunk = tile_begin / 4 + mine, chunk_end = (tile_end + 3) / 4;
  const int chunks = first_chunk < chunk_end ? int((chunk_end - first_chunk + stride - 1) / stride) : 0;
  const unsigned first_stage = shared_place(staged[warp][0]), last_stage = first_stage + (kStages - 1) * kChunkBytes;
  const uint8_t *next_codes = codes + first_chunk * kCodeBytes + lane * 16,
                *next_sizes = sizes + first_chunk * kSizeBytes + lane * 16;
  const auto fetch = [&](bool there, unsigned stage) {
    if (there) {
      const unsigned to = stage + lane * 16;
#pragma unroll
      for (int i = 0; i < kCodeBytes; i += 512) copy_ahead(to + i, next_codes + i);
#pragma unroll
      for (int i = 0; i < kSizeBytes; i += 512)
        if (i + lane * 16 < kSizeBytes) copy_ahead(to + kCodeBytes + i, next_sizes + i);
    }
    next_codes += stride * kCodeBytes, next_sizes += stride * kSizeBytes;
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) fetch(i < chunks, first_stage + i * kChunkBytes);

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
      const int of_high = -(__reduce_add_sync(kAllLanes, high) << place);
      const int of_low = __float_as_int(kExact) - (__reduce_add_sync(kAllLanes, low) << place);
      if (lane == 0) starts[h][j] = make_int4(of_high, of_low, of_high, of_low);
    }
    // Above 0 also for a query of zeros, so that minus infinity stays what it is.
    if (lane == 0) units[h] = fmaxf(largest / (float(kLargestQuery) * kExactUnit) * 0.125f * p.scale * kLog2E, 1e-30f);
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
  // Lanes 0 to 15 leave a chunk's masses: four tiles of four heads.
  const int sets = (p.group + kHeadSet - 1) / kHeadSet, first_set = int(blockIdx.z) * kSets;
  float* masses = p.scratch.masses +
                  ((int64_t(kv_head) * sets + first_set) * (bits.tokens / 16) + first_chunk * 4) * kHeadSet + lane;
  const uint32_t offset = c < kGroups / 2 ? 0x76007600u : 0u;  // kExact twice
  const unsigned lane_codes = kDim == 64 ? (g * 2 + c / 2) * 16 : lane * 16, lane_sizes = kCodeBytes + g * kGroups * 4;
  unsigned stage = first_stage, free_stage = last_stage;
  // Scores of the n-th chunk: of a lane's eight tokens.
  const auto score = [&](int n, float(&x)[kSets][4][2]) {
    await_copies<kStages - 2>();
    __syncwarp();
    // To where the chunk before this one was, which every lane has read.
    fetch(n + kStages - 1 < chunks, free_stage);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint4 words[kLaneWords];
#pragma unroll
      for (int w = 0; w < kLaneWords; ++w) {
        words[w] = shared_words<uint4>(stage + lane_codes + (kDim == 64 ? pair * 256 : (pair * kLaneWords + w) * 512));
        if (kDim == 64 && c % 2 == 1) {
          words[w].x >>= 4, words[w].y >>= 4, words[w].z >>= 4, words[w].w >>= 4;
        }
      }
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int tile = 2 * pair + t;
        uint32_t raw[kGroups];  // of row g, then of row g + 8
        const unsigned from = stage + lane_sizes + tile * (8 * kGroups * 4);
#pragma unroll
        for (int i = 0; i < kGroups; i += 4) {
          if constexpr (kGroups % 4 == 0) {
            const uint4 v = shared_words<uint4>(from + i * 4);
            raw[i] = v.x, raw[i + 1] = v.y, raw[i + 2] = v.z, raw[i + 3] = v.w;
          } else {
            const uint2 v = shared_words<uint2>(from);
            raw[0] = v.x, raw[1] = v.y;
          }
        }
        float offsets[4];
        if constexpr (kGroups == 8) {
          take_offsets(offsets, shared_words<uint32_t>(from + c * 4), shared_words<uint32_t>(from + 16 + c * 4),
                       offset);
        } else {
          const bool second = kGroups == 4 && c % 2 == 1;
          take_offsets(offsets, second ? raw[kGroups / 4] : raw[0],
                       second ? raw[kGroups / 2 + kGroups / 4] : raw[kGroups / 2], offset);
        }
        float s[kSets][2];
#pragma unroll
        for (int set = 0; set < kSets; ++set) s[set][0] = -offsets[0], s[set][1] = -offsets[2];
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const int plane = 2 * (group % 4);
          const uint4& word = words[group / 4];
          const uint32_t upper = t == 0 ? word.x : word.z, lower = t == 0 ? word.y : word.w;
          const uint32_t a[4] = {upper & 0x01010101u << plane, lower & 0x01010101u << plane,
                                 upper & 0x02020202u << plane, lower & 0x02020202u << plane};
          float size[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const __half2 both = bits_half2(raw[r * (kGroups / 2) + group / 2]);
            size[r] = group % 2 == 0 ? __low2float(both) : __high2float(both);
          }
#pragma unroll
          for (int set = 0; set < kSets; ++set) {
            int d[4];
            mma_bytes(d, a, q[set][group], start[set][group]);
#pragma unroll
            for (int r = 0; r < 2; ++r)
              s[set][r] = fmaf(size[r], __int_as_float(d[2 * r] * 64 + d[2 * r + 1]), s[set][r]);
          }
        }
#pragma unroll
        for (int set = 0; set < kSets; ++set) x[set][tile][0] = s[set][0], x[set][tile][1] = s[set][1];
      }
    }
    free_stage = stage;
    stage = stage == last_stage ? first_stage : stage + kChunkBytes;
    if (n == 0 || n == chunks - 1) {  // perhaps with tiles that are not to be chosen from
      const int64_t first_tile = (first_chunk + n * stride) * 4;
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const bool there = first_tile + t >= tile_begin && first_tile + t < tile_end;
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
          if (!there) x[set][t][0] = x[set][t][1] = kMinusInfinity;
        }
      }
    }
  };
  // What is left to do with a chunk's scores: their masses.
  const auto leave_masses = [&](const float(&x)[kSets][4][2]) {
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
      if (lane < 16 && (kSets == 1 || first_set + set < sets))
        masses[set * (bits.tokens / 16) * kHeadSet] = top[set] + log2_fast(of_tile);
    }
    masses += stride * (4 * kHeadSet);
  };
  // A chunk's products are on their way while the masses of the one before it are found.
  float x[kSets][4][2], next[kSets][4][2];
  if (chunks > 0) score(0, x);
  for (int n = 1; n < chunks; ++n) {
    score(n, next);
    leave_masses(x);
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
#pragma unroll
      for (int t = 0; t < 4; ++t) x[set][t][0] = next[set][t][0], x[set][t][1] = next[set][t][1];
    }
  }
  if (chunks > 0) leave_masses(x);
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
  constexpr int kBlocks = 2, kLaneParts = (kParts + 31) / 32;
  __shared__ float4 offsets[16 / kHeadSet];  // log2 of a head's whole mass; infinite where there is no head
  let_next_start();
  wait_for_previous();
  const Choice choice = choice_of(*p.position, p.bits.block, p.rules);
  if (choice.all) return;
  const int kv_head = int(blockIdx.y), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int sets = (p.group + kHeadSet - 1) / kHeadSet, tiles = p.bits.block / 16;
  const int64_t stride = int64_t(gridDim.x) * kThreads, origin = choice.begin / kTopRun * kTopRun;
  const auto* masses =
      reinterpret_cast<const float4*>(p.scratch.masses) + int64_t(kv_head) * sets * (p.bits.tokens / 16);
  const auto mass_at = [&](int64_t b, int set, int t) {
    return b >= choice.begin && b < choice.end ? masses[set * (p.bits.tokens / 16) + b * tiles + t]
                                               : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  };
  int64_t b = origin + int64_t(blockIdx.x) * kThreads + threadIdx.x;
  float4 ahead[kBlocks];  // of the first tiles, on their way while offsets are found
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) ahead[i] = mass_at(b + i * stride, 0, 0);
  for (int h = warp; h < sets * kHeadSet; h += kThreads / 32) {
    float offset = __builtin_huge_valf();
    if (h < p.group) {
      const auto* partial =
          reinterpret_cast<const float2*>(p.scratch.partial) + int64_t(kv_head * p.group + h) * kParts;
      float2 part[kLaneParts];
      float top = kMinusInfinity, total = 0.0f;
#pragma unroll
      for (int i = 0; i < kLaneParts; ++i) {
        part[i] = lane + 32 * i < kParts ? partial[lane + 32 * i] : make_float2(kMinusInfinity, 0.0f);
        top = fmaxf(top, part[i].x);
      }
      top = warp_max(top);
#pragma unroll
      for (int i = 0; i < kLaneParts; ++i)
        if (part[i].x != kMinusInfinity) total += part[i].y * exp2_fast(part[i].x - top);
      total = warp_sum(total);
      offset = total > 0.0f ? top + __log2f(total) : 0.0f;
    }
    if (lane == 0) reinterpret_cast<float*>(offsets)[h] = offset;
  }
  __syncthreads();
  // All lanes of a warp stay in the loop: tops are those of half warps.
  for (; b - lane < choice.end; b += kBlocks * stride) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int64_t at = b + i * stride;
      const bool there = at >= choice.begin && at < choice.end;
      float sum = 0.0f;
      for (int set = 0; set < sets; ++set) {
        const float4 o = offsets[set];
        for (int t = 0; t < tiles; ++t) {
          const float4 m = set == 0 && t == 0 ? ahead[i] : mass_at(at, set, t);
          sum += (exp2_fast(m.x - o.x) + exp2_fast(m.y - o.y)) + (exp2_fast(m.z - o.z) + exp2_fast(m.w - o.w));
        }
      }
      if (there) scores[kv_head * p.bits.capacity + at] = sum;
      uint32_t top = there ? order_key(sum) : 0;
#pragma unroll
      for (int step = kTopRun / 2; step > 0; step /= 2) top = max(top, __shfl_xor_sync(kAllLanes, top, step));
      if (lane % kTopRun == 0 && at < choice.end) tops[kv_head * top_count(p.bits.capacity) + at / kTopRun] = top;
      ahead[i] = mass_at(at + kBlocks * stride, 0, 0);
    }
  }
}

template <int kDim>
Status scan(const ScanArgs& p, float* scores, CardStreamHandle stream) {
  const dim3 grid(kParts, unsigned(p.kv_heads), unsigned((p.group + 2 * kHeadSet - 1) / (2 * kHeadSet)));
  LONGKV_TRY(p.group <= kHeadSet ? launch_close("score_bits", scan_kernel<kDim, 1>, grid, kScanWarps * 32, stream, p)
                                 : launch_close("score_bits", scan_kernel<kDim, 2>, grid, kScanWarps * 32, stream, p));
  return launch_close("share_masses", share_kernel, dim3(128, unsigned(p.kv_heads)), kThreads, stream, p, scores,
                      score_tops(scores, p.kv_heads, p.bits.capacity));
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
  return {partial + int64_t(heads) * kParts * 2 / 4 * 4 + 4, partial};
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
