// Copies to shared memory that go on while a kernel computes.
#pragma once

#include <cstdint>

namespace longkv::card {

__device__ __forceinline__ unsigned shared_place(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }
// 16 bytes to a place in shared memory, which belong to the group that the next commit_copies() ends.
__device__ __forceinline__ void copy_ahead(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void copy_ahead(void* to, const void* from) { copy_ahead(shared_place(to), from); }
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
// Until all of this thread's groups but the last kBehind are there.
template <int kBehind>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kBehind) : "memory");
}

// The line of 128 bytes there, to the card's cache.
__device__ __forceinline__ void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// What lies at a place in shared memory; not before what was awaited.
template <class Words>
__device__ __forceinline__ Words shared_words(unsigned at) {
  Words v;
  if constexpr (sizeof(Words) == 16) {
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
  } else if constexpr (sizeof(Words) == 8) {
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
  } else {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  }
  return v;
}

}  // namespace longkv::card
