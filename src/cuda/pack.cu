// GGUF rows to the planes of cuda/matrix.h. One thread takes one group of 32 values.
#include <cuda_runtime.h>

#include "cuda/launch.cuh"
#include "cuda/ops.h"
#include "cuda/planes.cuh"
#include "quant/block_formats.h"

namespace longkv::card {

namespace {

__device__ float half_at(const f16_t& h) { return __half2float(__ushort_as_half(h.bits)); }

// What a group holds: unsigned quants (signed for q8_0; table indices for iq4), scale and minimum of each half.
struct Group {
  uint8_t q[32];
  float scale[2];
  float min[2];
};

__device__ void nibbles(const uint8_t* qs, Group& g) {
  for (int i = 0; i < 16; ++i) g.q[i] = qs[i] & 15, g.q[16 + i] = qs[i] >> 4;
}
__device__ void fifth_bits(const uint8_t* qh, Group& g) {
  for (int i = 0; i < 32; ++i) g.q[i] |= ((qh[i / 8] >> (i % 8)) & 1) << 4;
}
__device__ void read(const BlockQ4_0& b, int, Group& g) {
  nibbles(b.qs, g);
  g.scale[0] = half_at(b.d);
}
__device__ void read(const BlockIQ4_NL& b, int, Group& g) {
  nibbles(b.qs, g);
  g.scale[0] = half_at(b.d);
}
__device__ void read(const BlockQ4_1& b, int, Group& g) {
  nibbles(b.qs, g);
  g.scale[0] = half_at(b.d), g.min[0] = half_at(b.m);
}
__device__ void read(const BlockQ5_0& b, int, Group& g) {
  nibbles(b.qs, g);
  fifth_bits(b.qh, g);
  g.scale[0] = half_at(b.d);
}
__device__ void read(const BlockQ5_1& b, int, Group& g) {
  nibbles(b.qs, g);
  fifth_bits(b.qh, g);
  g.scale[0] = half_at(b.d), g.min[0] = half_at(b.m);
}
__device__ void read(const BlockQ8_0& b, int, Group& g) {
  for (int i = 0; i < 32; ++i) g.q[i] = uint8_t(b.qs[i]);
  g.scale[0] = half_at(b.d);
}
__device__ void read(const BlockQ2_K& b, int group, Group& g) {
  const int h = group / 4, s = group % 4;
  for (int l = 0; l < 32; ++l) g.q[l] = (b.qs[32 * h + l] >> (2 * s)) & 3;
  for (int i = 0; i < 2; ++i) {
    const int code = b.scales[2 * group + i];
    g.scale[i] = half_at(b.d) * float(code & 15);
    g.min[i] = -half_at(b.dmin) * float(code >> 4);
  }
}
__device__ void read(const BlockQ3_K& b, int group, Group& g) {
  const int h = group / 4, s = group % 4;
  for (int l = 0; l < 32; ++l) g.q[l] = ((b.qs[32 * h + l] >> (2 * s)) & 3) | (((b.hmask[l] >> group) & 1) << 2);
  for (int i = 0; i < 2; ++i) {
    const int n = 2 * group + i;
    const int low = n < 8 ? b.scales[n] & 15 : b.scales[n - 8] >> 4;
    const int high = (b.scales[8 + n % 4] >> (2 * (n / 4))) & 3;
    g.scale[i] = half_at(b.d) * float((low | (high << 4)) - 32);
  }
}
// Scale and minimum of q4_K and q5_K; unpack_q4_K_scales says where their bits lie.
__device__ void scales_q4_K(const uint8_t* packed, int group, float d, float dmin, Group& g) {
  const int k = group % 4;
  int scale = packed[k] & 63, min = packed[4 + k] & 63;
  if (group >= 4) {
    scale = (packed[8 + k] & 15) | ((packed[k] >> 6) << 4);
    min = (packed[8 + k] >> 4) | ((packed[4 + k] >> 6) << 4);
  }
  g.scale[0] = d * float(scale);
  g.min[0] = -dmin * float(min);
}
__device__ void read(const BlockQ4_K& b, int group, Group& g) {
  for (int l = 0; l < 32; ++l) g.q[l] = (b.qs[32 * (group / 2) + l] >> (4 * (group % 2))) & 15;
  scales_q4_K(b.scales, group, half_at(b.d), half_at(b.dmin), g);
}
__device__ void read(const BlockQ5_K& b, int group, Group& g) {
  for (int l = 0; l < 32; ++l)
    g.q[l] = ((b.qs[32 * (group / 2) + l] >> (4 * (group % 2))) & 15) | (((b.qh[l] >> group) & 1) << 4);
  scales_q4_K(b.scales, group, half_at(b.d), half_at(b.dmin), g);
}
__device__ void read(const BlockQ6_K& b, int group, Group& g) {
  const int h = group / 4, s = group % 4;
  for (int l = 0; l < 32; ++l) {
    const int low = b.ql[64 * h + 32 * (s & 1) + l] >> (s < 2 ? 0 : 4) & 15;
    g.q[l] = low | (((b.qh[32 * h + l] >> (2 * s)) & 3) << 4);
  }
  for (int i = 0; i < 2; ++i) g.scale[i] = half_at(b.d) * float(b.scales[2 * group + i]);
}
__device__ void read(const BlockIQ4_XS& b, int group, Group& g) {
  nibbles(b.qs + 16 * group, g);
  const unsigned high = (unsigned(b.scales_h[0]) | unsigned(b.scales_h[1]) << 8) >> (2 * group) & 3u;
  const unsigned low = (b.scales_l[group / 2] >> (4 * (group & 1))) & 15u;
  g.scale[0] = half_at(b.d) * float(int(low | (high << 4)) - 32);
}

// Largest magnitude that scales of a super-block reach, for the row's power of two.
template <class Block>
struct ScaleLimit;
template <>
struct ScaleLimit<BlockQ2_K> {
  static constexpr float kValue = 15;
};
template <>
struct ScaleLimit<BlockQ3_K> {
  static constexpr float kValue = 32;
};
template <>
struct ScaleLimit<BlockQ4_K> {
  static constexpr float kValue = 63;
};
template <>
struct ScaleLimit<BlockQ5_K> {
  static constexpr float kValue = 63;
};
template <>
struct ScaleLimit<BlockQ6_K> {
  static constexpr float kValue = 128;
};
template <>
struct ScaleLimit<BlockIQ4_XS> {
  static constexpr float kValue = 32;
};

// row_scale[r] = 2^k just above the largest scale of the row. One warp a row.
template <class Block>
__global__ void row_scales(const uint8_t* raw, int64_t row_bytes, int64_t blocks, int64_t n, float* row_scale) {
  const int64_t r = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (r >= n) return;
  const auto* row = reinterpret_cast<const Block*>(raw + r * row_bytes);
  float top = 0;
  for (int64_t b = threadIdx.x % 32; b < blocks; b += 32) top = fmaxf(top, fabsf(half_at(row[b].d)));
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  if (threadIdx.x % 32 == 0) row_scale[r] = top > 0 ? exp2f(ceilf(log2f(top * ScaleLimit<Block>::kValue))) : 1.0f;
}

// Group `at` of row r of a matrix as it lies in a file.
template <class Block, int kBlockGroups>
struct FileRows {
  const uint8_t* raw;
  int64_t row_bytes;
  __device__ void get(int64_t r, int64_t at, Group& g) const {
    read(reinterpret_cast<const Block*>(raw + r * row_bytes)[at / kBlockGroups], int(at % kBlockGroups), g);
  }
};

// The same of the form in which eight rows lie side by side (ops/packed_rows.h). Its parts are whole words.
template <class Block>
struct PackedRows {
  const uint8_t* packed;
  int64_t row_bytes;
  __device__ void get(int64_t r, int64_t at, Group& g) const {
    const int in_eight = int(r % 8);
    const uint8_t* from = packed + (r - in_eight) * row_bytes + at * 8 * int64_t(sizeof(Block));
    Block b;
    b.d.bits = reinterpret_cast<const uint16_t*>(from)[in_eight];
    from += 16;
    if constexpr (requires { b.m; }) {
      b.m.bits = reinterpret_cast<const uint16_t*>(from)[in_eight];
      from += 16;
    }
    for (int j = 0; j < 4; ++j, from += 32) {
      const uint32_t word = reinterpret_cast<const uint32_t*>(from)[in_eight];
      for (int i = 0; i < 4; ++i) b.qs[4 * j + i] = uint8_t(word >> (8 * i));
    }
    if constexpr (requires { b.qh; }) {
      const uint32_t bits = reinterpret_cast<const uint32_t*>(from)[in_eight];
      uint32_t file = 0;  // bit v: the fifth bit of value v
      for (int v = 0; v < 32; ++v) file |= (bits >> (8 * (v % 4) + v / 4) & 1) << v;
      for (int i = 0; i < 4; ++i) b.qh[i] = uint8_t(file >> (8 * i));
    }
    read(b, 0, g);
  }
};

template <TensorType kType, class Source>
__global__ void pack_groups(Source source, int64_t groups_per_row, int64_t n, uint8_t* low, uint8_t* high,
                            uint8_t* scale, const float* row_scale) {
  using T = PlaneTraits<kType>;
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n * groups_per_row) return;
  const int64_t r = i / groups_per_row;
  Group g{};
  source.get(r, i % groups_per_row, g);
  uint32_t l[T::kLowWords] = {};
  uint32_t h[T::kHighWords > 0 ? T::kHighWords : 1] = {};
  for (int v = 0; v < 32; ++v) {
    const uint32_t q = g.q[v];
    const int word = v / 4, byte = v % 4;  // as PlaneGroup::word() gives them
    if constexpr (T::kBits == 8) {
      l[word] |= q << (8 * byte);
    } else if constexpr (T::kMode == PlaneMode::kTable) {
      l[v / 8] |= q << (4 * (v % 8));
    } else if constexpr (T::kBits >= 4) {
      l[word % 4] |= (q & 15) << (8 * byte + (word < 4 ? 0 : 4));
    } else {
      l[word / 4] |= (q & 3) << (8 * byte + 2 * (word % 4));
    }
    if constexpr (T::kBits == 3) h[0] |= (q >> 2) << (8 * byte + word);
    if constexpr (T::kBits == 5) h[0] |= (q >> 4) << (8 * byte + word);
    if constexpr (T::kBits == 6) h[word / 4] |= (q >> 4) << (8 * byte + 2 * (word % 4));
  }
  for (int k = 0; k < T::kLowWords; ++k) reinterpret_cast<uint32_t*>(low)[i * T::kLowWords + k] = l[k];
  for (int k = 0; k < T::kHighWords; ++k) reinterpret_cast<uint32_t*>(high)[i * T::kHighWords + k] = h[k];
  const float inverse = row_scale != nullptr ? 1.0f / row_scale[r] : 1.0f;
  auto* s = reinterpret_cast<__half*>(scale) + i * T::kHalves;
  for (int k = 0; k < T::kScales; ++k) {
    s[k] = __float2half_rn(g.scale[k] * inverse);
    if constexpr (T::kMode == PlaneMode::kMin) s[T::kScales + k] = __float2half_rn(g.min[k] * inverse);
  }
}

template <TensorType kType, class Source>
Status pack_from(const CardMatrix& m, const Source& source, int64_t first, int64_t n, const float* row_scale,
                 CardStreamHandle stream) {
  using T = PlaneTraits<kType>;
  const int64_t per_row = m.cols / 32, start = first * per_row;
  pack_groups<kType><<<unsigned((n * per_row + 255) / 256), 256, 0, stream>>>(
      source, per_row, n, const_cast<uint8_t*>(m.low) + start * T::kLowWords * 4,
      const_cast<uint8_t*>(m.high) + start * T::kHighWords * 4, const_cast<uint8_t*>(m.scale) + start * T::kHalves * 2,
      row_scale);
  return launched("pack_groups");
}

template <TensorType kType, class Block, int kBlockGroups>
Status pack(const CardMatrix& m, const uint8_t* raw, int64_t raw_row_bytes, int64_t first, int64_t n,
            CardStreamHandle stream) {
  float* row_scale = nullptr;
  if constexpr (kBlockGroups > 1) {
    row_scale = const_cast<float*>(m.row_scale) + first;
    row_scales<Block>
        <<<unsigned((n + 7) / 8), 256, 0, stream>>>(raw, raw_row_bytes, m.cols / 32 / kBlockGroups, n, row_scale);
    LONGKV_TRY(launched("row_scales"));
  }
  return pack_from<kType>(m, FileRows<Block, kBlockGroups>{raw, raw_row_bytes}, first, n, row_scale, stream);
}

}  // namespace

Status pack_rows(const CardMatrix& m, const uint8_t* raw, int64_t raw_row_bytes, int64_t first, int64_t n,
                 CardStreamHandle stream) {
  switch (m.type) {
    case TensorType::kF32:
    case TensorType::kF16:
    case TensorType::kBF16:
      return cuda_status(cudaMemcpyAsync(const_cast<uint8_t*>(m.low) + first * raw_row_bytes, raw,
                                         size_t(n * raw_row_bytes), cudaMemcpyDeviceToDevice, stream),
                         "copying a float matrix");
#define LONGKV_PACK(type, block, groups) \
  case TensorType::type: return pack<TensorType::type, block, groups>(m, raw, raw_row_bytes, first, n, stream)
      LONGKV_PACK(kQ4_0, BlockQ4_0, 1);
      LONGKV_PACK(kQ4_1, BlockQ4_1, 1);
      LONGKV_PACK(kQ5_0, BlockQ5_0, 1);
      LONGKV_PACK(kQ5_1, BlockQ5_1, 1);
      LONGKV_PACK(kQ8_0, BlockQ8_0, 1);
      LONGKV_PACK(kIQ4_NL, BlockIQ4_NL, 1);
      LONGKV_PACK(kQ2_K, BlockQ2_K, 8);
      LONGKV_PACK(kQ3_K, BlockQ3_K, 8);
      LONGKV_PACK(kQ4_K, BlockQ4_K, 8);
      LONGKV_PACK(kQ5_K, BlockQ5_K, 8);
      LONGKV_PACK(kQ6_K, BlockQ6_K, 8);
      LONGKV_PACK(kIQ4_XS, BlockIQ4_XS, 8);
#undef LONGKV_PACK
  }
  return Status(Code::kInternal, "pack_rows: unknown type");
}

Status pack_eights(const CardMatrix& m, const uint8_t* packed, int64_t raw_row_bytes, int64_t first, int64_t n,
                   CardStreamHandle stream) {
#define LONGKV_PACK(type, block) \
  case TensorType::type:         \
    return pack_from<TensorType::type>(m, PackedRows<block>{packed, raw_row_bytes}, first, n, nullptr, stream)
  switch (m.type) {
    LONGKV_PACK(kQ4_0, BlockQ4_0);
    LONGKV_PACK(kQ4_1, BlockQ4_1);
    LONGKV_PACK(kQ5_0, BlockQ5_0);
    LONGKV_PACK(kQ5_1, BlockQ5_1);
    default: return Status(Code::kInternal, "pack_eights: a type that is never packed");
  }
#undef LONGKV_PACK
}

}  // namespace longkv::card
