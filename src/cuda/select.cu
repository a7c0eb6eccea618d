#include <algorithm>

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

// The scores of all KV heads as one list, in the place of the first head's.
__global__ void __launch_bounds__(256) join_kernel(float* scores, int kv_heads, int64_t capacity, bool max) {
  let_next_start();
  wait_for_previous();
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t b = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; b < capacity; b += stride) {
    float all = scores[b];
    for (int h = 1; h < kv_heads; ++h) {
      const float x = scores[h * capacity + b];
      all = max ? fmaxf(all, x) : all + x;
    }
    scores[b] = all;
  }
}
Status join(float* scores, int kv_heads, int64_t capacity, const ChoiceRules& rules, CardStreamHandle stream) {
  if (!rules.shared || kv_heads == 1) return {};
  const auto grid = unsigned(std::clamp<int64_t>((capacity + 255) / 256, 1, 256));
  return launch_close("join_scores", join_kernel, grid, 256, stream, scores, kv_heads, capacity, rules.max);
}

// A thread a top.
__global__ void __launch_bounds__(256)
    tops_kernel(const float* scores, CardSummaries s, ChoiceRules rules, const int64_t* position, uint32_t* tops) {
  let_next_start();
  wait_for_previous();
  const int list = int(blockIdx.y);
  const Choice c = choice_of(*position, s.block, rules);
  if (c.all) return;
  const Places places = places_of(rules, list, s.block, c);
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t t = places.begin / kTopRun + blockIdx.x * int64_t(blockDim.x) + threadIdx.x; t * kTopRun < places.end;
       t += stride) {
    uint32_t top = 0;
#pragma unroll
    for (int run = 0; run < kTopRun; run += kChooseRun) {
      const int64_t at = t * kTopRun + run;
      uint32_t keys[kChooseRun] = {};
      if (at < places.end) load_keys(scores + list * s.capacity, s.capacity, at, places.end, keys);
      const unsigned there = items_within(at, places.begin, places.end);
#pragma unroll
      for (int i = 0; i < kChooseRun; ++i)
        if (there >> i & 1) top = max(top, keys[i]);
    }
    tops[list * top_count(s.capacity) + t] = top;
  }
}

// One block of threads a list.
__global__ void __launch_bounds__(kChooseThreads)
    choose_kernel(const float* scores, const uint32_t* tops, CardSummaries s, ChoiceRules rules,
                  const int64_t* position, int2* tiles, int32_t* count, int64_t stride) {
  __shared__ ChooseScratch scratch;
  __shared__ int32_t listed[2048];
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
  const Places places = places_of(rules, list, s.block, c);
  const int64_t sink_tiles = tiles_of(0, c.sink), per_block = s.block / 16;
  int2* chosen = out + sink_tiles;  // first the places, then tiles
  put_rows(out, 0, c.sink);
  if (c.wanted > 0) {
    const int64_t first = places.begin / kTopRun, last = (places.end + kTopRun - 1) / kTopRun;
    uint2 range = kAnyKey;
    const int sieved = tops == nullptr ? -1
                                       : sieve_tops(tops + list * top_count(s.capacity), first, last, int(c.wanted),
                                                    scratch, listed, range);
    // Runs of what was listed, or all.
    constexpr int kParts = kTopRun / kChooseRun;
    const int64_t runs = sieved >= 0 ? int64_t(sieved) * kParts : (last - first) * kParts;
    const auto place_of = [&](int64_t run) {
      const int64_t top = sieved >= 0 ? listed[run / kParts] : run / kParts;
      return (first + top) * kTopRun + run % kParts * kChooseRun;
    };
    choose_runs(
        runs, int(c.wanted), range,
        [&](int64_t run, uint32_t(&keys)[kChooseRun]) {
          const int64_t at = place_of(run);
          if (at >= places.end) return 0u;
          load_keys(scores + list * s.capacity, s.capacity, at, places.end, keys);
          return items_within(at, places.begin, places.end);
        },
        scratch, [&](int rank, int64_t run, int i) { chosen[rank * per_block].x = int(place_of(run) + i); });
    __syncthreads();
    for (int64_t rank = threadIdx.x; rank < c.wanted; rank += kChooseThreads) {
      const int64_t b = places.block(chosen[rank * per_block].x);
#pragma unroll 1
      for (int64_t t = 0; t < per_block; ++t) {
        const int64_t from = b * s.block + 16 * t, begin = max(from, c.sink), end = min(from + 16, c.tail);
        chosen[rank * per_block + t] = make_int2(int(begin), int(max(int64_t(0), end - begin)));
      }
    }
  }
  const int64_t tail_at = sink_tiles + c.wanted * per_block;
  put_rows(out + tail_at, c.tail, c.rows);
  if (threadIdx.x == 0) count[list] = int(tail_at + tiles_of(c.tail, c.rows));
}

// One block of threads a list.
__global__ void __launch_bounds__(kChooseThreads)
    choose_coarse_kernel(const float* scores, CardSummaries coarse, ChoiceRules rules, CoarseLimits limits,
                         const int64_t* position, int32_t* lists, int32_t* count, int64_t stride) {
  __shared__ ChooseScratch scratch;
  let_next_start();
  wait_for_previous();
  const int list = int(blockIdx.x), factor = coarse.block / limits.block;
  const Choice c = choice_of(*position, coarse.block, rules), fine = choice_of(*position, limits.block, rules);
  const int64_t there = c.end - c.begin;
  const int64_t affordable = (limits.index_bytes - there * limits.coarse_bytes) / limits.block_bytes;
  // One more than the rule's: the first coarse block may lie in the sinks for the greater part.
  const int64_t keep = (max(4 * fine.wanted, affordable) + factor - 1) / factor + 1;
  const bool flat = c.all || (fine.end - fine.begin) * limits.block_bytes <= limits.index_bytes || keep >= there;
  if (threadIdx.x == 0) count[list] = flat ? -1 : int(keep);
  if (flat) return;
  const auto keys_of = [&](int64_t b, uint32_t(&keys)[kChooseRun]) {
    load_keys(scores + list * coarse.capacity, coarse.capacity, b, c.end, keys);
  };
  int32_t* out = lists + list * stride;
  choose_largest(c.begin, c.end, int(keep), keys_of, scratch, [&](int rank, int64_t b) { out[rank] = int32_t(b); });
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

int64_t CoarseLimits::most(const ChoiceRules& rules, int factor) const {
  const int64_t wanted = 4 * (rules.budget / block + 1), affordable = index_bytes / block_bytes;
  return (wanted > affordable ? wanted : affordable) / factor + 3;
}

Status choose_coarse(float* scores, int kv_heads, const CardSummaries& coarse, const ChoiceRules& rules,
                     const CoarseLimits& limits, const int64_t* position, int32_t* list, int32_t* count, int64_t stride,
                     CardStreamHandle stream) {
  LONGKV_TRY(join(scores, kv_heads, coarse.capacity, rules, stream));
  return launch_close("choose_coarse", choose_coarse_kernel, unsigned(rules.shared ? 1 : kv_heads), kChooseThreads,
                      stream, scores, coarse, rules, limits, position, list, count, stride);
}

Status choose_blocks(float* scores, Tops made, int kv_heads, const CardSummaries& s, const ChoiceRules& rules,
                     const int64_t* position, int32_t* tiles, int32_t* count, int64_t stride, CardStreamHandle stream) {
  auto* pairs = reinterpret_cast<int2*>(tiles);
  const auto lists = unsigned(rules.shared ? 1 : kv_heads);
  uint32_t* tops = made == Tops::kNone ? nullptr : score_tops(scores, kv_heads, s.capacity);
  LONGKV_TRY(join(scores, kv_heads, s.capacity, rules, stream));
  if (made == Tops::kMade || (made == Tops::kLeft && rules.shared)) {
    const dim3 grid(unsigned(std::clamp<int64_t>((top_count(s.capacity) + 255) / 256, 1, 64)), lists);
    LONGKV_TRY(launch_close("tops", tops_kernel, grid, 256, stream, scores, s, rules, position, tops));
  }
  LONGKV_TRY(launch_close("choose_blocks", choose_kernel, lists, kChooseThreads, stream, scores, tops, s, rules,
                          position, pairs, count, stride));
  if (!rules.shared || kv_heads == 1) return {};
  return launch_close("share_list", share_kernel, unsigned(kv_heads - 1), 256, stream, pairs, count, stride);
}

}  // namespace longkv::card
