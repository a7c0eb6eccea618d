// Reading the planes of a quantised matrix (cuda/matrix.h) in registers: 32 values as eight words of four bytes, ready
// for integer dot products.
//
// Order inside a group, chosen so that every word is unpacked by a shift and a mask:
//   4-bit plane, word j < 4:  low nibbles hold values 4j .. 4j+3, high nibbles values 16+4j .. 16+4j+3
//   by table, word j < 4:     nibble k holds value 8j + k
//   2-bit plane, word i < 2:  bits 8b + 2j hold value 16i + 4j + b
//   1-bit plane, one word:    bit 8b + j holds value 4j + b
//   8-bit plane:              values in order, signed
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "quant/tensor_type.h"

namespace longkv::card {

enum class PlaneMode { kZero, kMin, kTable };

template <int kBits_, int kGroup_, PlaneMode kMode_, int kZero_>
struct PlaneTraitsBase {
  static constexpr int kBits = kBits_;
  static constexpr int kGroup = kGroup_;  // values that share a scale
  static constexpr PlaneMode kMode = kMode_;
  static constexpr int kZero = kZero_;
  static constexpr int kScales = 32 / kGroup_;
  static constexpr int kHalves = kScales * (kMode_ == PlaneMode::kMin ? 2 : 1);
  static constexpr int kLowWords = kBits_ == 8 ? 8 : kBits_ >= 4 ? 4 : 2;
  static constexpr int kHighWords = kBits_ == 6 ? 2 : (kBits_ == 5 || kBits_ == 3) ? 1 : 0;
};

template <TensorType kType>
struct PlaneTraits;
template <>
struct PlaneTraits<TensorType::kQ4_0> : PlaneTraitsBase<4, 32, PlaneMode::kZero, 8> {};
template <>
struct PlaneTraits<TensorType::kQ4_1> : PlaneTraitsBase<4, 32, PlaneMode::kMin, 0> {};
template <>
struct PlaneTraits<TensorType::kQ5_0> : PlaneTraitsBase<5, 32, PlaneMode::kZero, 16> {};
template <>
struct PlaneTraits<TensorType::kQ5_1> : PlaneTraitsBase<5, 32, PlaneMode::kMin, 0> {};
template <>
struct PlaneTraits<TensorType::kQ8_0> : PlaneTraitsBase<8, 32, PlaneMode::kZero, 0> {};
template <>
struct PlaneTraits<TensorType::kIQ4_NL> : PlaneTraitsBase<4, 32, PlaneMode::kTable, 0> {};
template <>
struct PlaneTraits<TensorType::kQ2_K> : PlaneTraitsBase<2, 16, PlaneMode::kMin, 0> {};
template <>
struct PlaneTraits<TensorType::kQ3_K> : PlaneTraitsBase<3, 16, PlaneMode::kZero, 4> {};
template <>
struct PlaneTraits<TensorType::kQ4_K> : PlaneTraits<TensorType::kQ4_1> {};
template <>
struct PlaneTraits<TensorType::kQ5_K> : PlaneTraits<TensorType::kQ5_1> {};
template <>
struct PlaneTraits<TensorType::kQ6_K> : PlaneTraitsBase<6, 16, PlaneMode::kZero, 32> {};
template <>
struct PlaneTraits<TensorType::kIQ4_XS> : PlaneTraits<TensorType::kIQ4_NL> {};

// Loads that are used once: they pass the first cache, which then keeps what is shared (activations).
__device__ __forceinline__ uint4 load_once16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 load_once8(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ uint32_t load_once4(const void* p) {
  uint32_t v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

// One group of one row as it lies in memory.
template <class T>
struct PlaneGroup {
  uint32_t low[T::kLowWords];
  uint32_t high[T::kHighWords > 0 ? T::kHighWords : 1];
  __half scale[T::kHalves];

  __device__ __forceinline__ void load(const uint8_t* low_plane, const uint8_t* high_plane, const uint8_t* scale_plane,
                                       int64_t group) {
    const uint8_t* p = low_plane + group * (T::kLowWords * 4);
    if constexpr (T::kLowWords == 2) {
      const uint2 v = load_once8(p);
      low[0] = v.x, low[1] = v.y;
    } else {
#pragma unroll
      for (int i = 0; i < T::kLowWords / 4; ++i) {
        const uint4 v = load_once16(p + 16 * i);
        low[4 * i] = v.x, low[4 * i + 1] = v.y, low[4 * i + 2] = v.z, low[4 * i + 3] = v.w;
      }
    }
    if constexpr (T::kHighWords == 1) high[0] = load_once4(high_plane + group * 4);
    if constexpr (T::kHighWords == 2) {
      const uint2 v = load_once8(high_plane + group * 8);
      high[0] = v.x, high[1] = v.y;
    }
    const uint8_t* s = scale_plane + group * (T::kHalves * 2);
    if constexpr (T::kHalves == 1) {
      scale[0] = __ldg(reinterpret_cast<const __half*>(s));
    } else {
#pragma unroll
      for (int i = 0; i < T::kHalves; i += 2) {
        const __half2 h = __ldg(reinterpret_cast<const __half2*>(s) + i / 2);
        scale[i] = __low2half(h), scale[i + 1] = __high2half(h);
      }
    }
  }

  // Values 4j .. 4j+3 as bytes: q, or the signed value of tables and of 8 bits.
  __device__ __forceinline__ uint32_t word(int j) const {
    uint32_t v;
    if constexpr (T::kBits == 8) {
      v = low[j];
    } else if constexpr (T::kMode == PlaneMode::kTable) {
      // The 16 levels in four words; a permute looks four nibbles up in eight of them.
      const uint32_t nibbles = low[j / 2] >> (16 * (j % 2));
      const uint32_t below = __byte_perm(0xbfad9881u, 0xf6eaddcfu, nibbles & 0x7777u);
      const uint32_t above = __byte_perm(0x26190d01u, 0x71594535u, nibbles & 0x7777u);
      v = __byte_perm(below, above, 0x3210u | ((nibbles & 0x8888u) >> 1));
    } else if constexpr (T::kBits >= 4) {
      v = (j < 4 ? low[j] : low[j - 4] >> 4) & 0x0f0f0f0fu;
    } else {
      v = (low[j / 4] >> (2 * (j % 4))) & 0x03030303u;
    }
    if constexpr (T::kBits == 3) v |= ((high[0] >> j) & 0x01010101u) << 2;
    if constexpr (T::kBits == 5) v |= ((high[0] >> j) & 0x01010101u) << 4;
    if constexpr (T::kBits == 6) v |= ((high[j / 4] >> (2 * (j % 4))) & 0x03030303u) << 4;
    return v;
  }
  // Product with 32 activations: x as eight words, s its scale and its scaled sums (CardRow).
  __device__ __forceinline__ float dot(const uint32_t (&x)[8], const float4& s) const {
    int part[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; ++j) part[j / 4] = __dp4a(int(word(j)), int(x[j]), part[j / 4]);
    const auto scaled = [&](int p, float product, float total) {
      if constexpr (T::kMode == PlaneMode::kMin) {
        return scale_of(p) * product + min_of(p) * total;
      } else {
        return scale_of(p) * (product - float(T::kZero) * total);
      }
    };
    if constexpr (T::kScales == 1) {
      return scaled(0, s.x * float(part[0] + part[1]), s.y + s.z);
    } else {
      return scaled(0, s.x * float(part[0]), s.y) + scaled(1, s.x * float(part[1]), s.z);
    }
  }
  __device__ __forceinline__ float scale_of(int part) const { return __half2float(scale[part]); }
  __device__ __forceinline__ float min_of(int part) const { return __half2float(scale[T::kScales + part]); }
};

}  // namespace longkv::card

// Calls fn.template operator()<TensorType>() for the run-time type of a quantised matrix.
#define LONGKV_FOR_PLANE_TYPE(type, call)                \
  switch (type) {                                        \
    case TensorType::kQ4_0: call(TensorType::kQ4_0);     \
    case TensorType::kQ4_1: call(TensorType::kQ4_1);     \
    case TensorType::kQ5_0: call(TensorType::kQ5_0);     \
    case TensorType::kQ5_1: call(TensorType::kQ5_1);     \
    case TensorType::kQ8_0: call(TensorType::kQ8_0);     \
    case TensorType::kIQ4_NL: call(TensorType::kIQ4_NL); \
    case TensorType::kQ2_K: call(TensorType::kQ2_K);     \
    case TensorType::kQ3_K: call(TensorType::kQ3_K);     \
    case TensorType::kQ4_K: call(TensorType::kQ4_1);     \
    case TensorType::kQ5_K: call(TensorType::kQ5_1);     \
    case TensorType::kQ6_K: call(TensorType::kQ6_K);     \
    case TensorType::kIQ4_XS: call(TensorType::kIQ4_NL); \
    default: break;                                      \
  }
