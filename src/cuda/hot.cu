#include <cuda_fp16.h>

#include "cuda/hot.h"
#include "cuda/key_row.cuh"
#include "cuda/launch.cuh"
#include "cuda/radix.cuh"

namespace longkv::card {

namespace {

constexpr int kThreads = kChooseThreads;
constexpr int kAges = 256;

// One block of threads a KV head. Slots leave by age, of equal ages the first ones.
__global__ void __launch_bounds__(kThreads) place_kernel(BlockStore store, HotBlocks hot, int2* tiles,
                                                         const int32_t* count, int64_t stride, const int64_t* step) {
  __shared__ int bins[kAges];
  __shared__ BlockRanks ranks;
  __shared__ FoundBin found;
  let_next_start();
  wait_for_previous();
  const int head = int(blockIdx.x), n = count[head], now = int(*step), block = store.block;
  int2* list = tiles + head * stride;
  int32_t* slot_of = hot.slot_of + head * store.blocks;
  int32_t* block_of = hot.block_of + head * hot.slots;
  int32_t* used = hot.used + head * hot.slots;
  int2* missing = reinterpret_cast<int2*>(hot.missing) + head * hot.slots;

  int misses = 0, hits = 0;  // known to every thread
  for (int base = 0; base < n; base += kThreads) {
    const int i = base + int(threadIdx.x);
    bool first = false;
    int b = 0, slot = -1;
    if (i < n) {
      b = list[i].x / block;
      first = i == 0 || list[i - 1].x / block != b;
      if (first) slot = slot_of[b];
    }
    const bool hit = first && slot >= 0, miss = first && slot < 0;
    if (hit) used[slot] = now;
    const int2 rank = ranks.next(miss, hit);
    if (miss) missing[misses + rank.x].x = b;
    misses += ranks.total.x;
    hits += ranks.total.y;
  }
  if (threadIdx.x == 0) {
    hot.count[head] = misses;
    atomicAdd(hot.totals, static_cast<unsigned long long>(hits));
    atomicAdd(hot.totals + 1, static_cast<unsigned long long>(misses));
  }

  if (misses > 0) {
    for (int i = int(threadIdx.x); i < kAges; i += kThreads) bins[i] = 0;
    __syncthreads();
    // Ages of a run of slots, -1 past the end. Free slots are the oldest.
    int ages[kChooseRun];
    const auto load_ages = [&](int64_t at) {
#pragma unroll
      for (int i = 0; i < kChooseRun; ++i) {
        const int last = at + i < hot.slots ? used[at + i] : now + 1;
        ages[i] = last < 0 ? kAges - 1 : min(now - last, kAges - 2);
      }
    };
    RunCounter runs(bins);
    constexpr int64_t kStep = int64_t(kThreads) * kChooseRun;
    for (int64_t at = int64_t(threadIdx.x) * kChooseRun; at < hot.slots; at += kStep) {
      load_ages(at);
#pragma unroll
      for (int i = 0; i < kChooseRun; ++i)
        if (ages[i] >= 0) runs.add(ages[i]);
    }
    runs.flush();
    __syncthreads();
    find_bin<kAges>(bins, misses, found);
    __syncthreads();
    const int age = found.bin, of_age = found.left;  // slots of that age that leave; all older ones do
    int left = 0, equals = 0;
    for (int64_t base = 0; base < hot.slots; base += kStep) {
      const int64_t at = base + int64_t(threadIdx.x) * kChooseRun;
      load_ages(at);
      int older = 0, equal = 0;
#pragma unroll
      for (int i = 0; i < kChooseRun; ++i) older += ages[i] > age, equal += ages[i] == age;
      const int2 before = ranks.next(older, equal);
      int equal_rank = equals + before.y;
      int rank = left + before.x + min(equal_rank, of_age) - min(equals, of_age);
#pragma unroll
      for (int i = 0; i < kChooseRun; ++i) {
        const bool same = ages[i] == age;
        const bool leaves = ages[i] > age || (same && equal_rank < of_age);
        equal_rank += same;
        if (!leaves) continue;
        const int slot = int(at) + i, b = missing[rank].x, old = block_of[slot];
        if (old >= 0) slot_of[old] = -1;
        block_of[slot] = b;
        slot_of[b] = slot;
        used[slot] = now;
        missing[rank++].y = slot;
      }
      left += ranks.total.x + min(equals + ranks.total.y, of_age) - min(equals, of_age);
      equals += ranks.total.y;
    }
    __syncthreads();
  }
  for (int i = int(threadIdx.x); i < n; i += kThreads) {
    const int2 at = list[i];
    list[i] = make_int2(slot_of[at.x / block] * block + at.x % block, at.y);
  }
}

// A warp a record; its loads are under way before the first arrives.
__global__ void __launch_bounds__(256) fetch_kernel(BlockStore store, HotBlocks hot) {
  constexpr int kUnits = 9;  // 16-byte words of a lane at a time: a q8_0 record of 16 rows and 128 channels
  let_next_start();
  wait_for_previous();
  const int lane = threadIdx.x % 32;
  const int64_t warps = int64_t(gridDim.x) * (blockDim.x / 32);
  const int64_t plane = store.plane / 16, scales = store.scales / 16, words = 2 * (plane + scales);
  int64_t at = int64_t(threadIdx.x / 32) * gridDim.x + blockIdx.x;  // the first records go to different processors
  // Heads in sets of 32, a lane each, so that their counts are known at once.
  for (int base = 0; base < store.kv_heads; base += 32) {
    const int n = base + lane < store.kv_heads ? hot.count[base + lane] : 0;
    int upto = n;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kAllLanes, upto, step);
      if (lane >= step) upto += other;
    }
    const int total = __shfl_sync(kAllLanes, upto, 31);
    for (; at < total; at += warps) {
      const int own = __popc(__ballot_sync(kAllLanes, upto <= at)), head = base + own;
      const int64_t before = __shfl_sync(kAllLanes, upto - n, own);
      const int2 what = reinterpret_cast<const int2*>(hot.missing)[head * hot.slots + at - before];
      const auto* from = reinterpret_cast<const uint4*>(store.data + (head * store.blocks + what.x) * store.record);
      const int64_t slot = head * hot.slots + what.y;
      uint4* k = reinterpret_cast<uint4*>(hot.pool.k) + slot * plane;
      uint4* v = reinterpret_cast<uint4*>(hot.pool.v) + slot * plane - plane;
      uint4* k_scale = reinterpret_cast<uint4*>(hot.pool.k_scale) + slot * scales - 2 * plane;
      uint4* v_scale = reinterpret_cast<uint4*>(hot.pool.v_scale) + slot * scales - 2 * plane - scales;
      for (int64_t word = 0; word < words; word += kUnits * 32) {
        uint4 held[kUnits];
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          const int64_t i = word + u * 32 + lane;
          if (i < words) held[u] = __ldcs(from + i);
        }
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          const int64_t i = word + u * 32 + lane;
          if (i < words) (i < plane ? k : i < 2 * plane ? v : i < 2 * plane + scales ? k_scale : v_scale)[i] = held[u];
        }
      }
    }
    at -= total;
  }
}

// A thread takes 16 bytes of a row, and the first ones of a row a scale each.
__global__ void __launch_bounds__(256) spill_kernel(CardKv kv, BlockStore store, int64_t first, int64_t n) {
  const int row_words = int(store.plane / store.block / 16);
  const int groups = scale_count(store.type, store.dim);
  const int head = int(blockIdx.y) / 2;
  const bool key = blockIdx.y % 2 == 0;
  const uint4* words = reinterpret_cast<const uint4*>(key ? kv.k : kv.v);
  const half_t* scales = key ? kv.k_scale : kv.v_scale;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n * row_words;
       i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t position = first + i / row_words, from = head * kv.capacity + position;
    const int word = int(i % row_words);
    const int64_t row = position % store.block;
    uint8_t* record = store.data + (head * store.blocks + position / store.block) * store.record;
    auto* to = reinterpret_cast<uint4*>(record + (key ? 0 : store.plane)) + row * row_words;
    to[word] = words[from * row_words + word];
    for (int g = word; g < groups; g += row_words) {
      auto* to_scale = reinterpret_cast<half_t*>(record + 2 * store.plane + (key ? 0 : store.scales));
      to_scale[row * groups + g] = scales[from * groups + g];
    }
  }
}

// A thread takes eight channels of a row.
template <class Raw>
__global__ void __launch_bounds__(256) bring_kernel(BlockStore store, int64_t n, CardKv work) {
  const int chunks = store.dim / 8, head = int(blockIdx.y) / 2;
  const bool key = blockIdx.y % 2 == 0;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n * chunks;
       i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t position = i / chunks;
    const int chunk = int(i % chunks);
    const uint8_t* record = store.data + (head * store.blocks + position / store.block) * store.record;
    const auto* scales = reinterpret_cast<const half_t*>(record + 2 * store.plane + (key ? 0 : store.scales));
    Raw raw;
    raw.load(record + (key ? 0 : store.plane), scales, position % store.block, store.dim, chunk);
    auto* to = reinterpret_cast<uint4*>((key ? work.k : work.v) + (head * work.capacity + position) * work.dim * 2);
    to[chunk] = raw.halves();
  }
}

// Few blocks of threads fill the bus and leave the multiprocessors to what runs beside them.
constexpr unsigned kBusBlocks = 32;

}  // namespace

Status place_blocks(const BlockStore& store, const HotBlocks& hot, int32_t* tiles, const int32_t* count, int64_t stride,
                    const int64_t* step, CardStreamHandle stream) {
  return launch_close("place_blocks", place_kernel, unsigned(store.kv_heads), kThreads, stream, store, hot,
                      reinterpret_cast<int2*>(tiles), count, stride, step);
}

Status fetch_blocks(const BlockStore& store, const HotBlocks& hot, CardStreamHandle stream) {
  return launch_close("fetch_blocks", fetch_kernel, 264, 256, stream, store, hot);
}

Status spill_rows(const CardKv& kv, const BlockStore& store, int64_t first, int64_t n, CardStreamHandle stream) {
  if (n <= 0) return {};
  spill_kernel<<<dim3(kBusBlocks / 8, unsigned(2 * store.kv_heads)), 256, 0, stream>>>(kv, store, first, n);
  return launched("spill_rows");
}

Status bring_rows(const BlockStore& store, int64_t n, const CardKv& work, CardStreamHandle stream) {
  if (n <= 0) return {};
  const dim3 grid(64, unsigned(2 * store.kv_heads));
  switch (store.type) {
    case KvType::kQ8_0: bring_kernel<RawBytes><<<grid, 256, 0, stream>>>(store, n, work); break;
    case KvType::kQ4_0: bring_kernel<RawNibbles><<<grid, 256, 0, stream>>>(store, n, work); break;
    case KvType::kFp8: bring_kernel<RawFp8><<<grid, 256, 0, stream>>>(store, n, work); break;
    default: bring_kernel<RawHalves><<<grid, 256, 0, stream>>>(store, n, work);
  }
  return launched("bring_rows");
}

}  // namespace longkv::card
