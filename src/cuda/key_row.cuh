// One stored key, wherever its rows lie.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/kv.h"

namespace longkv::card {

struct KeyRow {
  KvType type;
  const uint8_t* values;
  const half_t* scales;
  __device__ __forceinline__ float at(int c) const {
    if (type == KvType::kF16) return __half2float(reinterpret_cast<const __half*>(values)[c]);
    if (type == KvType::kBf16) return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(values)[c]);
    return __half2float(__ushort_as_half(scales[c / 32])) * float(reinterpret_cast<const int8_t*>(values)[c]);
  }
};
__device__ __forceinline__ KeyRow key_row(const CardKv& kv, int head, int64_t position) {
  const int64_t row = head * kv.capacity + position;
  return {kv.type, kv.k + row * kv.dim * (kv.type == KvType::kQ8_0 ? 1 : 2), kv.k_scale + row * (kv.dim / 32)};
}
__device__ __forceinline__ KeyRow key_row(const BlockStore& s, int head, int64_t position) {
  const uint8_t* record = s.data + (head * s.blocks + position / s.block) * s.record;
  const int64_t row = position % s.block;
  return {s.type, record + row * (s.plane / s.block),
          reinterpret_cast<const half_t*>(record + 2 * s.plane + row * (s.scales / s.block))};
}

}  // namespace longkv::card
