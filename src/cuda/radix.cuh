// Pieces of choosing the k largest within one block of threads.
#pragma once

#include "cuda/launch.cuh"

namespace longkv::card {

// Ranks of a thread's items among those of the threads before it, for two kinds at once. Every thread of a block of
// 1024 calls next(). total: of the last call.
struct BlockRanks {
  int2 warps[32];
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
    if (lane == 31) warps[warp] = make_int2(upto, 0);
    __syncthreads();
    // Every warp adds the sums of all warps up itself: one barrier instead of two.
    int all = warps[lane].x;
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

struct ChooseScratch {
  int bins[2048];
  int warps[32];
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

// The `wanted` items of [begin, end) with the largest keys, in ascending order: put(rank, item). The k-th largest key
// is found 11, 11 and 10 bits at a time; of equal keys the first items win. There are at least `wanted` items. All
// threads of a block of kChooseThreads take part. load_run(at, keys) gives the keys of items [at, at + kChooseRun);
// those outside of [begin, end) may be anything.
template <class Load, class Put>
__device__ __forceinline__ void choose_largest(int64_t begin, int64_t end, int wanted, const Load& load_run,
                                               ChooseScratch& shared, const Put& put) {
  const int64_t origin = begin / kChooseRun * kChooseRun, step = int64_t(kChooseThreads) * kChooseRun;
  constexpr int kAhead = 4;  // runs whose loads start together
  // A bit each for items of [begin, end).
  const auto load = [&](int64_t at, uint32_t(&keys)[kChooseRun]) {
    if (at >= end) return 0u;
    load_run(at, keys);
    unsigned there = 0;
#pragma unroll
    for (int i = 0; i < kChooseRun; ++i) there |= unsigned(at + i >= begin && at + i < end) << i;
    return there;
  };
  uint32_t prefix = 0, mask = 0;
  for (int shift = 21, bits = 11; shift >= 0; bits = shift < 11 ? shift : 11, shift -= bits) {
    for (int i = int(threadIdx.x); i < 2048; i += kChooseThreads) shared.bins[i] = 0;
    __syncthreads();
    RunCounter runs(shared.bins);
    for (int64_t at = origin + threadIdx.x * kChooseRun; at < end; at += kAhead * step) {
      uint32_t keys[kAhead][kChooseRun];
      unsigned there[kAhead];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) there[n] = load(at + n * step, keys[n]);
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
#pragma unroll
        for (int i = 0; i < kChooseRun; ++i) {
          if ((there[n] >> i & 1) && (keys[n][i] & mask) == prefix)
            runs.add(int((keys[n][i] >> shift) & ((1u << bits) - 1)));
        }
      }
    }
    runs.flush();
    __syncthreads();
    find_bin_together(shared.bins, wanted, shared.warps, shared.found);
    __syncthreads();
    prefix |= uint32_t(shared.found.bin) << shift;
    mask |= ((1u << bits) - 1) << shift;
    wanted = shared.found.left;  // of the items with exactly this key, in the end
    if (shift == 0) break;
  }
  int chosen = 0, equal_before = 0;  // known to every thread
  uint32_t keys[kChooseRun], next[kChooseRun];
  unsigned there = load(origin + threadIdx.x * kChooseRun, keys);
  for (int64_t base = origin; base < end; base += step) {
    const int64_t at = base + threadIdx.x * kChooseRun;
    const unsigned there_next = load(at + step, next);  // on their way while these are ranked
    unsigned above = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < kChooseRun; ++i) {
      above |= unsigned(keys[i] > prefix) << i;
      equal |= unsigned(keys[i] == prefix) << i;
    }
    above &= there, equal &= there;
    const int2 before = shared.ranks.next(__popc(above), __popc(equal));
    int equal_rank = equal_before + before.y;
    // Ahead of this thread's items: those above, and of the equal ones as many as are taken.
    int rank = chosen + before.x + min(equal_rank, wanted) - min(equal_before, wanted);
#pragma unroll
    for (int i = 0; i < kChooseRun; ++i) {
      const bool is_equal = equal >> i & 1;
      const bool take = (above >> i & 1) || (is_equal && equal_rank < wanted);
      equal_rank += is_equal;
      if (take) put(rank++, at + i);
    }
    chosen += shared.ranks.total.x + min(equal_before + shared.ranks.total.y, wanted) - min(equal_before, wanted);
    equal_before += shared.ranks.total.y;
    there = there_next;
#pragma unroll
    for (int i = 0; i < kChooseRun; ++i) keys[i] = next[i];
  }
}

}  // namespace longkv::card
