// Pieces of choosing the k largest within one block of threads.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/select.h"

namespace longkv::card {

// Ranks of a thread's items among those of the threads before it, for two kinds at once. Every thread of a block of
// 1024 calls next(). total: of the last call.
struct BlockRanks {
  int warps[32];
  int2 total;

  // `first` and `second`: items of this thread, at most 2^15 a block. Returns those of the threads before it.
  __device__ __forceinline__ int2 next(int first, int second) {
    const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32);
    const int mine = first | second << 16;
    int upto = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kAllLanes, upto, step);
      if (lane >= step) upto += other;
    }
    if (lane == 31) warps[warp] = upto;
    __syncthreads();
    // Every warp adds the sums of all warps up itself: one barrier instead of two.
    int all = warps[lane];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kAllLanes, all, step);
      if (lane >= step) all += other;
    }
    const int sum = __shfl_sync(kAllLanes, all, 31);
    const int before_warp = warp == 0 ? 0 : __shfl_sync(kAllLanes, all, warp - 1);
    const int before = before_warp + upto - mine;
    if (threadIdx.x == 0) total = make_int2(sum & 0xffff, sum >> 16);
    __syncthreads();
    return make_int2(before & 0xffff, before >> 16);
  }
};

// Counts into shared bins; runs of one bin cost one addition.
struct RunCounter {
  int* bins;
  int bin = -1, n = 0;
  __device__ explicit RunCounter(int* b) : bins(b) {}
  __device__ __forceinline__ void add(int at) {
    if (at != bin) {
      flush();
      bin = at;
      n = 0;
    }
    ++n;
  }
  __device__ __forceinline__ void flush() {
    if (n > 0) atomicAdd(&bins[bin], n);
    n = 0;
  }
};

struct FoundBin {
  int bin, left;
};
// The bin in which the wanted-th item lies, counted from the top bin down, and how many of its items are wanted. The
// first warp writes `found`; a barrier must follow. There are at least `wanted` items.
template <int kBins>
__device__ __forceinline__ void find_bin(const int* bins, int wanted, FoundBin& found) {
  if (threadIdx.x >= 32) return;
  const int lane = int(threadIdx.x);
  int above = 0;
  for (int top = kBins - 1; top >= 0; top -= 32) {
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
        found.bin = top - lane;
        found.left = wanted - (above + upto - n);
      }
      return;
    }
    above += __shfl_sync(kAllLanes, upto, 31);
  }
}

// The same of 2048 bins by a whole block of kChooseThreads; a barrier must come before and after.
constexpr int kChooseThreads = 1024;
__device__ __forceinline__ void find_bin_together(const int* bins, int wanted, int (&warps)[32], FoundBin& found) {
  const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32);
  const int top = 2047 - 2 * int(threadIdx.x);  // this thread's bins: top and top - 1
  const int first = bins[top], second = bins[top - 1];
  int upto = first + second;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) warps[warp] = upto;
  __syncthreads();
  int all = warps[lane];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, all, step);
    if (lane >= step) all += other;
  }
  const int before_warp = warp == 0 ? 0 : __shfl_sync(kAllLanes, all, warp - 1);
  upto += before_warp;
  const int before = upto - first - second;
  if (before >= wanted || upto < wanted) return;
  const bool in_first = before + first >= wanted;
  found.bin = in_first ? top : top - 1;
  found.left = wanted - before - (in_first ? 0 : first);
}

// Larger key, larger score; both zeros are equal, NaN last.
__device__ __forceinline__ uint32_t order_key(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  if (x != x) return 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

constexpr int kChooseRun = 8;  // neighbouring items that a thread takes
static_assert(kTopRun % kChooseRun == 0);
static_assert(kFewBlocks == kChooseThreads * kChooseRun);  // so many stay in registers

struct ChooseScratch {
  int bins[2048];
  int warps[32];
  uint2 ranges[32];
  BlockRanks ranks;
  FoundBin found;
};

// A run of scores as keys, from a multiple of kChooseRun on. Rows whose stride is a multiple of it may be read to the
// end of a run, in wide words.
__device__ __forceinline__ void load_keys(const float* scores, int64_t stride, int64_t at, int64_t end,
                                          uint32_t (&keys)[kChooseRun]) {
  float x[kChooseRun];
  if (stride % kChooseRun == 0) {
#pragma unroll
    for (int i = 0; i < kChooseRun; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(scores + at + i);
      x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kChooseRun; ++i) x[i] = at + i < end ? scores[at + i] : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kChooseRun; ++i) keys[i] = order_key(x[i]);
}

// Least and largest of what the threads of a block of kChooseThreads hold. A barrier must come before the next call.
__device__ __forceinline__ uint2 range_together(uint32_t least, uint32_t most, uint2 (&warps)[32]) {
  least = __reduce_min_sync(kAllLanes, least), most = __reduce_max_sync(kAllLanes, most);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = make_uint2(least, most);
  __syncthreads();
  const uint2 of_warp = warps[threadIdx.x % 32];
  return make_uint2(__reduce_min_sync(kAllLanes, of_warp.x), __reduce_max_sync(kAllLanes, of_warp.y));
}

// Keys of a range in at most 2048 bins of 2^shift each.
struct KeyBins {
  uint32_t low, high;
  int shift;
  __device__ explicit KeyBins(uint2 range) : low(range.x), high(range.y) {
    const int bits = 32 - __clz(int(high - low));
    shift = bits > 11 ? bits - 11 : 0;
  }
  __device__ __forceinline__ bool has(uint32_t key) const { return key >= low && key <= high; }
  __device__ __forceinline__ int bin(uint32_t key) const { return int((key - low) >> shift); }
  // The range of one bin.
  __device__ __forceinline__ uint2 range_of(int at) const {
    const uint32_t from = low + (uint32_t(at) << shift);
    return make_uint2(from, uint32_t(min(uint64_t(high), from + (uint64_t(1) << shift) - 1)));
  }
};

// The `wanted` items with the largest keys, in ascending order: put(rank, run, i) of item i of a run of kChooseRun. The
// k-th largest key is found by counting keys in 2048 bins between the least and the largest, then in the bin where it
// lies, down to one key; of equal keys the first items win. There are at least `wanted` items. All threads of a block
// of kChooseThreads take part. load(run, keys) gives a run's keys and a bit for each item that counts. range: so that
// the k-th largest key and all larger ones lie in it; kAnyKey: not known.
constexpr uint2 kAnyKey = {1, 0};
template <class Load, class Put>
__device__ __forceinline__ void choose_runs(int64_t runs, int wanted, uint2 range, const Load& load,
                                            ChooseScratch& shared, const Put& put) {
  constexpr int kAhead = 2;  // runs whose loads start together
  const auto run_of = [&](int64_t run, uint32_t(&keys)[kChooseRun]) { return run < runs ? load(run, keys) : 0u; };
  // A single run a thread stays in registers.
  const bool held = runs <= kChooseThreads;
  uint32_t keys[kChooseRun];
  unsigned there = run_of(threadIdx.x, keys);
  const auto each = [&](const auto& visit) {
    if (held) {
      if (there == 0) return;
#pragma unroll
      for (int i = 0; i < kChooseRun; ++i)
        if (there >> i & 1) visit(keys[i]);
      return;
    }
    for (int64_t run = threadIdx.x; run < runs; run += kAhead * kChooseThreads) {
      uint32_t ahead[kAhead][kChooseRun];
      unsigned bits[kAhead];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) bits[n] = run_of(run + n * kChooseThreads, ahead[n]);
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
#pragma unroll
        for (int i = 0; i < kChooseRun; ++i)
          if (bits[n] >> i & 1) visit(ahead[n][i]);
      }
    }
  };
  if (range.x > range.y) {
    uint32_t least = ~0u, most = 0;
    each([&](uint32_t key) { least = min(least, key), most = max(most, key); });
    range = range_together(least, most, shared.ranges);
  }
  while (true) {
    const KeyBins bins(range);
    for (int i = int(threadIdx.x); i < 2048; i += kChooseThreads) shared.bins[i] = 0;
    __syncthreads();
    RunCounter counter(shared.bins);
    each([&](uint32_t key) {
      if (bins.has(key)) counter.add(bins.bin(key));
    });
    counter.flush();
    __syncthreads();
    find_bin_together(shared.bins, wanted, shared.warps, shared.found);
    __syncthreads();
    range = bins.range_of(shared.found.bin);
    wanted = shared.found.left;  // of the items of this range: in the end, with exactly this key
    if (bins.shift == 0 || shared.bins[shared.found.bin] == wanted) break;
    __syncthreads();
  }
  // All items of the range are wanted, or they all have the same key: they count as equal.
  int chosen = 0, equal_before = 0;  // known to every thread
  uint32_t next[kChooseRun];
  for (int64_t base = 0; base < runs; base += kChooseThreads) {
    const int64_t run = base + threadIdx.x;
    const unsigned there_next = run_of(run + kChooseThreads, next);  // on their way while these are ranked
    unsigned above = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < kChooseRun; ++i) {
      above |= unsigned(keys[i] > range.y) << i;
      equal |= unsigned(keys[i] >= range.x && keys[i] <= range.y) << i;
    }
    above &= there, equal &= there;
    const int2 before = shared.ranks.next(__popc(above), __popc(equal));
    int equal_rank = equal_before + before.y;
    // Ahead of this thread's items: those above, and of the equal ones as many as are taken.
    int rank = chosen + before.x + min(equal_rank, wanted) - min(equal_before, wanted);
    if ((above | equal) != 0) {
#pragma unroll
      for (int i = 0; i < kChooseRun; ++i) {
        const bool is_equal = equal >> i & 1;
        const bool take = (above >> i & 1) || (is_equal && equal_rank < wanted);
        equal_rank += is_equal;
        if (take) put(rank++, run, i);
      }
    }
    chosen += shared.ranks.total.x + min(equal_before + shared.ranks.total.y, wanted) - min(equal_before, wanted);
    equal_before += shared.ranks.total.y;
    there = there_next;
#pragma unroll
    for (int i = 0; i < kChooseRun; ++i) keys[i] = next[i];
  }
}

// The bits of items [at, at + kChooseRun) that lie in [begin, end).
__device__ __forceinline__ unsigned items_within(int64_t at, int64_t begin, int64_t end) {
  unsigned there = 0;
#pragma unroll
  for (int i = 0; i < kChooseRun; ++i) there |= unsigned(at + i >= begin && at + i < end) << i;
  return there;
}

// choose_runs() of items [begin, end): put(rank, item). load_run(at, keys) gives the keys of items
// [at, at + kChooseRun), at a multiple of it; those outside of [begin, end) may be anything.
template <class Load, class Put>
__device__ __forceinline__ void choose_largest(int64_t begin, int64_t end, int wanted, const Load& load_run,
                                               ChooseScratch& shared, const Put& put) {
  const int64_t first = begin / kChooseRun;
  choose_runs((end + kChooseRun - 1) / kChooseRun - first, wanted, kAnyKey,
              [&](int64_t run, uint32_t(&keys)[kChooseRun]) {
                const int64_t at = (first + run) * kChooseRun;
                load_run(at, keys);
                return items_within(at, begin, end);
              },
              shared, [&](int rank, int64_t run, int i) { put(rank, (first + run) * kChooseRun + i); });
}

// Where many are to choose from: of tops [first, last), each the largest key of its own items, those that are not below
// the wanted-th largest of them (found to a bin), ascending, counted from first. No item of the others can be among the
// `wanted` largest, as so many tops are above theirs. Returns how many there are; -1: more than fit into `listed`, or
// too few tops. range: where keys of these items that can be chosen lie. Every thread takes part.
template <int kMost>
__device__ __forceinline__ int sieve_tops(const uint32_t* tops, int64_t first, int64_t last, int wanted,
                                          ChooseScratch& shared, int32_t (&listed)[kMost], uint2& range) {
  if (last - first < wanted || last - first <= kFewBlocks / kTopRun) return -1;
  constexpr int kHeld = 4, kRound = kHeld * kChooseThreads;  // neighbouring tops of a thread, which stay if all do
  uint32_t held[kHeld];
  const auto load = [&](int64_t t) {
#pragma unroll
    for (int n = 0; n < kHeld; ++n) held[n] = t + n < last ? tops[t + n] : 0;
  };
  const int64_t mine = first + threadIdx.x * kHeld;
  const bool once = last - first <= kRound;
  load(mine);
  const auto each = [&](const auto& visit) {
    for (int64_t t = mine; t < last; t += kRound) {
      if (!once) load(t);
#pragma unroll
      for (int n = 0; n < kHeld; ++n)
        if (t + n < last) visit(held[n]);
    }
  };
  uint32_t least = ~0u, most = 0;
  each([&](uint32_t top) { least = min(least, top), most = max(most, top); });
  for (int i = int(threadIdx.x); i < 2048; i += kChooseThreads) shared.bins[i] = 0;
  const KeyBins bins(range_together(least, most, shared.ranges));
  RunCounter counter(shared.bins);
  each([&](uint32_t top) { counter.add(bins.bin(top)); });
  counter.flush();
  __syncthreads();
  find_bin_together(shared.bins, wanted, shared.warps, shared.found);
  __syncthreads();
  range = make_uint2(bins.range_of(shared.found.bin).x, bins.high);
  int n = 0;
  for (int64_t base = first; base < last; base += kRound) {
    const int64_t t = base + threadIdx.x * kHeld;
    if (!once) load(t);
    unsigned take = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) take |= unsigned(t + i < last && held[i] >= range.x) << i;
    int at = n + shared.ranks.next(__popc(take), 0).x;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!(take >> i & 1)) continue;
      if (at < kMost) listed[at] = int32_t(t + i - first);
      ++at;
    }
    n += shared.ranks.total.x;
  }
  __syncthreads();
  return n <= kMost ? n : -1;
}

}  // namespace longkv::card
