// Reading encoded rows (cuda/old.h): eight channels of one row as products take them, or one channel.
#pragma once

#include "cuda/key_row.cuh"
#include "cuda/old.h"

namespace longkv::card {

// kBits: 0 is f16.
template <int kBits>
struct OldFormat {
  static constexpr KvType kType = kBits == 2 ? KvType::kKivi2 : kBits == 4 ? KvType::kKivi4 : KvType::kF16;
  static constexpr int kLevels = (1 << kBits) - 1;
  static constexpr int kPerWord = kBits == 0 ? 2 : 32 / kBits;  // channels

  // Where a channel's code lies in its word.
  static __device__ __forceinline__ int shift(int c) {
    return kBits == 4 ? c % 8 / 2 * 4 + c % 2 * 16 : c % 8 / 2 * 2 + c % 2 * 8 + c / 8 % 2 * 16;
  }
  // Row r of a step, channel c.
  static __device__ __forceinline__ float code(const uint8_t* step, int r, int c, int width) {
    const uint32_t word = reinterpret_cast<const uint32_t*>(step)[(r * width + c) / kPerWord];
    return float(word >> shift(c) & kLevels);
  }
  static __device__ __forceinline__ float half_at(const uint8_t* step, int64_t i) {
    return __half2float(reinterpret_cast<const __half*>(step)[i]);
  }
  static __device__ __forceinline__ float key(const uint8_t* step, int r, int c, int kept) {
    if constexpr (kBits == 0) return half_at(step, r * kept + c);
    const uint8_t* grid = step + 4 * kBits * kept;
    return code(step, r, c, kept) * half_at(grid, c) + half_at(grid, kept + c);
  }
  static __device__ __forceinline__ float value(const uint8_t* step, int r, int c, int dim) {
    if constexpr (kBits == 0) return half_at(step, r * dim + c);
    const uint8_t* grid = step + 4 * kBits * dim;
    const int at = r * (dim / 32) + c / 32;
    return code(step, r, c, dim) * half_at(grid, 2 * at) + half_at(grid, 2 * at + 1);
  }
};

// Codes of N neighbouring chunks of eight channels, in the widest words that a lane's share allows.
template <int kBits, int N>
struct OldCodes {
  uint32_t words[kBits == 0 ? 4 * N : kBits == 4 ? N : (N + 1) / 2];

  // `from`: the first chunk; `n` chunks of the N are there.
  __device__ __forceinline__ void load(const uint8_t* from, int n) {
    constexpr int kBytes = N * (kBits == 0 ? 16 : kBits);
    if (n == N) {
      if constexpr (kBytes % 16 == 0) {
#pragma unroll
        for (int i = 0; i < kBytes / 16; ++i) {
          const uint4 w = __ldcs(reinterpret_cast<const uint4*>(from) + i);
          words[4 * i] = w.x, words[4 * i + 1] = w.y, words[4 * i + 2] = w.z, words[4 * i + 3] = w.w;
        }
      } else if constexpr (kBytes % 8 == 0) {
        const uint2 w = __ldcs(reinterpret_cast<const uint2*>(from));
        words[0] = w.x, words[1] = w.y;
      } else if constexpr (kBytes % 4 == 0) {
        words[0] = __ldcs(reinterpret_cast<const uint32_t*>(from));
      } else {
        words[0] = __ldcs(reinterpret_cast<const uint16_t*>(from));
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i >= n) continue;
      if constexpr (kBits == 0) {
        const uint4 w = __ldcs(reinterpret_cast<const uint4*>(from) + i);
        words[4 * i] = w.x, words[4 * i + 1] = w.y, words[4 * i + 2] = w.z, words[4 * i + 3] = w.w;
      } else if constexpr (kBits == 4) {
        words[i] = __ldcs(reinterpret_cast<const uint32_t*>(from) + i);
      } else {
        const uint32_t half = __ldcs(reinterpret_cast<const uint16_t*>(from) + i);
        words[i / 2] = i % 2 == 0 ? half : words[i / 2] | half << 16;
      }
    }
  }
};

// Channels 2 j and 2 j + 1 of chunk i, as whole halves.
template <int kBits, int N>
__device__ __forceinline__ __half2 code_pair(const OldCodes<kBits, N>& codes, int i, int j) {
  uint32_t pair;  // 1024 + code
  if constexpr (kBits == 4) {
    pair = (codes.words[i] >> (4 * j) & 0x000f000fu) | 0x64006400u;
  } else {
    pair = __byte_perm(codes.words[i / 2] >> (2 * j) & 0x03030303u, 0x64646464u, i % 2 == 0 ? 0x4140 : 0x4342);
  }
  return __hsub2(bits_half2(pair), __half2half2(__ushort_as_half(0x6400)));
}

}  // namespace longkv::card
