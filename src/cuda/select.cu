#include "cuda/choice.cuh"
#include "cuda/launch.cuh"
#include "cuda/radix.cuh"
#include "cuda/select.h"

namespace longkv::card {

namespace {

constexpr int kChooseThreads = 1024;
constexpr int kRun = 8;  // neighbouring blocks that a thread takes

// Larger key, larger score; NaN last.
__device__ __forceinline__ uint32_t order_key(float x) {
  const uint32_t bits = __float_as_uint(x);
  if (x != x) return 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Rows [begin, end) in tiles that end at multiples of 16.
__device__ __forceinline__ int64_t tiles_of(int64_t begin, int64_t end) {
  return end > begin ? (end + 15) / 16 - begin / 16 : 0;
}
__device__ __forceinline__ void put_rows(int2* tiles, int64_t begin, int64_t end) {
  const int64_t n = tiles_of(begin, end), origin = begin / 16 * 16;
  for (int64_t t = threadIdx.x; t < n; t += blockDim.x) {
    const int64_t from = max(begin, origin + 16 * t);
    tiles[t] = make_int2(int(from), int(min(end, origin + 16 * t + 16) - from));
  }
}

// Keys of blocks [b, b + kRun) of a list; those outside of [begin, end) are 0 and not counted in `there`.
struct Keys {
  uint32_t key[kRun];
  unsigned there;
};
__device__ __forceinline__ Keys keys_at(const float* scores, int kv_heads, const CardSummaries& s,
                                        const ChoiceRules& rules, int list, int64_t b, const Choice& c) {
  Keys k;
  k.there = 0;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const bool in = b + i >= c.begin && b + i < c.end;
    float x = 0.0f;
    if (in && !rules.shared) x = scores[list * s.capacity + b + i];
    if (in && rules.shared) {
      x = rules.max ? -__builtin_huge_valf() : 0.0f;
      for (int h = 0; h < kv_heads; ++h) {
        const float y = scores[h * s.capacity + b + i];
        x = rules.max ? fmaxf(x, y) : x + y;
      }
    }
    k.key[i] = in ? order_key(x) : 0u;
    k.there |= unsigned(in) << i;
  }
  return k;
}

// One block of threads a list. The k-th largest key is found 11, 11 and 10 bits at a time; of equal keys the first
// blocks win.
__global__ void __launch_bounds__(kChooseThreads)
    choose_kernel(const float* scores, int kv_heads, CardSummaries s, ChoiceRules rules, const int64_t* position,
                  int2* tiles, int32_t* count, int64_t stride) {
  __shared__ int bins[2048];
  __shared__ BlockRanks ranks;
  __shared__ FoundBin found;
  let_next_start();
  wait_for_previous();
  const int list = int(blockIdx.x);
  const Choice c = choice_of(*position, s.block, rules);
  int2* out = tiles + list * stride;
  if (c.all) {
    put_rows(out, 0, c.rows);
    if (threadIdx.x == 0) count[list] = int(tiles_of(0, c.rows));
    return;
  }
  const int64_t origin = c.begin / kRun * kRun, step = int64_t(kChooseThreads) * kRun;
  uint32_t prefix = 0, mask = 0;
  int wanted = int(c.wanted);
  for (int shift = 21, bits = 11; shift >= 0; bits = shift < 11 ? shift : 11, shift -= bits) {
    for (int i = int(threadIdx.x); i < 2048; i += kChooseThreads) bins[i] = 0;
    __syncthreads();
    RunCounter runs(bins);
    for (int64_t b = origin + threadIdx.x * kRun; b < c.end; b += step) {
      const Keys k = keys_at(scores, kv_heads, s, rules, list, b, c);
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        if ((k.there >> i & 1) && (k.key[i] & mask) == prefix) runs.add(int((k.key[i] >> shift) & ((1u << bits) - 1)));
      }
    }
    runs.flush();
    __syncthreads();
    find_bin<2048>(bins, wanted, found);
    __syncthreads();
    prefix |= uint32_t(found.bin) << shift;
    mask |= ((1u << bits) - 1) << shift;
    wanted = found.left;
    if (shift == 0) break;
  }

  const int64_t sink_tiles = tiles_of(0, c.sink), per_block = s.block / 16;
  put_rows(out, 0, c.sink);
  int chosen = 0, equal_before = 0;  // known to every thread
  for (int64_t base = origin; base < c.end; base += step) {
    const int64_t b = base + threadIdx.x * kRun;
    const Keys k = keys_at(scores, kv_heads, s, rules, list, b, c);
    unsigned above = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      above |= unsigned(k.key[i] > prefix) << i;
      equal |= unsigned(k.key[i] == prefix) << i;
    }
    above &= k.there, equal &= k.there;
    const int2 before = ranks.next(__popc(above), __popc(equal));
    int equal_rank = equal_before + before.y;
    // Ahead of this thread's blocks: those above, and of the equal ones as many as are taken.
    int rank = chosen + before.x + min(equal_rank, wanted) - min(equal_before, wanted);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const bool is_equal = equal >> i & 1;
      if (!(above >> i & 1) && !(is_equal && equal_rank < wanted)) continue;
      equal_rank += is_equal;
      for (int64_t t = 0; t < per_block; ++t) {
        const int64_t from = (b + i) * s.block + 16 * t, begin = max(from, c.sink), end = min(from + 16, c.tail);
        out[sink_tiles + rank * per_block + t] = make_int2(int(begin), int(max(int64_t(0), end - begin)));
      }
      ++rank;
    }
    chosen += ranks.total.x + min(equal_before + ranks.total.y, wanted) - min(equal_before, wanted);
    equal_before += ranks.total.y;
  }
  const int64_t tail_at = sink_tiles + chosen * per_block;
  put_rows(out + tail_at, c.tail, c.rows);
  if (threadIdx.x == 0) count[list] = int(tail_at + tiles_of(c.tail, c.rows));
}

// Every KV head gets the shared list.
__global__ void share_kernel(int2* tiles, int32_t* count, int64_t stride) {
  let_next_start();
  wait_for_previous();
  const int n = count[0];
  int2* to = tiles + (blockIdx.x + 1) * stride;
  for (int i = int(threadIdx.x); i < n; i += int(blockDim.x)) to[i] = tiles[i];
  if (threadIdx.x == 0) count[blockIdx.x + 1] = n;
}

}  // namespace

Status choose_blocks(const float* scores, int kv_heads, const CardSummaries& s, const ChoiceRules& rules,
                     const int64_t* position, int32_t* tiles, int32_t* count, int64_t stride, CardStreamHandle stream) {
  auto* pairs = reinterpret_cast<int2*>(tiles);
  LONGKV_TRY(launch_close("choose_blocks", choose_kernel, unsigned(rules.shared ? 1 : kv_heads), kChooseThreads, stream,
                          scores, kv_heads, s, rules, position, pairs, count, stride));
  if (!rules.shared || kv_heads == 1) return {};
  return launch_close("share_list", share_kernel, unsigned(kv_heads - 1), 256, stream, pairs, count, stride);
}

}  // namespace longkv::card
