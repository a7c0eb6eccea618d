// Norms, activations and residual sums: rows of one token (floats and 8-bit integers out) and of chunks (halves out).
#include <cuda_fp16.h>

#include "cuda/launch.cuh"
#include "cuda/ops.h"
#include "cuda/row_groups.cuh"

namespace longkv::card {

namespace {

constexpr int kRowThreads = 1024;

__device__ __forceinline__ float activate(Activation activation, float x) {
  if (activation == Activation::kSilu) return x / (1.0f + __expf(-x));
  constexpr float kRootTwoOverPi = 0.7978845608028654f;
  return 0.5f * x * (1.0f + tanhf(kRootTwoOverPi * (x + 0.044715f * x * x * x)));
}

// A thread holds its kValues values in registers, 1024 apart, so that x is read once.
template <int kValues>
__global__ void __launch_bounds__(kRowThreads)
    norm_row_kernel(const float* x, const float* __restrict__ weight, float eps, int dim, CardRow out) {
  __shared__ float shared[32];
  let_next_start();
  float v[kValues], scale[kValues], sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kValues; ++k) {
    const int i = k * kRowThreads + int(threadIdx.x);
    scale[k] = weight != nullptr && i < dim ? weight[i] : 0.0f;
  }
  wait_for_previous();
#pragma unroll
  for (int k = 0; k < kValues; ++k) {
    const int i = k * kRowThreads + int(threadIdx.x);
    v[k] = i < dim ? x[i] : 0.0f;
    sum += v[k] * v[k];
  }
  if (weight != nullptr) {
    const float inverse = rsqrtf(block_sum(sum, shared) / float(dim) + eps);
#pragma unroll
    for (int k = 0; k < kValues; ++k) v[k] *= inverse * scale[k];
  }
#pragma unroll
  for (int k = 0; k < kValues; ++k) {
    const int i = k * kRowThreads + int(threadIdx.x);
    if (i >= dim) break;  // whole warps: dim is a multiple of 32
    out.f[i] = v[k];
    store_group(v[k], i / 32, dim / 32, threadIdx.x % 32, out);
  }
}

__global__ void __launch_bounds__(kRowThreads)
    add_norm_row_kernel(const float* __restrict__ x, const float* __restrict__ weight, float eps, int dim, float* y) {
  __shared__ float shared[32];
  float sum = 0.0f;
  for (int i = threadIdx.x; i < dim; i += blockDim.x) sum += x[i] * x[i];
  const float inverse = rsqrtf(block_sum(sum, shared) / float(dim) + eps);
  for (int i = threadIdx.x; i < dim; i += blockDim.x) y[i] += x[i] * inverse * weight[i];
}

__global__ void gate_row_kernel(Activation activation, const float* gate_up, int n, CardRow out) {
  let_next_start();
  wait_for_previous();
  const int g = int(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
  if (g >= n / 32) return;
  const int i = g * 32 + threadIdx.x % 32;
  const float v = activate(activation, gate_up[i]) * gate_up[n + i];
  out.f[i] = v;
  store_group(v, g, n / 32, threadIdx.x % 32, out);
}

__global__ void softcap_kernel(float* y, float cap, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) y[i] = cap * tanhf(y[i] / cap);
}

__global__ void norm_rows_kernel(const float* __restrict__ x, const float* __restrict__ weight, float eps, int dim,
                                 __half* __restrict__ out) {
  __shared__ float shared[32];
  const float4* row = reinterpret_cast<const float4*>(x + int64_t(blockIdx.x) * dim);
  const float4* w = reinterpret_cast<const float4*>(weight);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < dim / 4; i += blockDim.x) {
    const float4 v = row[i];
    sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  const float inverse = rsqrtf(block_sum(sum, shared) / float(dim) + eps);
  auto* to = reinterpret_cast<__half2*>(out + int64_t(blockIdx.x) * dim);
  for (int i = threadIdx.x; i < dim / 4; i += blockDim.x) {
    const float4 v = row[i], k = w[i];
    to[2 * i] = __floats2half2_rn(v.x * inverse * k.x, v.y * inverse * k.y);
    to[2 * i + 1] = __floats2half2_rn(v.z * inverse * k.z, v.w * inverse * k.w);
  }
}

__global__ void add_rows_kernel(const float* __restrict__ x, const float* __restrict__ row_scale,
                                const float* __restrict__ bias, const float* __restrict__ weight, float eps, int dim,
                                float* y) {
  __shared__ float shared[32];
  const float* row = x + int64_t(blockIdx.x) * dim;
  float* to = y + int64_t(blockIdx.x) * dim;
  const float scale = row_scale != nullptr ? row_scale[blockIdx.x] : 1.0f;
  auto value = [&](int i) { return row[i] * scale + (bias != nullptr ? bias[i] : 0.0f); };
  float inverse = 1.0f;
  if (weight != nullptr) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) sum += value(i) * value(i);
    inverse = rsqrtf(block_sum(sum, shared) / float(dim) + eps);
  }
  for (int i = threadIdx.x; i < dim; i += blockDim.x)
    to[i] += weight != nullptr ? value(i) * inverse * weight[i] : value(i);
}

__global__ void gate_rows_kernel(Activation activation, const float* __restrict__ gate_up, int n,
                                 __half* __restrict__ out, float* row_scale) {
  __shared__ float shared[32];
  const float2* gate = reinterpret_cast<const float2*>(gate_up + int64_t(blockIdx.x) * 2 * n);
  const float2* up = gate + n / 2;
  auto* to = reinterpret_cast<__half2*>(out + int64_t(blockIdx.x) * n);
  auto value = [&](int i) {
    const float2 g = gate[i], u = up[i];
    return make_float2(activate(activation, g.x) * u.x, activate(activation, g.y) * u.y);
  };
  float top = 0.0f;
  for (int i = threadIdx.x; i < n / 2; i += blockDim.x) {
    const float2 v = value(i);
    top = fmaxf(top, fmaxf(fabsf(v.x), fabsf(v.y)));
  }
  top = block_max(top, shared);
  // Halves end at 65504; rows below 4096 stay as they are.
  constexpr float kLargest = 4096.0f;
  const float scale = top > kLargest ? exp2f(ceilf(log2f(top / kLargest))) : 1.0f;
  if (threadIdx.x == 0) row_scale[blockIdx.x] = scale;
  for (int i = threadIdx.x; i < n / 2; i += blockDim.x) {
    const float2 v = value(i);
    to[i] = __floats2half2_rn(v.x / scale, v.y / scale);
  }
}

}  // namespace

CardRow CardRow::at(uint8_t* memory, int64_t cols) {
  return {reinterpret_cast<float*>(memory), reinterpret_cast<int8_t*>(memory + cols * 4),
          reinterpret_cast<float*>(memory + cols * 5)};
}

Status norm_row(const float* x, const float* weight, float eps, int64_t dim, const CardRow& out,
                CardStreamHandle stream) {
  const auto n = int(dim);
  switch ((dim + kRowThreads - 1) / kRowThreads) {
    case 1: return launch_close("norm_row", norm_row_kernel<1>, 1, kRowThreads, stream, x, weight, eps, n, out);
    case 2: return launch_close("norm_row", norm_row_kernel<2>, 1, kRowThreads, stream, x, weight, eps, n, out);
    case 3:
    case 4: return launch_close("norm_row", norm_row_kernel<4>, 1, kRowThreads, stream, x, weight, eps, n, out);
    case 5:
    case 6:
    case 7:
    case 8: return launch_close("norm_row", norm_row_kernel<8>, 1, kRowThreads, stream, x, weight, eps, n, out);
    default:
      if (dim > 32 * kRowThreads) return Status(Code::kUnsupported, "norm_row: more than 32768 values");
      return launch_close("norm_row", norm_row_kernel<32>, 1, kRowThreads, stream, x, weight, eps, n, out);
  }
}

Status add_norm_row(const float* x, const float* weight, float eps, int64_t dim, float* y, CardStreamHandle stream) {
  add_norm_row_kernel<<<1, kRowThreads, 0, stream>>>(x, weight, eps, int(dim), y);
  return launched("add_norm_row");
}

Status gate_row(Activation activation, const float* gate_up, int64_t n, const CardRow& out, CardStreamHandle stream) {
  return launch_close("gate_row", gate_row_kernel, unsigned((n / 32 + 3) / 4), 128, stream, activation, gate_up, int(n),
                      out);
}

Status softcap(float* y, float cap, int64_t n, CardStreamHandle stream) {
  softcap_kernel<<<unsigned((n + 255) / 256), 256, 0, stream>>>(y, cap, n);
  return launched("softcap");
}

Status norm_rows(const float* x, const float* weight, float eps, int64_t rows, int64_t dim, half_t* out,
                 CardStreamHandle stream) {
  norm_rows_kernel<<<unsigned(rows), 256, 0, stream>>>(x, weight, eps, int(dim), reinterpret_cast<__half*>(out));
  return launched("norm_rows");
}

Status add_rows(const float* x, const float* row_scale, const float* bias, const float* weight, float eps, int64_t rows,
                int64_t dim, float* y, CardStreamHandle stream) {
  add_rows_kernel<<<unsigned(rows), 256, 0, stream>>>(x, row_scale, bias, weight, eps, int(dim), y);
  return launched("add_rows");
}

Status gate_rows(Activation activation, const float* gate_up, int64_t rows, int64_t n, half_t* out, float* row_scale,
                 CardStreamHandle stream) {
  gate_rows_kernel<<<unsigned(rows), 256, 0, stream>>>(activation, gate_up, int(n), reinterpret_cast<__half*>(out),
                                                       row_scale);
  return launched("gate_rows");
}

}  // namespace longkv::card
