#include "cuda/choice.cuh"
#include "cuda/launch.cuh"
#include "cuda/radix.cuh"
#include "cuda/select.h"

namespace longkv::card {

namespace {

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

// One block of threads a list.
__global__ void __launch_bounds__(kChooseThreads)
    choose_kernel(const float* scores, int kv_heads, CardSummaries s, ChoiceRules rules, const int64_t* position,
                  int2* tiles, int32_t* count, int64_t stride) {
  __shared__ ChooseScratch scratch;
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
  const auto keys_of = [&](int64_t b, uint32_t(&keys)[kChooseRun]) {
    if (!rules.shared) return load_keys(scores + list * s.capacity, s.capacity, b, c.end, keys);
#pragma unroll
    for (int i = 0; i < kChooseRun; ++i) {
      float all = rules.max ? -__builtin_huge_valf() : 0.0f;
      for (int h = 0; h < kv_heads && b + i < c.end; ++h) {
        const float x = scores[h * s.capacity + b + i];
        all = rules.max ? fmaxf(all, x) : all + x;
      }
      keys[i] = order_key(all);
    }
  };
  const int64_t sink_tiles = tiles_of(0, c.sink), per_block = s.block / 16;
  const auto put = [&](int rank, int64_t b) {
    for (int64_t t = 0; t < per_block; ++t) {
      const int64_t from = b * s.block + 16 * t, begin = max(from, c.sink), end = min(from + 16, c.tail);
      out[sink_tiles + rank * per_block + t] = make_int2(int(begin), int(max(int64_t(0), end - begin)));
    }
  };
  put_rows(out, 0, c.sink);
  if (c.wanted > 0) choose_largest(c.begin, c.end, int(c.wanted), keys_of, scratch, put);
  const int64_t tail_at = sink_tiles + c.wanted * per_block;
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
