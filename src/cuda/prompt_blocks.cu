#include <cuda_fp16.h>

#include "cuda/launch.cuh"
#include "cuda/prompt_blocks.h"
#include "cuda/radix.cuh"

namespace longkv::card {

namespace {

// A thread a channel, a block of threads a block of rows.
__global__ void pool_keys_kernel(CardKv kv, int64_t first_block, int64_t end, int64_t capacity, __half* means) {
  const int64_t block = first_block + blockIdx.x;
  const int head = int(blockIdx.y), c = int(threadIdx.x);
  const int64_t to = min(end, (block + 1) * kPromptBlock);
  const auto* keys = reinterpret_cast<const __half*>(kv.k) + head * kv.capacity * kv.dim + c;
  float sum = 0.0f;
  for (int64_t r = block * kPromptBlock; r < to; ++r) sum += __half2float(keys[r * kv.dim]);
  means[(head * capacity + block) * kv.dim + c] = __float2half_rn(sum / float(to - block * kPromptBlock));
}

__global__ void pool_queries_kernel(const __half* q, int64_t first, int64_t n, __half* means) {
  const int heads = int(gridDim.y), head = int(blockIdx.y), c = int(threadIdx.x), dim = int(blockDim.x);
  const int64_t block = first / kPromptBlock + blockIdx.x;
  const int64_t from = max(first, block * kPromptBlock), to = min(first + n, (block + 1) * kPromptBlock);
  float sum = 0.0f;
  for (int64_t r = from; r < to; ++r) sum += __half2float(q[((r - first) * heads + head) * dim + c]);
  means[(int64_t(head) * gridDim.x + blockIdx.x) * dim + c] = __float2half_rn(sum / float(to - from));
}

// A block of threads a list.
__global__ void __launch_bounds__(kChooseThreads)
    choose_kernel(const float* scores, int64_t stride, int64_t first_block, PromptLists lists, const int32_t* sizes) {
  __shared__ ChooseScratch scratch;
  const int64_t head = lists.heads.ids != nullptr ? lists.heads.ids[blockIdx.y] : int(blockIdx.y);
  const int64_t list = head * lists.query_blocks + blockIdx.x, own = first_block + blockIdx.x;
  const float* from = scores + list * stride;
  int32_t* out = lists.blocks + list * lists.most;
  const auto wanted = int(min(sizes != nullptr ? int64_t(sizes[head]) : lists.most, own + 1));
  const auto keys_of = [&](int64_t b, uint32_t(&keys)[kChooseRun]) {
    load_keys(from, stride, b, own + 1, keys);
#pragma unroll
    for (int i = 0; i < kChooseRun; ++i)
      if (b + i == own) keys[i] = ~0u;
  };
  choose_largest(0, own + 1, wanted, keys_of, scratch, [&](int rank, int64_t b) { out[rank] = int32_t(b); });
  if (threadIdx.x == 0) lists.count[list] = wanted;
}

}  // namespace

Status pool_keys(const CardKv& kv, int64_t first, int64_t n, int64_t capacity, half_t* means, CardStreamHandle stream) {
  if (n <= 0) return {};
  const dim3 grid(unsigned(prompt_blocks(first, n)), unsigned(kv.kv_heads));
  pool_keys_kernel<<<grid, unsigned(kv.dim), 0, stream>>>(kv, first / kPromptBlock, first + n, capacity,
                                                          reinterpret_cast<__half*>(means));
  return launched("pool_keys");
}

Status pool_queries(const half_t* q, int heads, int dim, int64_t first, int64_t n, half_t* means,
                    CardStreamHandle stream) {
  if (n <= 0) return {};
  const dim3 grid(unsigned(prompt_blocks(first, n)), unsigned(heads));
  pool_queries_kernel<<<grid, unsigned(dim), 0, stream>>>(reinterpret_cast<const __half*>(q), first, n,
                                                          reinterpret_cast<__half*>(means));
  return launched("pool_queries");
}

Status choose_prompt_blocks(const float* scores, int64_t stride, int heads, int64_t first, const PromptLists& lists,
                            const int32_t* sizes, CardStreamHandle stream) {
  const dim3 grid(unsigned(lists.query_blocks), unsigned(lists.heads.ids != nullptr ? lists.heads.count : heads));
  choose_kernel<<<grid, kChooseThreads, 0, stream>>>(scores, stride, first / kPromptBlock, lists, sizes);
  return launched("choose_prompt_blocks");
}

}  // namespace longkv::card
