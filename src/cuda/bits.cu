// The scan is a product on tensor cores: 16 tokens by up to 8 query heads. A lane holds 32 neighbouring bits of two
// tokens (of 128 channels) and turns them into halves of either sign: two instructions make the pair of channels that
// are 16 bits apart. The order of channels in a dot product is free, so the queries are laid out to fit.
#include <cuda_fp16.h>

#include "cuda/bits.h"
#include "cuda/choice.cuh"
#include "cuda/key_row.cuh"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"

namespace longkv::card {

namespace {

constexpr int kParts = BitsScratch::kParts;
constexpr int kThreads = 256;

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
  const int64_t at = (head * bits.capacity * bits.block + position) * kWords;
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
    const unsigned signs = __ballot_sync(kAllLanes, x[j] >= 0.0f);
    const float sum = warp_sum(fabsf(x[j])), square = warp_sum(x[j] * x[j]);
    const float size = !bits.unbiased ? sum / 32.0f : sum == 0.0f ? 0.0f : square / sum;
    if (lane == j) {
      bits.codes[at + j] = signs;
      bits.magnitudes[at + j] = __half_as_ushort(__float2half_rn(size));
    }
  }
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

// Channel of pair p's first (second: bits 16 apart) value in lane c: 32-bit words of kDim / 4 channels a lane; of 64
// channels a lane has half a word, spread so that its pairs are 16 bits apart as well.
template <int kDim>
__device__ __forceinline__ int pair_channel(int c, int p, bool second) {
  if (kDim == 64) return 16 * c + p + (second ? 8 : 0);
  return c * (kDim / 4) + p / 16 * 32 + p % 16 + (second ? 16 : 0);
}

template <int kDim>
__global__ void __launch_bounds__(kThreads) scan_kernel(ScanArgs p) {
  constexpr int kWords = kDim / 32, kSteps = kDim / 16, kLaneWords = kDim == 64 ? 1 : kDim / 128;
  __shared__ float queries[8][kDim];
  __shared__ float tops[kThreads / 32][8], sums[kThreads / 32][8];
  let_next_start();
  wait_for_previous();
  const CardBits& bits = p.bits;
  const Choice choice = choice_of(*p.position, bits.block, p.rules);
  if (choice.all) return;
  const int kv_head = int(blockIdx.y), first_head = int(blockIdx.z) * 8, heads = min(8, p.group - first_head);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;

  // Queries, in units of the softmax's exponent and of log 2.
  {
    float x[kWords] = {};
    if (warp < heads) {
      const half_t* from = p.q + int64_t(kv_head * p.group + first_head + warp) * kDim;
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        const half_t v = from[32 * j + lane];
        x[j] = p.bfloat ? __uint_as_float(uint32_t(v) << 16) : __half2float(__ushort_as_half(v));
      }
      if (bits.rotate) hadamard(x, lane);
    }
#pragma unroll
    for (int j = 0; j < kWords; ++j) queries[warp][32 * j + lane] = x[j];
  }
  __syncthreads();
  uint32_t q[kSteps][2];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      q[s][i] = pack_pair(queries[g][pair_channel<kDim>(c, 2 * s + i, false)],
                          queries[g][pair_channel<kDim>(c, 2 * s + i, true)], static_cast<const __half*>(nullptr));
    }
  }
  const float unit = p.scale * kLog2E;
  const int64_t base = kv_head * bits.capacity * bits.block;
  struct Tile {
    uint32_t codes[2][kLaneWords], sizes[2][kLaneWords];
  };
  const auto load = [&](int64_t token) {
    Tile tile;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t at = (base + token + g + 8 * r) * kWords;
#pragma unroll
      for (int w = 0; w < kLaneWords; ++w) {
        const int word = kDim == 64 ? c / 2 : c * kLaneWords + w;
        tile.codes[r][w] = __ldcs(bits.codes + at + word);
        tile.sizes[r][w] = bits.magnitudes[at + word];
      }
    }
    return tile;
  };
  // Exponentials count from `top`, which follows the scores only when one is far above it. Of heads 2 c and 2 c + 1.
  constexpr float kFar = 40.0f;
  float top[2] = {kMinusInfinity, kMinusInfinity}, sum[2] = {0.0f, 0.0f};
  const int64_t stride = int64_t(gridDim.x) * (kThreads / 32);
  int64_t b = choice.begin + int64_t(blockIdx.x) * (kThreads / 32) + warp;
  Tile next = b < choice.end ? load(b * bits.block) : Tile{};
  for (; b < choice.end; b += stride) {
    float mass[2] = {0.0f, 0.0f};
    for (int t = 0; t < bits.block; t += 16) {
      Tile tile = next;
      // The tile that follows is on its way meanwhile.
      const bool same = t + 16 < bits.block;
      next = load(same ? b * bits.block + t + 16 : min(b + stride, choice.end - 1) * bits.block);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int w = 0; w < kLaneWords; ++w) {
          uint32_t code = ~tile.codes[r][w];  // set: negative
          if (kDim == 64) {
            const uint32_t half = c % 2 == 0 ? code : code >> 16;
            code = (half & 0xffu) | (half & 0xff00u) << 8;
          }
          tile.codes[r][w] = code;
          tile.sizes[r][w] |= tile.sizes[r][w] << 16;
        }
      }
      float s[4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int pair = 2 * step + i, w = kDim == 64 ? 0 : pair / 16, bit = kDim == 64 ? pair : pair % 16;
#pragma unroll
          for (int r = 0; r < 2; ++r) a[2 * i + r] = tile.sizes[r][w] ^ (tile.codes[r][w] << (15 - bit) & 0x80008000u);
        }
        mma(s, a, q[step][0], q[step][1], static_cast<const __half*>(nullptr));
      }
      // s: tokens g and g + 8 of heads 2 c and 2 c + 1.
      const float most[2] = {fmaxf(s[0], s[2]) * unit, fmaxf(s[1], s[3]) * unit};
      if (__any_sync(kAllLanes, most[0] > top[0] + kFar || most[1] > top[1] + kFar)) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float best = most[h];
#pragma unroll
          for (int step = 4; step < 32; step *= 2) best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, step));
          if (best <= top[h]) continue;
          const float keep = exp2_fast(top[h] - best);
          mass[h] *= keep, sum[h] *= keep;
          top[h] = best;
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float all = exp2_fast(s[h] * unit - top[h]) + exp2_fast(s[2 + h] * unit - top[h]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) all += __shfl_xor_sync(kAllLanes, all, step);
        mass[h] += all;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (g == 0 && 2 * c + h < heads) {
        p.scratch.masses[int64_t(kv_head * p.group + first_head + 2 * c + h) * bits.capacity + b] =
            mass[h] > 0.0f ? top[h] + __log2f(mass[h]) : kMinusInfinity;
      }
      sum[h] += mass[h];
    }
  }
  if (g == 0) {
#pragma unroll
    for (int h = 0; h < 2; ++h) tops[warp][2 * c + h] = top[h], sums[warp][2 * c + h] = sum[h];
  }
  __syncthreads();
  if (int(threadIdx.x) < heads) {
    float all = kMinusInfinity, total = 0.0f;
    for (int w = 0; w < kThreads / 32; ++w) all = fmaxf(all, tops[w][threadIdx.x]);
    for (int w = 0; w < kThreads / 32; ++w)
      if (tops[w][threadIdx.x] != kMinusInfinity) total += sums[w][threadIdx.x] * exp2_fast(tops[w][threadIdx.x] - all);
    const int64_t at = int64_t(kv_head * p.group + first_head + threadIdx.x) * kParts + blockIdx.x;
    reinterpret_cast<float2*>(p.scratch.partial)[at] = make_float2(all, total);
  }
}

// Shares of the query heads' masses, added up in their order.
__global__ void __launch_bounds__(kThreads) share_kernel(ScanArgs p, float* scores) {
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
  const int64_t stride = int64_t(gridDim.x) * kThreads;
  for (int64_t b = choice.begin + int64_t(blockIdx.x) * kThreads + threadIdx.x; b < choice.end; b += stride) {
    float sum = 0.0f;
    for (int h = 0; h < p.group; ++h)
      sum += exp2_fast(p.scratch.masses[int64_t(kv_head * p.group + h) * p.bits.capacity + b] - offsets[h]);
    scores[kv_head * p.bits.capacity + b] = sum;
  }
}

template <int kDim>
Status scan(const ScanArgs& p, float* scores, CardStreamHandle stream) {
  const dim3 grid(kParts, unsigned(p.kv_heads), unsigned((p.group + 7) / 8));
  LONGKV_TRY(launch_close("score_bits", scan_kernel<kDim>, grid, kThreads, stream, p));
  return launch_close("share_masses", share_kernel, dim3(16, unsigned(p.kv_heads)), kThreads, stream, p, scores);
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
  auto* codes = reinterpret_cast<uint32_t*>(memory);
  return {block,    capacity, rotate,
          unbiased, codes,    reinterpret_cast<half_t*>(codes + kv_heads * capacity * block * (dim / 32))};
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
