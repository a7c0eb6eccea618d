// Copies to shared memory that go on while a kernel computes.
#pragma once

#include <cstdint>

namespace longkv::card {

// 16 bytes, which belong to the group that the next commit_copies() ends.
__device__ __forceinline__ void copy_ahead(void* to, const void* from) {
  const auto at = unsigned(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(at), "l"(from));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
// Until all of this thread's groups but the last kBehind are there.
template <int kBehind>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kBehind) : "memory");
}

}  // namespace longkv::card
