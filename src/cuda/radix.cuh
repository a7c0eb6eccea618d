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

}  // namespace longkv::card
