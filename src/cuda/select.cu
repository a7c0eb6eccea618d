#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/launch.cuh"
#include "cuda/select.h"

namespace longkv::card {

namespace {

constexpr int kMaxGroup = 16;  // query heads of a KV head whose scores one pass takes
constexpr int kChooseThreads = 1024;

__device__ __forceinline__ int vectors_of(const CardSummaries& s) { return s.kind == SummaryKind::kBox ? 2 : 1; }

__device__ float key_value(const CardKv& kv, int64_t row, int c) {
  const int64_t at = row * kv.dim + c;
  if (kv.type == KvType::kF16) return __half2float(reinterpret_cast<const __half*>(kv.k)[at]);
  if (kv.type == KvType::kBf16) return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(kv.k)[at]);
  return __half2float(__ushort_as_half(kv.k_scale[row * (kv.dim / 32) + c / 32])) *
         float(reinterpret_cast<const int8_t*>(kv.k)[at]);
}

// One thread a channel.
__device__ void summarize_block(const CardKv& kv, const CardSummaries& s, int head, int64_t block) {
  const int c = int(threadIdx.x);
  const int64_t first = head * kv.capacity + block * s.block;
  float low = key_value(kv, first, c), high = low, sum = low;
  for (int r = 1; r < s.block; ++r) {
    const float v = key_value(kv, first + r, c);
    low = fminf(low, v), high = fmaxf(high, v);
    sum += v;
  }
  auto* out = reinterpret_cast<__half*>(s.data) + (head * s.capacity + block) * vectors_of(s) * kv.dim + c;
  if (s.kind == SummaryKind::kMean) {
    *out = __float2half_rn(sum / float(s.block));
  } else {
    const __half middle = __float2half_rn(0.5f * (low + high));
    out[0] = middle;
    // From the rounded middle, and rounded up: the box still holds every key.
    out[kv.dim] = __float2half_ru(fmaxf(high - __half2float(middle), __half2float(middle) - low));
  }
}

__global__ void summarize_kernel(CardKv kv, CardSummaries s, int64_t first) {
  summarize_block(kv, s, int(blockIdx.y), first + blockIdx.x);
}
__global__ void summarize_last_kernel(CardKv kv, CardSummaries s, const int64_t* position) {
  const int64_t rows = *position + 1;
  if (rows % s.block == 0) summarize_block(kv, s, int(blockIdx.x), rows / s.block - 1);
}

// Where the forced rows of a step end and begin, and how many blocks are chosen between them.
struct Choice {
  int64_t rows, sink, tail, begin, end, wanted;
  bool all;
};
__device__ Choice choice_of(int64_t position, int block, const ChoiceRules& rules) {
  Choice c;
  c.rows = position + 1;
  c.all = c.rows <= rules.budget;
  c.sink = min(rules.sink, c.rows);
  c.tail = max(c.sink, min(c.rows - max(rules.local, int64_t(1)), c.rows / block * block));
  const int64_t left = max(int64_t(1), rules.budget - c.sink - (c.rows - c.tail));
  c.begin = c.sink / block;
  c.end = c.tail > c.sink ? (c.tail + block - 1) / block : c.begin;
  c.wanted = min(max(int64_t(1), left / block), c.end - c.begin);
  return c;
}

// One warp a block; a lane holds kChannels neighbouring channels of the queries.
template <int kChannels>
__global__ void __launch_bounds__(256)
    score_kernel(const __half* __restrict__ q, bool bfloat, int group, CardKv kv, CardSummaries s, ChoiceRules rules,
                 const int64_t* position, float* __restrict__ scores) {
  const Choice choice = choice_of(*position, s.block, rules);
  if (choice.all) return;
  const int head = int(blockIdx.y), lane = threadIdx.x % 32;
  const int per_group = min(group, kMaxGroup);
  float query[kMaxGroup][kChannels];
#pragma unroll
  for (int h = 0; h < kMaxGroup; ++h) {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      const int64_t at = int64_t(head * group + h) * kv.dim + lane * kChannels + i;
      query[h][i] = h >= per_group ? 0.0f
                    : bfloat       ? __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(q)[at])
                                   : __half2float(q[at]);
    }
  }
  const bool box = s.kind == SummaryKind::kBox;
  const auto* base = reinterpret_cast<const __half*>(s.data) + head * s.capacity * vectors_of(s) * kv.dim;
  for (int64_t b = choice.begin + blockIdx.x * 8 + threadIdx.x / 32; b < choice.end; b += int64_t(gridDim.x) * 8) {
    const __half* at = base + b * vectors_of(s) * kv.dim + lane * kChannels;
    float middle[kChannels], width[kChannels];
#pragma unroll
    for (int i = 0; i < kChannels; i += 2) {
      const float2 m = __half22float2(*reinterpret_cast<const __half2*>(at + i));
      const float2 w = box ? __half22float2(*reinterpret_cast<const __half2*>(at + kv.dim + i)) : make_float2(0, 0);
      middle[i] = m.x, middle[i + 1] = m.y;
      width[i] = w.x, width[i + 1] = w.y;
    }
    float total = rules.max ? -__builtin_huge_valf() : 0.0f;
    if (rules.max) {
#pragma unroll
      for (int h = 0; h < kMaxGroup; ++h) {
        if (h >= per_group) break;
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < kChannels; ++i) dot += query[h][i] * middle[i] + fabsf(query[h][i]) * width[i];
        total = fmaxf(total, warp_sum(dot));
      }
    } else {
      float dot = 0.0f;
#pragma unroll
      for (int h = 0; h < kMaxGroup; ++h) {
        if (h >= per_group) break;
#pragma unroll
        for (int i = 0; i < kChannels; ++i) dot += query[h][i] * middle[i] + fabsf(query[h][i]) * width[i];
      }
      total = warp_sum(dot);
    }
    if (lane == 0) scores[head * s.capacity + b] = total;
  }
}

// Larger key, larger score; NaN last.
__device__ __forceinline__ uint32_t order_key(float x) {
  const uint32_t bits = __float_as_uint(x);
  if (x != x) return 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ void put_rows(int2* tiles, int64_t begin, int64_t end) {
  for (int64_t t = threadIdx.x; begin + 16 * t < end; t += blockDim.x)
    tiles[t] = make_int2(int(begin + 16 * t), int(min(int64_t(16), end - begin - 16 * t)));
}

// One block of threads a list. The k-th largest key is found 11, 11 and 10 bits at a time; of equal keys the first
// blocks win.
__global__ void __launch_bounds__(kChooseThreads)
    choose_kernel(const float* __restrict__ scores, int kv_heads, CardSummaries s, ChoiceRules rules,
                  const int64_t* position, int2* tiles, int32_t* count, int64_t stride) {
  __shared__ int bins[2048];
  __shared__ int warp_above[32], warp_equal[32];
  __shared__ uint32_t found;
  __shared__ int left;
  const int list = int(blockIdx.x), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Choice c = choice_of(*position, s.block, rules);
  int2* out = tiles + list * stride;
  if (c.all) {
    put_rows(out, 0, c.rows);
    if (threadIdx.x == 0) count[list] = int((c.rows + 15) / 16);
    return;
  }
  const auto score_of = [&](int64_t b) {
    if (!rules.shared) return scores[list * s.capacity + b];
    float total = rules.max ? -__builtin_huge_valf() : 0.0f;
    for (int h = 0; h < kv_heads; ++h) {
      const float x = scores[h * s.capacity + b];
      total = rules.max ? fmaxf(total, x) : total + x;
    }
    return total;
  };
  uint32_t prefix = 0, mask = 0;
  int wanted = int(c.wanted);
  for (int shift = 21, bits = 11; shift >= 0; bits = shift < 11 ? shift : 11, shift -= bits) {
    for (int i = threadIdx.x; i < 2048; i += blockDim.x) bins[i] = 0;
    __syncthreads();
    for (int64_t b = c.begin + threadIdx.x; b < c.end; b += blockDim.x) {
      const uint32_t key = order_key(score_of(b));
      if ((key & mask) == prefix) atomicAdd(&bins[(key >> shift) & ((1u << bits) - 1)], 1);
    }
    __syncthreads();
    if (warp == 0) {  // from the top bin down, 32 at a time
      int above = 0;
      for (int top = 2047; top >= 0; top -= 32) {
        const int n = bins[top - lane];
        int upto = n;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int other = __shfl_up_sync(kAllLanes, upto, step);
          if (lane >= step) upto += other;
        }
        const unsigned enough = __ballot_sync(kAllLanes, above + upto >= wanted);
        if (enough != 0) {
          const int at = __ffs(int(enough)) - 1;
          if (lane == at) {
            found = uint32_t(top - lane);
            left = wanted - (above + upto - n);
          }
          break;
        }
        above += __shfl_sync(kAllLanes, upto, 31);
      }
    }
    __syncthreads();
    prefix |= found << shift;
    mask |= ((1u << bits) - 1) << shift;
    wanted = left;
    __syncthreads();
    if (shift == 0) break;
  }

  const int64_t sink_tiles = (c.sink + 15) / 16, per_block = s.block / 16;
  put_rows(out, 0, c.sink);
  int chosen = 0, equal_before = 0;  // known to every thread
  for (int64_t base = c.begin; base < c.end; base += blockDim.x) {
    const int64_t b = base + threadIdx.x;
    const uint32_t key = b < c.end ? order_key(score_of(b)) : 0;
    const bool equal = b < c.end && key == prefix, above = b < c.end && key > prefix;
    const unsigned equals = __ballot_sync(kAllLanes, equal), aboves = __ballot_sync(kAllLanes, above);
    if (lane == 0) warp_equal[warp] = __popc(equals), warp_above[warp] = __popc(aboves);
    __syncthreads();
    int equal_rank = equal_before, above_rank = 0, equal_all = 0, above_all = 0;
    for (int w = 0; w < 32; ++w) {
      if (w < warp) equal_rank += warp_equal[w], above_rank += warp_above[w];
      equal_all += warp_equal[w], above_all += warp_above[w];
    }
    const unsigned below = (1u << lane) - 1;
    equal_rank += __popc(equals & below);
    above_rank += __popc(aboves & below);
    if (above || (equal && equal_rank < wanted)) {
      // Ahead of this block: those above, and of the equal ones as many as are taken.
      const int rank = chosen + above_rank + min(equal_rank, wanted) - min(equal_before, wanted);
      for (int64_t t = 0; t < per_block; ++t) {
        const int64_t begin = max(b * s.block + 16 * t, c.sink), end = min(b * s.block + 16 * t + 16, c.tail);
        out[sink_tiles + rank * per_block + t] = make_int2(int(begin), int(max(int64_t(0), end - begin)));
      }
    }
    chosen += above_all + min(equal_before + equal_all, wanted) - min(equal_before, wanted);
    equal_before += equal_all;
    __syncthreads();
  }
  const int64_t tail_at = sink_tiles + chosen * per_block;
  put_rows(out + tail_at, c.tail, c.rows);
  if (threadIdx.x == 0) count[list] = int(tail_at + (c.rows - c.tail + 15) / 16);
}

// Every KV head gets the shared list.
__global__ void share_kernel(int2* tiles, int32_t* count, int64_t stride) {
  const int n = count[0];
  int2* to = tiles + (blockIdx.x + 1) * stride;
  for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = tiles[i];
  if (threadIdx.x == 0) count[blockIdx.x + 1] = n;
}

}  // namespace

int64_t summary_bytes(SummaryKind kind, int kv_heads, int dim, int64_t blocks) {
  return int64_t(kv_heads) * blocks * dim * 2 * (kind == SummaryKind::kBox ? 2 : 1);
}

Status summarize(const CardKv& kv, const CardSummaries& s, int64_t first, int64_t n, CardStreamHandle stream) {
  if (n <= 0) return {};
  summarize_kernel<<<dim3(unsigned(n), unsigned(kv.kv_heads)), unsigned(kv.dim), 0, stream>>>(kv, s, first);
  return launched("summarize");
}

Status summarize_last(const CardKv& kv, const CardSummaries& s, const int64_t* position, CardStreamHandle stream) {
  summarize_last_kernel<<<unsigned(kv.kv_heads), unsigned(kv.dim), 0, stream>>>(kv, s, position);
  return launched("summarize_last");
}

Status score_blocks(const half_t* q, int heads, const CardKv& kv, const CardSummaries& s, const ChoiceRules& rules,
                    const int64_t* position, float* scores, CardStreamHandle stream) {
  const int group = heads / kv.kv_heads;
  if (group > kMaxGroup) return Status(Code::kUnsupported, "score_blocks: more than 16 query heads share a KV head");
  const dim3 grid(64, unsigned(kv.kv_heads));
  const auto* half = reinterpret_cast<const __half*>(q);
  const bool bfloat = kv.type == KvType::kBf16;
  switch (kv.dim) {
    case 64: score_kernel<2><<<grid, 256, 0, stream>>>(half, bfloat, group, kv, s, rules, position, scores); break;
    case 128: score_kernel<4><<<grid, 256, 0, stream>>>(half, bfloat, group, kv, s, rules, position, scores); break;
    case 256: score_kernel<8><<<grid, 256, 0, stream>>>(half, bfloat, group, kv, s, rules, position, scores); break;
    default: return Status(Code::kUnsupported, "score_blocks: head dimension");
  }
  return launched("score_blocks");
}

Status choose_blocks(const float* scores, int kv_heads, const CardSummaries& s, const ChoiceRules& rules,
                     const int64_t* position, int32_t* tiles, int32_t* count, int64_t stride, CardStreamHandle stream) {
  auto* pairs = reinterpret_cast<int2*>(tiles);
  choose_kernel<<<unsigned(rules.shared ? 1 : kv_heads), kChooseThreads, 0, stream>>>(scores, kv_heads, s, rules,
                                                                                      position, pairs, count, stride);
  LONGKV_TRY(launched("choose_blocks"));
  if (!rules.shared || kv_heads == 1) return {};
  share_kernel<<<unsigned(kv_heads - 1), 256, 0, stream>>>(pairs, count, stride);
  return launched("share_list");
}

}  // namespace longkv::card
