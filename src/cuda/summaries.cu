#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/choice.cuh"
#include "cuda/key_row.cuh"
#include "cuda/launch.cuh"
#include "cuda/select.h"

namespace longkv::card {

namespace {

constexpr int kMaxGroup = 16;  // query heads of a KV head
constexpr int kLanes = 8;      // of a block that is scored
constexpr int kScoreThreads = 256;

// One thread a channel.
template <class Rows>
__device__ void summarize_block(const Rows& rows, const CardSummaries& s, int head, int64_t block, float* shared) {
  const int c = int(threadIdx.x), dim = int(blockDim.x);
  const int64_t first = block * s.block;
  float low = key_row(rows, head, first).at(c), high = low, sum = low;
  for (int r = 1; r < s.block; ++r) {
    const float v = key_row(rows, head, first + r).at(c);
    low = fminf(low, v), high = fmaxf(high, v);
    sum += v;
  }
  const int64_t at = head * s.capacity + block;
  if (s.kind == SummaryKind::kMean) {
    reinterpret_cast<__half*>(s.data)[at * dim + c] = __float2half_rn(sum / float(s.block));
    return;
  }
  if (s.kind == SummaryKind::kBox) {
    auto* out = reinterpret_cast<__half*>(s.data) + at * 2 * dim + c;
    const __half middle = __float2half_rn(0.5f * (low + high));
    out[0] = middle;
    // From the rounded middle, and rounded up: the box still holds every key.
    out[dim] = __float2half_ru(fmaxf(high - __half2float(middle), __half2float(middle) - low));
    return;
  }
  // The rule of kv/index/vector_index.cc: widths grow by what rounding takes from the middles.
  const float middle = 0.5f * (low + high), half = fmaxf(high - middle, middle - low);
  const float largest = block_max(fabsf(middle), shared);
  const float of_middle = largest / 127.0f, per_middle = largest > 0.0f ? 127.0f / largest : 0.0f;
  const float steps = rintf(middle * per_middle);
  const float width = half + fabsf(middle - steps * of_middle) + 1e-6f * fabsf(middle);
  __syncthreads();
  const float widest = block_max(width, shared);
  const float per_width = widest > 0.0f ? 255.0f / widest : 0.0f;
  auto* out = reinterpret_cast<uint8_t*>(s.data) + at * 2 * dim + c;
  out[0] = uint8_t(int8_t(steps));
  out[dim] = uint8_t(fminf(255.0f, ceilf(width * per_width)));
  if (c == 0) reinterpret_cast<float2*>(s.scales)[at] = make_float2(of_middle, widest / 255.0f * (1.0f + 1e-6f));
}

template <class Rows>
__global__ void summarize_kernel(Rows rows, CardSummaries s, int64_t first) {
  __shared__ float shared[32];
  summarize_block(rows, s, int(blockIdx.y), first + blockIdx.x, shared);
}
template <class Rows>
__global__ void summarize_last_kernel(Rows rows, CardSummaries s, const int64_t* position) {
  __shared__ float shared[32];
  let_next_start();
  wait_for_previous();
  const int64_t n = *position + 1;
  if (n % s.block == 0) summarize_block(rows, s, int(blockIdx.x), n / s.block - 1, shared);
}

// Eight channels of a summary.
struct HalfChunk {
  uint4 bits;
  __device__ __forceinline__ void load(const uint8_t* base, int64_t chunk) {
    bits = __ldcs(reinterpret_cast<const uint4*>(base) + chunk);
  }
  template <bool kSigned>
  __device__ __forceinline__ float get(int e) const {
    const uint32_t word = e < 2 ? bits.x : e < 4 ? bits.y : e < 6 ? bits.z : bits.w;
    return __half2float(__ushort_as_half(uint16_t(e % 2 == 0 ? word : word >> 16)));
  }
};
struct ByteChunk {
  uint2 bits;
  __device__ __forceinline__ void load(const uint8_t* base, int64_t chunk) {
    bits = __ldcs(reinterpret_cast<const uint2*>(base) + chunk);
  }
  // A byte as the last of the float 2^23 + byte; with the sign bit turned, 2^23 + 128 less is the signed value.
  template <bool kSigned>
  __device__ __forceinline__ float get(int e) const {
    const uint32_t word = (e < 4 ? bits.x : bits.y) ^ (kSigned ? 0x80808080u : 0u);
    const float shifted = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u | unsigned(e % 4)));
    return shifted - (kSigned ? 8388736.0f : 8388608.0f);
  }
};

// Eight lanes a block, each with every eighth chunk of eight channels. Scores of the query heads are added up, which is
// the score of their sum, or the largest counts.
template <class Chunk, int kDim, bool kWidths, bool kMax>
__global__ void __launch_bounds__(kScoreThreads, kDim <= 128 ? 4 : 2)  // so that all blocks run at once
    score_kernel(const half_t* q, bool bfloat, int group, CardSummaries s, ChoiceRules rules, const int64_t* position,
                 float* scores) {
  constexpr int kChunks = kDim / 8 / kLanes;
  __shared__ float queries[kMax ? kMaxGroup : 2][kDim];
  let_next_start();
  wait_for_previous();
  const Choice choice = choice_of(*position, s.block, rules);
  if (choice.all) return;
  const int head = int(blockIdx.y);
  for (int c = int(threadIdx.x); c < kDim; c += kScoreThreads) {
    float sum = 0.0f, size = 0.0f;
    for (int h = 0; h < group; ++h) {
      const half_t bits = q[int64_t(head * group + h) * kDim + c];
      const float x = bfloat ? __uint_as_float(uint32_t(bits) << 16) : __half2float(__ushort_as_half(bits));
      if (kMax) queries[h][c] = x;
      sum += x, size += fabsf(x);
    }
    if (!kMax) queries[0][c] = sum, queries[1][c] = size;
  }
  __syncthreads();
  const int lane = threadIdx.x % kLanes;
  float query[kMax ? 1 : kChunks * 8], sizes[kMax ? 1 : kChunks * 8];
  if (!kMax) {
#pragma unroll
    for (int i = 0; i < kChunks * 8; ++i) {
      const int c = (lane + i / 8 * kLanes) * 8 + i % 8;
      query[i] = queries[0][c], sizes[i] = queries[1][c];
    }
  }
  constexpr int kVectors = kWidths ? 2 : 1;
  const auto* base = reinterpret_cast<const uint8_t*>(s.data);
  const int64_t first = head * s.capacity;
  // All lanes of a warp stay in the loop: sums go over eight of them.
  const int64_t stride = int64_t(gridDim.x) * (kScoreThreads / kLanes);
  const Places places = places_of(rules, head, s.block, choice);
  const int64_t mine = places.begin + int64_t(blockIdx.x) * (kScoreThreads / kLanes) + threadIdx.x / kLanes;
  for (int64_t place = mine; place - threadIdx.x % 32 / kLanes < places.end; place += stride) {
    const int64_t b = places.block(min(place, places.end - 1));
    const bool there = b >= choice.begin && b < choice.end;  // coarse blocks may reach into sinks and tail
    const int64_t at = first + (there ? b : choice.begin);
    Chunk middle[kChunks], width[kWidths ? kChunks : 1];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      middle[i].load(base, at * kVectors * (kDim / 8) + lane + i * kLanes);
      if (kWidths) width[i].load(base, at * kVectors * (kDim / 8) + kDim / 8 + lane + i * kLanes);
    }
    float2 unit = make_float2(1.0f, 1.0f);
    if (s.kind == SummaryKind::kBox8) unit = reinterpret_cast<const float2*>(s.scales)[at];
    float total = -__builtin_huge_valf();  // stays where a sum is not a number
    for (int h = 0; h < (kMax ? group : 1); ++h) {
      float dot = 0.0f, bound = 0.0f;
#pragma unroll
      for (int i = 0; i < kChunks * 8; ++i) {
        const float x = kMax ? queries[h][(lane + i / 8 * kLanes) * 8 + i % 8] : query[kMax ? 0 : i];
        dot += x * middle[i / 8].template get<true>(i % 8);
        if (kWidths) {
          const float size = kMax ? fabsf(x) : sizes[kMax ? 0 : i];
          bound += size * width[kWidths ? i / 8 : 0].template get<false>(i % 8);
        }
      }
      dot = dot * unit.x + bound * unit.y;
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) dot += __shfl_xor_sync(kAllLanes, dot, step);
      total = fmaxf(total, dot);
    }
    if (lane == 0 && place < places.end) scores[first + place] = there ? total : -__builtin_huge_valf();
  }
}

template <class Chunk, int kDim, bool kWidths>
Status run(const half_t* q, bool bfloat, int group, const CardSummaries& s, const ChoiceRules& rules, int kv_heads,
           const int64_t* position, float* scores, CardStreamHandle stream) {
  const dim3 grid(64, unsigned(kv_heads));
  const auto kernel = rules.max ? score_kernel<Chunk, kDim, kWidths, true> : score_kernel<Chunk, kDim, kWidths, false>;
  return launch_close("score_blocks", kernel, grid, kScoreThreads, stream, q, bfloat, group, s, rules, position,
                      scores);
}

template <int kDim>
Status run(const half_t* q, bool bfloat, int group, const CardSummaries& s, const ChoiceRules& rules, int kv_heads,
           const int64_t* position, float* scores, CardStreamHandle stream) {
  switch (s.kind) {
    case SummaryKind::kMean:
      return run<HalfChunk, kDim, false>(q, bfloat, group, s, rules, kv_heads, position, scores, stream);
    case SummaryKind::kBox:
      return run<HalfChunk, kDim, true>(q, bfloat, group, s, rules, kv_heads, position, scores, stream);
    case SummaryKind::kBox8:
      return run<ByteChunk, kDim, true>(q, bfloat, group, s, rules, kv_heads, position, scores, stream);
  }
  return Status(Code::kInternal, "score_blocks: kind of summary");
}

}  // namespace

CardSummaries place_summaries(SummaryKind kind, int block, int kv_heads, int dim, int64_t capacity, uint8_t* memory) {
  CardSummaries s{kind, block, capacity, reinterpret_cast<half_t*>(memory), nullptr};
  if (kind == SummaryKind::kBox8) s.scales = reinterpret_cast<float*>(memory + kv_heads * capacity * 2 * dim);
  return s;
}

Status summarize(const CardKv& kv, const CardSummaries& s, int64_t first, int64_t n, CardStreamHandle stream) {
  if (n <= 0) return {};
  summarize_kernel<<<dim3(unsigned(n), unsigned(kv.kv_heads)), unsigned(kv.dim), 0, stream>>>(kv, s, first);
  return launched("summarize");
}

Status summarize_last(const CardKv& kv, const CardSummaries& s, const int64_t* position, CardStreamHandle stream) {
  return launch_close("summarize_last", summarize_last_kernel<CardKv>, unsigned(kv.kv_heads), unsigned(kv.dim), stream,
                      kv, s, position);
}
Status summarize_last(const BlockStore& rows, const CardSummaries& s, const int64_t* position,
                      CardStreamHandle stream) {
  return launch_close("summarize_last", summarize_last_kernel<BlockStore>, unsigned(rows.kv_heads), unsigned(rows.dim),
                      stream, rows, s, position);
}

Status score_blocks(const half_t* q, int heads, const CardKv& kv, const CardSummaries& s, const ChoiceRules& rules,
                    const int64_t* position, float* scores, CardStreamHandle stream) {
  const int group = heads / kv.kv_heads;
  if (group > kMaxGroup) return Status(Code::kUnsupported, "score_blocks: more than 16 query heads share a KV head");
  const bool bfloat = kv.type == KvType::kBf16;
  switch (kv.dim) {
    case 64: return run<64>(q, bfloat, group, s, rules, kv.kv_heads, position, scores, stream);
    case 128: return run<128>(q, bfloat, group, s, rules, kv.kv_heads, position, scores, stream);
    case 256: return run<256>(q, bfloat, group, s, rules, kv.kv_heads, position, scores, stream);
    default: return Status(Code::kUnsupported, "score_blocks: head dimension");
  }
}

}  // namespace longkv::card
