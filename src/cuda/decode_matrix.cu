// Matrices to halves, for products of prompts. Four threads share a group of 32 values, so that stores are 16 bytes.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/launch.cuh"
#include "cuda/ops.h"
#include "cuda/planes.cuh"

namespace longkv::card {

namespace {

template <TensorType kType>
__global__ void decode_planes(const uint8_t* __restrict__ low, const uint8_t* __restrict__ high,
                              const uint8_t* __restrict__ scale, const float* __restrict__ row_scale,
                              int groups_per_row, int64_t first_group, int64_t n_groups, uint4* __restrict__ out) {
  using T = PlaneTraits<kType>;
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n_groups * 4) return;
  const int64_t group = first_group + i / 4;
  const int quarter = int(i % 4);  // values 8 * quarter ..
  PlaneGroup<T> g;
  g.load(low, high, scale, group);
  const float row = row_scale != nullptr ? row_scale[group / groups_per_row] : 1.0f;
  const int part = T::kScales == 1 ? 0 : quarter / 2;
  const float s = (part == 0 ? g.scale_of(0) : g.scale_of(T::kScales - 1)) * row;
  float min = 0.0f;
  if constexpr (T::kMode == PlaneMode::kMin) min = (part == 0 ? g.min_of(0) : g.min_of(T::kScales - 1)) * row;
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int j = 0; j < 8; ++j) {  // indices known to the compiler keep the group in registers
    if (j / 2 == quarter) words[j % 2] = g.word(j);
  }
  __align__(16) __half h[8];
#pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int q = int(int8_t(words[v / 4] >> (8 * (v % 4))));
    h[v] = __float2half_rn(s * float(q - T::kZero) + min);
  }
  out[i] = *reinterpret_cast<const uint4*>(h);
}

template <class Value>
__global__ void round_values(const Value* __restrict__ in, int64_t n, __half* __restrict__ out) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = __float2half_rn(float(in[i]));
}

template <TensorType kType>
Status run(const CardMatrix& m, int64_t first, int64_t n, half_t* out, CardStreamHandle stream) {
  const int64_t per_row = m.cols / 32, groups = n * per_row;
  decode_planes<kType><<<unsigned((groups * 4 + 255) / 256), 256, 0, stream>>>(
      m.low, m.high, m.scale, m.row_scale, int(per_row), first * per_row, groups, reinterpret_cast<uint4*>(out));
  return launched("decode_planes");
}

}  // namespace

Status decode_matrix(const CardMatrix& m, int64_t first, int64_t n, half_t* out, CardStreamHandle stream) {
  const int64_t values = n * m.cols, skip = first * m.cols;
  const auto blocks = unsigned((values + 255) / 256);
  auto* halves = reinterpret_cast<__half*>(out);
  if (m.type == TensorType::kF32) {
    round_values<<<blocks, 256, 0, stream>>>(reinterpret_cast<const float*>(m.low) + skip, values, halves);
    return launched("round_values");
  }
  if (m.type == TensorType::kF16) {
    return cuda_status(cudaMemcpyAsync(out, m.low + 2 * skip, size_t(values) * 2, cudaMemcpyDeviceToDevice, stream),
                       "copying a half matrix");
  }
  if (m.type == TensorType::kBF16) {
    round_values<<<blocks, 256, 0, stream>>>(reinterpret_cast<const __nv_bfloat16*>(m.low) + skip, values, halves);
    return launched("round_values");
  }
#define LONGKV_RUN(type) return run<type>(m, first, n, out, stream)
  LONGKV_FOR_PLANE_TYPE(m.type, LONGKV_RUN)
#undef LONGKV_RUN
  return Status(Code::kInternal, "decode_matrix: unknown type");
}

}  // namespace longkv::card
