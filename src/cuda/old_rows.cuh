// Where encoded rows (cuda/old.h) have their codes and grids, and a lane's share of them in shared memory.
#pragma once

#include "cuda/attend_heads.cuh"
#include "cuda/old.h"

namespace longkv::card {

// kBits: 0 is f16.
template <int kBits>
struct OldFormat {
  static constexpr KvType kType = kBits == 2 ? KvType::kKivi2 : kBits == 4 ? KvType::kKivi4 : KvType::kF16;
  static constexpr int kLevels = (1 << kBits) - 1;
  static constexpr int kPerWord = kBits == 0 ? 2 : 32 / kBits;  // channels

  // Where a channel of K has its code in its word.
  static __device__ __forceinline__ int shift(int c) {
    return kBits == 4 ? c % 8 / 2 * 4 + c % 2 * 16 : c % 8 / 2 * 2 + c % 2 * 8 + c / 8 % 2 * 16;
  }
  // Row r of a step, channel c.
  static __device__ __forceinline__ float key_code(const uint8_t* step, int r, int c, int width) {
    const uint32_t word = reinterpret_cast<const uint32_t*>(step)[(r * width + c) / kPerWord];
    return float(word >> shift(c) & kLevels);
  }
  // Words of V that a lane has of a tile of 16 rows, and how many of them lie side by side.
  static LONGKV_ON_BOTH constexpr int value_words(int dim) { return dim / 64 * kBits; }
  static LONGKV_ON_BOTH constexpr int value_run(int dim) { return value_words(dim) < 4 ? value_words(dim) : 4; }
  struct ValuePlace {
    int word, shift;
  };
  static __device__ __forceinline__ ValuePlace value_place(int r, int c, int dim) {
    const int words = value_words(dim), run = value_run(dim), group = c / 32, in_group = c % 32;
    const int lane = in_group / 4 * 4 + r % 8 / 2, word = r % 16 / 8 * (words / 2) + (kBits == 4 ? group : group / 2);
    const int at = (kBits == 4 ? 0 : group % 2 * 4) + in_group % 4;
    return {(r / 16 * words + word / run * run) * 32 + lane * run + word % run, kBits * at + r % 2 * 16};
  }
  // Of row r and a group of channels: the half that is its scale; its minimum lies 16 * groups further.
  static __device__ __forceinline__ int value_grid(int r, int group, int groups) {
    return r / 16 * 32 * groups + (r % 16 / 2 * groups + group) * 2 + r % 2;
  }
  static __device__ __forceinline__ float half_at(const uint8_t* step, int64_t i) {
    return __half2float(reinterpret_cast<const __half*>(step)[i]);
  }
  static __device__ __forceinline__ float key(const uint8_t* step, int r, int c, int kept) {
    if constexpr (kBits == 0) return half_at(step, r * kept + c);
    const uint8_t* grid = step + 4 * kBits * kept;
    return key_code(step, r, c, kept) * half_at(grid, c) + half_at(grid, kept + c);
  }
  static __device__ __forceinline__ float value(const uint8_t* step, int r, int c, int dim) {
    if constexpr (kBits == 0) return half_at(step, r * dim + c);
    const uint8_t* grid = step + 4 * kBits * dim;
    const ValuePlace place = value_place(r, c, dim);
    const int at = value_grid(r, c / 32, dim / 32);
    const auto code = float(reinterpret_cast<const uint32_t*>(step)[place.word] >> place.shift & kLevels);
    return code * half_at(grid, at) + half_at(grid, at + dim / 2);
  }
};

// A lane's words of a tile of V.
template <int kWords>
__device__ __forceinline__ void load_value_words(uint32_t (&to)[kWords], const uint32_t* tile, int lane) {
  constexpr int kRun = kWords < 4 ? kWords : 4;
#pragma unroll
  for (int i = 0; i < kWords; i += kRun) {
    uint32_t run[kRun];
    load_chunks<kRun * 4>(run, tile + i * 32 + lane * kRun, kRun * 4);
#pragma unroll
    for (int n = 0; n < kRun; ++n) to[i + n] = run[n];
  }
}

}  // namespace longkv::card
