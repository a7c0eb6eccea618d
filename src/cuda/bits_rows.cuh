// Where the one-bit index (cuda/bits.h) has what. What a warp scans at a time is a chunk of 64 tokens; of a chunk, for
// dim channels in groups of 32:
//   codes       32-bit words [tile pairs 2][words of a lane dim / 128][lane 32][tile of the pair 2][row g, g + 8], so
//               that a lane's words lie side by side; with 64 channels two lanes share a word, which holds both
//               lanes' bits in the halves of its bytes
//   a word      bit p of byte j: channel 32 G + 8 c + 4 (p % 2) + j of group G = p / 2, c = lane % 4
//   magnitudes  halves [tile 4][g 8][row g, g + 8][group], each times 2^(3 - 2 (G % 4)): what the bit's place is worth
//               comes off the sums that way
#pragma once

#include <cuda_fp16.h>

#include "cuda/bits.h"
#include "cuda/launch.cuh"

namespace longkv::card {

// In-place Hadamard transform of the row whose channel 32 j + lane is x[j]; kValues: a power of two.
template <int kValues>
__device__ __forceinline__ void hadamard(float (&x)[kValues], int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      const float other = __shfl_xor_sync(kAllLanes, x[j], step);
      x[j] = lane & step ? other - x[j] : x[j] + other;
    }
  }
#pragma unroll
  for (int step = 1; step < kValues; step *= 2) {
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      if (j & step) continue;
      const float a = x[j], b = x[j + step];
      x[j] = a + b;
      x[j + step] = a - b;
    }
  }
  const float norm = rsqrtf(float(32 * kValues));
#pragma unroll
  for (int j = 0; j < kValues; ++j) x[j] *= norm;
}

}  // namespace longkv::card
