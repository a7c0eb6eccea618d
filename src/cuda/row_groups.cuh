// Writing rows of activations for products at decode (CardRow of cuda/ops.h).
#pragma once

#include "cuda/launch.cuh"
#include "cuda/ops.h"

namespace longkv::card {

// A warp's 32 values as integers with their scale; lane i holds value i of group g.
__device__ __forceinline__ void store_group(float v, int64_t g, int64_t groups, int lane, CardRow out) {
  const float top = warp_max(fabsf(v));
  const float scale = top / 127.0f;
  const int q = top > 0.0f ? __float2int_rn(v / scale) : 0;
  float sum = float(q);
#pragma unroll
  for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);  // of 16 lanes
  const float upper = __shfl_sync(kAllLanes, sum, 16);
  out.q[(lane / 16) * groups * 16 + g * 16 + lane % 16] = int8_t(q);
  if (lane == 0) reinterpret_cast<float4*>(out.scale)[g] = make_float4(scale, scale * sum, scale * upper, 0.0f);
}

}  // namespace longkv::card
