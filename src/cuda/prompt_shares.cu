#include "cuda/prompt_shares.h"

#include <cuda_fp16.h>

#include "cuda/launch.cuh"
#include "cuda/mma.cuh"
#include "cuda/radix.cuh"

namespace longkv::card {

namespace {

constexpr int kShareThreads = 256, kMostSquares = kShareBlock / 8;

// A thread 8 channels of a slot.
__global__ void fold_queries_kernel(const uint4* q, int heads, int pieces, Squares s, uint4* folded) {
  const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, all = s.count() * s.stride * pieces;
  if (at >= all) return;
  const int piece = int(at % pieces), slot = int(at / pieces % s.stride), head = int(blockIdx.y);
  const int64_t position = (s.first_square() + at / pieces / s.stride) * s.stride + s.stride - 1 - slot;
  uint4 value = make_uint4(0, 0, 0, 0);
  if (position >= s.first && position < s.end())
    value = q[((position - s.first) * heads + head) * pieces + piece];
  folded[head * all + at] = value;
}

// A block of threads a block of queries of a head; a warp finds maximum and sum of one square after the other.
__global__ void __launch_bounds__(kShareThreads)
    block_shares_kernel(const float* scores, int64_t scores_stride, Squares s, float scale, float* shares,
                        int64_t shares_stride) {
  struct Known {
    float factor, top, inverse;
    int visible;
  };
  __shared__ Known known[kMostSquares];
  const int64_t block = blockIdx.x, head = blockIdx.y;
  const int64_t from = s.from(block);
  const int squares = int(s.to(block) - from), lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32);
  const float* rows = scores + (head * s.count() + from) * scores_stride;
  for (int a = warp; a < squares; a += kShareThreads / 32) {
    const float* row = rows + a * scores_stride;
    const float factor = scale * kLog2E / float(s.queries(from + a));
    const int visible = int(s.first_square() + from + a + 1);
    float top = kMinusInfinity, sum = 0.0f;
#pragma unroll 4
    for (int at = lane * 4; at < visible; at += 128) {
      const float4 v = *reinterpret_cast<const float4*>(row + at);
      float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = at + i < visible ? x[i] * factor : kMinusInfinity;
      const float next = fmaxf(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])), top);
      sum = sum * exp2_fast(top - next) + (exp2_fast(x[0] - next) + exp2_fast(x[1] - next)) +
            (exp2_fast(x[2] - next) + exp2_fast(x[3] - next));
      top = next;
    }
    const float all = warp_max(top);
    sum = warp_sum(sum * exp2_fast(top - all));
    if (lane == 0) known[a] = {factor, all, 1.0f / (sum * float(squares)), visible};
  }
  __syncthreads();
  const int64_t own = s.first_block() + block;
  const int per_block = s.per_block();
  float* out = shares + (head * gridDim.x + block) * shares_stride;
  for (int64_t b = threadIdx.x; b <= own; b += kShareThreads) {
    const int begin = int(b) * per_block;
    float share = 0.0f;
    for (int a = 0; a < squares; ++a) {
      const Known k = known[a];
      const float* row = rows + a * scores_stride + begin;
      float part = 0.0f;
      for (int i = 0; i < per_block; i += 4) {
        const float4 v = *reinterpret_cast<const float4*>(row + i);
        const float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (begin + i + j < k.visible) part += exp2_fast(x[j] * k.factor - k.top);
      }
      share += part * k.inverse;
    }
    out[b] = share;
  }
}

// Sums of two values over a block of kChooseThreads, known to every thread; both barriers are inside.
struct Sums {
  double warps[2][32];
  __device__ __forceinline__ double2 of(double x, double y) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      x += __shfl_xor_sync(kAllLanes, x, step);
      y += __shfl_xor_sync(kAllLanes, y, step);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[0][threadIdx.x / 32] = x, warps[1][threadIdx.x / 32] = y;
    __syncthreads();
    x = warps[0][threadIdx.x % 32], y = warps[1][threadIdx.x % 32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      x += __shfl_xor_sync(kAllLanes, x, step);
      y += __shfl_xor_sync(kAllLanes, y, step);
    }
    return make_double2(x, y);
  }
};

// How many of the shares [begin, end), largest first, reach `missing` of mass.
__device__ __forceinline__ int cover_count(const float* shares, int64_t begin, int64_t end, double missing,
                                           Sums& sums) {
  const auto bits_of = [&](int64_t b) { return __float_as_uint(shares[b]); };
  // Shares are not negative, so that a larger one has larger bits; they are about 1 at most.
  uint32_t least = 0;
  for (uint32_t bit = 1u << 29; bit > 0; bit /= 2) {
    const uint32_t from = least | bit;
    double mass = 0;
    for (int64_t b = begin + threadIdx.x; b < end; b += kChooseThreads)
      if (bits_of(b) >= from) mass += double(shares[b]);
    if (sums.of(mass, 0).x >= missing) least = from;
  }
  double mass = 0;
  int above = 0, equal = 0;
  for (int64_t b = begin + threadIdx.x; b < end; b += kChooseThreads) {
    const uint32_t bits = bits_of(b);
    if (bits > least) mass += double(shares[b]), ++above;
    if (bits == least) ++equal;
  }
  const double2 more = sums.of(mass, above);
  const double same = sums.of(equal, 0).x, each = double(__uint_as_float(least));
  // Of equal shares as many as are needed.
  double needed = same;
  if (each > 0) needed = fmin(same, fmax(1.0, ceil((missing - more.x) / each)));
  return int(more.y + needed);
}

// A block of threads a list.
__global__ void __launch_bounds__(kChooseThreads)
    choose_shares_kernel(const float* all_shares, int64_t stride, int64_t first_block, ShareRules rules,
                         PromptLists lists) {
  __shared__ ChooseScratch scratch;
  __shared__ Sums sums;
  const int64_t list = blockIdx.y * lists.query_blocks + blockIdx.x, own = first_block + blockIdx.x;
  const float* shares = all_shares + list * stride;
  int32_t* out = lists.blocks + list * lists.most;
  // Sinks and the own block come first and count in the share and in the minimum.
  const int64_t sinks = min(rules.sinks, own + 1), middle = max(int64_t(0), own - sinks);
  double forced = 0, rest = 0;
  for (int64_t b = threadIdx.x; b <= own; b += kChooseThreads)
    (b < sinks || b == own ? forced : rest) += double(shares[b]);
  const double2 mass = sums.of(forced, rest);
  const double missing = rules.share * (mass.x + mass.y) - mass.x;
  const int64_t held = sinks + (sinks <= own ? 1 : 0);
  int count = 0;
  if (missing != missing) {
    count = int(middle);  // not a number
  } else if (missing > 0 && middle > 0) {
    count = cover_count(shares, sinks, own, missing, sums);
  }
  count = int(max(int64_t(count), min(rules.least - held, middle)));
  for (int64_t b = threadIdx.x; b < sinks; b += kChooseThreads) out[b] = int32_t(b);
  if (threadIdx.x == 0) {
    if (sinks <= own) out[sinks + count] = int32_t(own);
    lists.count[list] = int32_t(held + count);
  }
  if (count == 0) return;
  const auto keys_of = [&](int64_t b, uint32_t(&keys)[kChooseRun]) { load_keys(shares, stride, b, own, keys); };
  choose_largest(sinks, own, count, keys_of, scratch, [&](int rank, int64_t b) { out[sinks + rank] = int32_t(b); });
}

// A block of threads the lists of a group.
__global__ void __launch_bounds__(kChooseThreads) unite_lists_kernel(int group, PromptLists lists) {
  __shared__ uint32_t marks[kMostUnited / 32];
  __shared__ BlockRanks ranks;
  const int64_t first = int64_t(blockIdx.y) * group * lists.query_blocks + blockIdx.x;
  const auto list_of = [&](int j) { return first + j * lists.query_blocks; };
  // The own block is every list's last.
  const int32_t own = lists.blocks[list_of(0) * lists.most + lists.count[list_of(0)] - 1];
  const int words = own / 32 + 1;
  for (int w = int(threadIdx.x); w < words; w += kChooseThreads) marks[w] = 0;
  __syncthreads();
  for (int j = 0; j < group; ++j) {
    const int32_t* from = lists.blocks + list_of(j) * lists.most;
    const int n = lists.count[list_of(j)];
    for (int i = int(threadIdx.x); i < n; i += kChooseThreads) atomicOr(&marks[from[i] / 32], 1u << (from[i] % 32));
  }
  __syncthreads();
  int n = 0;
  for (int base = 0; base < words; base += kChooseThreads) {
    const int w = base + int(threadIdx.x);
    const uint32_t mark = w < words ? marks[w] : 0;
    int at = n + ranks.next(__popc(mark), 0).x;
    for (uint32_t left = mark; left != 0; left &= left - 1, ++at)
      for (int j = 0; j < group; ++j) lists.blocks[list_of(j) * lists.most + at] = w * 32 + __ffs(int(left)) - 1;
    n += ranks.total.x;
    __syncthreads();
  }
  if (int(threadIdx.x) < group) lists.count[list_of(int(threadIdx.x))] = n;
}

}  // namespace

Status clear_square(const CardKv& kv, const Squares& s, CardStreamHandle stream) {
  const int64_t rows = s.keys() * s.stride - s.end(), row = int64_t(kv.dim) * 2;
  for (int64_t head = 0; rows > 0 && head < kv.kv_heads; ++head) {
    LONGKV_TRY(cuda_status(
        cudaMemsetAsync(kv.k + (head * kv.capacity + s.end()) * row, 0, size_t(rows * row), stream), "clear_square"));
  }
  return {};
}

Status fold_queries(const half_t* q, int heads, int dim, const Squares& s, half_t* folded, CardStreamHandle stream) {
  const int64_t pieces = s.count() * s.stride * (dim / 8);
  const dim3 grid(unsigned((pieces + 255) / 256), unsigned(heads));
  fold_queries_kernel<<<grid, 256, 0, stream>>>(reinterpret_cast<const uint4*>(q), heads, dim / 8, s,
                                                reinterpret_cast<uint4*>(folded));
  return launched("fold_queries");
}

Status block_shares(const float* scores, int64_t scores_stride, int heads, const Squares& s, float scale, float* shares,
                    int64_t shares_stride, CardStreamHandle stream) {
  if (scores_stride % 16 != 0) return Status(Code::kInternal, "block_shares: stride");
  const dim3 grid(unsigned(s.query_blocks()), unsigned(heads));
  block_shares_kernel<<<grid, kShareThreads, 0, stream>>>(scores, scores_stride, s, scale, shares, shares_stride);
  return launched("block_shares");
}

Status choose_shares(const float* shares, int64_t stride, int heads, int64_t first, const ShareRules& rules,
                     const PromptLists& lists, CardStreamHandle stream) {
  const dim3 grid(unsigned(lists.query_blocks), unsigned(heads));
  choose_shares_kernel<<<grid, kChooseThreads, 0, stream>>>(shares, stride, first / kShareBlock, rules, lists);
  return launched("choose_shares");
}

Status unite_lists(int kv_heads, int group, const PromptLists& lists, CardStreamHandle stream) {
  const dim3 grid(unsigned(lists.query_blocks), unsigned(kv_heads));
  unite_lists_kernel<<<grid, kChooseThreads, 0, stream>>>(group, lists);
  return launched("unite_lists");
}

}  // namespace longkv::card
