// One stored row, wherever its layer's rows lie, and eight channels of one as products read them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/kv.h"

namespace longkv::card {

__device__ __forceinline__ float bfloat_of(half_t bits) { return __uint_as_float(uint32_t(bits) << 16); }

struct KeyRow {
  KvType type;
  const uint8_t* values;
  const half_t* scales;
  __device__ __forceinline__ float at(int c) const {
    if (type == KvType::kF16) return __half2float(reinterpret_cast<const __half*>(values)[c]);
    if (type == KvType::kBf16) return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(values)[c]);
    if (type == KvType::kFp8) {
      // The bits of an E4M3 are those of a half 2^8 times smaller, but for where the sign is.
      const uint32_t b = values[c];
      const auto half = half_t((b & 0x80) << 8 | (b & 0x7f) << 7);
      return __half2float(__ushort_as_half(half)) * 256.0f * bfloat_of(scales[0]);
    }
    const float scale = __half2float(__ushort_as_half(scales[c / 32]));
    if (type == KvType::kQ8_0) return scale * float(reinterpret_cast<const int8_t*>(values)[c]);
    const uint32_t word = reinterpret_cast<const uint32_t*>(values)[c / 8];
    return scale * float(int(word >> (c % 8 / 2 * 4 + c % 2 * 16) & 15) - 8);
  }
};
__device__ __forceinline__ KeyRow stored_row(const CardKv& kv, bool key, int head, int64_t position) {
  const int64_t row = head * kv.capacity + kv.place(position);
  return {kv.type, (key ? kv.k : kv.v) + row * value_bytes(kv.type, kv.dim),
          (key ? kv.k_scale : kv.v_scale) + row * scale_count(kv.type, kv.dim)};
}
__device__ __forceinline__ KeyRow key_row(const CardKv& kv, int head, int64_t position) {
  return stored_row(kv, true, head, position);
}
__device__ __forceinline__ KeyRow key_row(const BlockStore& s, int head, int64_t position) {
  const uint8_t* record = s.data + (head * s.blocks + position / s.block) * s.record;
  const int64_t row = position % s.block;
  return {s.type, record + row * (s.plane / s.block),
          reinterpret_cast<const half_t*>(record + 2 * s.plane + row * (s.scales / s.block))};
}

// Eight channels from channel 8 * chunk of a row, as they lie there; all loads of a tile start before the first is
// used. halves(): their values, two to a word (bfloat16s of rows of that type).
struct RawHalves {
  uint4 bits;
  __device__ __forceinline__ void load(const uint8_t* base, const half_t*, int64_t row, int dim, int chunk) {
    bits = __ldcs(reinterpret_cast<const uint4*>(base + (row * dim + chunk * 8) * 2));
  }
  __device__ __forceinline__ uint4 halves() const { return bits; }
};

__device__ __forceinline__ uint32_t half2_bits(__half2 h) { return *reinterpret_cast<const uint32_t*>(&h); }
__device__ __forceinline__ __half2 bits_half2(uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }

struct RawBytes {
  uint2 bits;
  half_t scale;
  __device__ __forceinline__ void load(const uint8_t* base, const half_t* scales, int64_t row, int dim, int chunk) {
    bits = __ldcs(reinterpret_cast<const uint2*>(base + row * dim + chunk * 8));
    scale = scales[row * (dim / 32) + chunk / 4];
  }
  __device__ __forceinline__ uint4 halves() const {
    const __half2 factor = __half2half2(__ushort_as_half(scale));
    // A byte below 0x64 is the half 1024 + byte; with the sign bit turned, 1152 less is the signed value.
    const __half2 offset = __half2half2(__ushort_as_half(0x6480));
    const uint32_t words[2] = {bits.x ^ 0x80808080u, bits.y ^ 0x80808080u};
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = __byte_perm(words[i / 2], 0x64646464u, i % 2 == 0 ? 0x4140 : 0x4342);
      out[i] = half2_bits(__hmul2(__hsub2(bits_half2(pair), offset), factor));
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
  }
};
struct RawNibbles {
  uint32_t bits;
  half_t scale;
  // N neighbouring chunks from a multiple of N on, in the widest words; N: 1, 2 or a multiple of 4.
  template <int N>
  static __device__ __forceinline__ void load_run(RawNibbles (&to)[N], const uint8_t* base, const half_t* scales,
                                                  int64_t row, int dim, int first) {
    const uint8_t* from = base + row * (dim / 2) + first * 4;
    if constexpr (N % 4 == 0) {
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        const uint4 w = __ldcs(reinterpret_cast<const uint4*>(from + i * 4));
        to[i].bits = w.x, to[i + 1].bits = w.y, to[i + 2].bits = w.z, to[i + 3].bits = w.w;
      }
    } else if constexpr (N == 2) {
      const uint2 w = __ldcs(reinterpret_cast<const uint2*>(from));
      to[0].bits = w.x, to[1].bits = w.y;
    } else {
      to[0].bits = __ldcs(reinterpret_cast<const uint32_t*>(from));
    }
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const half_t scale_of = scales[row * (dim / 32) + (first + i) / 4];
#pragma unroll
      for (int n = i; n < i + 4 && n < N; ++n) to[n].scale = scale_of;
    }
  }
  __device__ __forceinline__ void load(const uint8_t* base, const half_t* scales, int64_t row, int dim, int chunk) {
    bits = __ldcs(reinterpret_cast<const uint32_t*>(base + row * (dim / 2) + chunk * 4));
    scale = scales[row * (dim / 32) + chunk / 4];
  }
  __device__ __forceinline__ uint4 halves() const {
    const __half2 factor = __half2half2(__ushort_as_half(scale));
    const __half2 offset = __half2half2(__ushort_as_half(0x6408));  // 1032: the half 0x6400 + n is 1024 + n
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = (bits >> (4 * i) & 0x000f000fu) | 0x64006400u;
      out[i] = half2_bits(__hmul2(__hsub2(bits_half2(pair), offset), factor));
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
  }
};
// Without the row's scale, and 2^8 times smaller.
struct RawE4m3 {
  uint2 bits;
  __device__ __forceinline__ void load(const uint8_t* base, const half_t*, int64_t row, int dim, int chunk) {
    bits = __ldcs(reinterpret_cast<const uint2*>(base + row * dim + chunk * 8));
  }
  __device__ __forceinline__ uint4 halves() const {
    const uint32_t words[2] = {bits.x, bits.y};
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t high = __byte_perm(words[i / 2], 0, i % 2 == 0 ? 0x1404 : 0x3424);  // two bytes to upper halves
      out[i] = (high & 0x80008000u) | (high & 0x7f007f00u) >> 1;
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
  }
};
struct RawFp8 {
  RawE4m3 raw;
  half_t scale;
  __device__ __forceinline__ void load(const uint8_t* base, const half_t* scales, int64_t row, int dim, int chunk) {
    raw.load(base, scales, row, dim, chunk);
    scale = scales[row];
  }
  __device__ __forceinline__ uint4 halves() const {
    const __half2 factor = __half2half2(__float2half_rn(bfloat_of(scale) * 256.0f));
    const uint4 h = raw.halves();
    return make_uint4(half2_bits(__hmul2(bits_half2(h.x), factor)), half2_bits(__hmul2(bits_half2(h.y), factor)),
                      half2_bits(__hmul2(bits_half2(h.z), factor)), half2_bits(__hmul2(bits_half2(h.w), factor)));
  }
};

}  // namespace longkv::card
