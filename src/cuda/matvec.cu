// Matrix-vector products at decode. Bound by reading the matrix: every warp takes a few rows and streams them once.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/launch.cuh"
#include "cuda/ops.h"
#include "cuda/planes.cuh"

namespace longkv::card {

namespace {

constexpr int kWarps = 8;

// Rows of a warp share its loads of x.
template <TensorType kType, int kRows>
__global__ void __launch_bounds__(kWarps * 32)
    matvec_int8(const uint8_t* __restrict__ low, const uint8_t* __restrict__ high, const uint8_t* __restrict__ scale,
                const float* __restrict__ row_scale, int64_t rows, int groups, const uint4* xq, const float4* xs,
                const float* __restrict__ bias, bool accumulate, float* y) {
  using T = PlaneTraits<kType>;
  let_next_start();
  const int lane = threadIdx.x % 32;
  const int64_t first = (int64_t(blockIdx.x) * kWarps + threadIdx.x / 32) * kRows;
  if (first >= rows) return;
  int64_t base[kRows];
  float sum[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    base[r] = (first + r < rows ? first + r : rows - 1) * groups;
    sum[r] = 0.0f;
  }
  // The first groups of the matrix do not depend on the kernel before: they are on their way when x is ready.
  constexpr int kAhead = 2;
  PlaneGroup<T> ahead[kAhead][kRows];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int g = min(lane + 32 * i, groups - 1);
#pragma unroll
    for (int r = 0; r < kRows; ++r) ahead[i][r].load(low, high, scale, base[r] + g);
  }
  wait_for_previous();
  const auto multiply = [&](const PlaneGroup<T>(&w)[kRows], int g) {
    const uint4 x0 = xq[g], x1 = xq[groups + g];
    const float4 s = xs[g];
    const uint32_t x[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] += w[r].dot(x, s);
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (lane + 32 * i < groups) multiply(ahead[i], lane + 32 * i);
  }
#pragma unroll 4
  for (int g = lane + 32 * kAhead; g < groups; g += 32) {
    PlaneGroup<T> w[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) w[r].load(low, high, scale, base[r] + g);
    multiply(w, g);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float v = warp_sum(sum[r]);
    const int64_t row = first + r;
    if (lane == 0 && row < rows) {
      if (row_scale != nullptr) v *= row_scale[row];
      if (bias != nullptr) v += bias[row];
      y[row] = accumulate ? y[row] + v : v;
    }
  }
}

__device__ __forceinline__ void to_floats(uint4 v, const __half*, float out[8]) {
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&w[i]));
    out[2 * i] = f.x, out[2 * i + 1] = f.y;
  }
}
__device__ __forceinline__ void to_floats(uint4 v, const __nv_bfloat16*, float out[8]) {
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = __uint_as_float(w[i] << 16);
    out[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
  }
}

// Halves and bfloat16: eight values a load. cols: a multiple of 8.
template <class Value, int kRows>
__global__ void __launch_bounds__(kWarps * 32)
    matvec_half(const Value* __restrict__ m, int64_t rows, int64_t cols, const float* __restrict__ x,
                const float* __restrict__ bias, bool accumulate, float* y) {
  const int lane = threadIdx.x % 32;
  const int64_t first = (int64_t(blockIdx.x) * kWarps + threadIdx.x / 32) * kRows;
  if (first >= rows) return;
  float sum[kRows] = {};
#pragma unroll 2
  for (int64_t c = lane * 8; c < cols; c += 256) {
    uint4 w[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) w[r] = load_once16(m + (first + r < rows ? first + r : rows - 1) * cols + c);
    const float4 a = __ldg(reinterpret_cast<const float4*>(x + c)),
                 b = __ldg(reinterpret_cast<const float4*>(x + c + 4));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float f[8];
      to_floats(w[r], static_cast<const Value*>(nullptr), f);
      sum[r] += f[0] * a.x + f[1] * a.y + f[2] * a.z + f[3] * a.w + f[4] * b.x + f[5] * b.y + f[6] * b.z + f[7] * b.w;
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float v = warp_sum(sum[r]);
    const int64_t row = first + r;
    if (lane == 0 && row < rows) y[row] = v + (bias != nullptr ? bias[row] : 0.0f) + (accumulate ? y[row] : 0.0f);
  }
}

__global__ void __launch_bounds__(kWarps * 32)
    matvec_float(const float* __restrict__ m, int64_t rows, int64_t cols, const float* __restrict__ x,
                 const float* __restrict__ bias, bool accumulate, float* y) {
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  float sum = 0.0f;
#pragma unroll 4
  for (int64_t c = lane * 4; c < cols; c += 128) {
    const float4 w = __ldg(reinterpret_cast<const float4*>(m + row * cols + c));
    const float4 a = __ldg(reinterpret_cast<const float4*>(x + c));
    sum += w.x * a.x + w.y * a.y + w.z * a.z + w.w * a.w;
  }
  sum = warp_sum(sum);
  if (lane == 0) y[row] = sum + (bias != nullptr ? bias[row] : 0.0f) + (accumulate ? y[row] : 0.0f);
}

unsigned blocks_for(int64_t rows, int rows_per_warp) {
  return unsigned((rows + int64_t(kWarps) * rows_per_warp - 1) / (int64_t(kWarps) * rows_per_warp));
}

template <TensorType kType>
Status run_int8(const CardMatrix& m, const CardRow& x, const float* bias, bool accumulate, float* y,
                CardStreamHandle stream) {
  const auto* xq = reinterpret_cast<const uint4*>(x.q);
  const auto* xs = reinterpret_cast<const float4*>(x.scale);
  const int groups = int(m.cols / 32);
  // Two rows a warp share the loads of x; with fewer rows a card is filled only by one.
  if (m.rows > 8192) {
    return launch_close("matvec_int8", matvec_int8<kType, 2>, blocks_for(m.rows, 2), kWarps * 32, stream, m.low, m.high,
                        m.scale, m.row_scale, m.rows, groups, xq, xs, bias, accumulate, y);
  }
  return launch_close("matvec_int8", matvec_int8<kType, 1>, blocks_for(m.rows, 1), kWarps * 32, stream, m.low, m.high,
                      m.scale, m.row_scale, m.rows, groups, xq, xs, bias, accumulate, y);
}

}  // namespace

Status matvec(const CardMatrix& m, const CardRow& x, const float* bias, bool accumulate, float* y,
              CardStreamHandle stream) {
  if (m.type == TensorType::kF32) {
    matvec_float<<<blocks_for(m.rows, 1), kWarps * 32, 0, stream>>>(reinterpret_cast<const float*>(m.low), m.rows,
                                                                    m.cols, x.f, bias, accumulate, y);
    return launched("matvec_float");
  }
  if (m.type == TensorType::kF16) {
    matvec_half<__half, 2><<<blocks_for(m.rows, 2), kWarps * 32, 0, stream>>>(reinterpret_cast<const __half*>(m.low),
                                                                              m.rows, m.cols, x.f, bias, accumulate, y);
    return launched("matvec_half");
  }
  if (m.type == TensorType::kBF16) {
    matvec_half<__nv_bfloat16, 2><<<blocks_for(m.rows, 2), kWarps * 32, 0, stream>>>(
        reinterpret_cast<const __nv_bfloat16*>(m.low), m.rows, m.cols, x.f, bias, accumulate, y);
    return launched("matvec_half");
  }
#define LONGKV_RUN(type) return run_int8<type>(m, x, bias, accumulate, y, stream)
  LONGKV_FOR_PLANE_TYPE(m.type, LONGKV_RUN)
#undef LONGKV_RUN
  return Status(Code::kInternal, "matvec: unknown type");
}

}  // namespace longkv::card
