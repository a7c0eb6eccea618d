// What every kernel file needs: the status of a launch, and sums over warps and blocks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/matrix.h"
#include "cuda/runtime.h"

namespace longkv::card {

inline Status launched(const char* kernel) { return cuda_status(cudaGetLastError(), kernel); }

// Kernels of a decoded token follow each other so closely that starting them counts. On cards from 9.0 on, such a
// kernel may start while the one before it ends: it calls wait_for_previous() before it reads what that one wrote or
// writes what that one reads, and let_next_start() as soon as it runs. Both do nothing in kernels that are launched
// otherwise. What the kernel before may have written must not be read through the read-only cache (__ldg).
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

bool cards_overlap_kernels();  // the present card can, and the build has code that does

// Every kernel launched so must call wait_for_previous(). shared_bytes: of shared memory that it does not declare.
template <class... Parameters, class... Arguments>
Status launch_close_with(const char* name, void (*kernel)(Parameters...), dim3 grid, unsigned threads, int shared_bytes,
                         CardStreamHandle stream, Arguments... arguments) {
  if (shared_bytes > 0) {  // with what the kernel declares it may exceed what needs no leave
    LONGKV_TRY(
        cuda_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), name));
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = size_t(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cards_overlap_kernels() ? 1 : 0;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name);
}
template <class... Parameters, class... Arguments>
Status launch_close(const char* name, void (*kernel)(Parameters...), dim3 grid, unsigned threads,
                    CardStreamHandle stream, Arguments... arguments) {
  return launch_close_with(name, kernel, grid, threads, 0, stream, arguments...);
}

constexpr unsigned kAllLanes = ~0u;

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(kAllLanes, v, step);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, step));
  return v;
}

// Sum over the block, known to every thread. `shared`: 32 floats that nobody else uses until the next barrier.
__device__ __forceinline__ float block_sum(float v, float* shared) {
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
  __syncthreads();
  v = threadIdx.x % 32 < (blockDim.x + 31) / 32 ? shared[threadIdx.x % 32] : 0.0f;
  return warp_sum(v);
}
// The largest, likewise.
__device__ __forceinline__ float block_max(float v, float* shared) {
  v = warp_max(v);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
  __syncthreads();
  v = threadIdx.x % 32 < (blockDim.x + 31) / 32 ? shared[threadIdx.x % 32] : -__builtin_huge_valf();
  return warp_max(v);
}

}  // namespace longkv::card
