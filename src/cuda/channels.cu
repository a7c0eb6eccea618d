#include <cuda_fp16.h>

#include "cuda/channels.h"
#include "cuda/launch.cuh"

namespace longkv::card {

namespace {

constexpr int kThreads = 256;

__global__ void widen_kernel(const __half* __restrict__ x, int64_t n, float* __restrict__ out) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) out[i] = __half2float(x[i]);
}

__global__ void center_kernel(const float* __restrict__ k, int64_t step, const float* __restrict__ mean, int64_t rows,
                              int dim, float* __restrict__ out) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, head = blockIdx.y;
  if (i >= rows * dim) return;
  out[head * rows * dim + i] = k[head * step + i] - (mean != nullptr ? mean[head * dim + i % dim] : 0.0f);
}

// A block per query.
__global__ void __launch_bounds__(kThreads)
    weights_kernel(const float* __restrict__ q, const float* __restrict__ mean, const float* __restrict__ lse,
                   int64_t n, int64_t rows, int dim, float* __restrict__ s) {
  __shared__ float shared[32];
  const int64_t i = blockIdx.x, head = i / n;
  float start = 0.0f;
  if (mean != nullptr) {
    for (int c = threadIdx.x; c < dim; c += kThreads) start += q[i * dim + c] * mean[head * dim + c];
    start = block_sum(start, shared);
  }
  start -= lse[i];
  for (int64_t j = threadIdx.x; j < rows; j += kThreads) s[i * rows + j] = expf(fminf(s[i * rows + j] + start, 0.0f));
}

__global__ void values_kernel(const float* __restrict__ p, const float* __restrict__ v, int64_t rows, int dim,
                              float* __restrict__ out) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, query = blockIdx.y;
  if (i < rows * dim) out[query * rows * dim + i] = p[query * rows + i / dim] * v[i];
}

__global__ void outputs_kernel(ChannelOutputs o, float* __restrict__ y) {
  const int64_t width = int64_t(o.group) * o.dim_v, line = blockIdx.y, i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= (o.dim_k + 1) * width) return;  // line: a head's token
  const int64_t channel = i / width, query = line * o.group + i % width / o.dim_v, j = i % o.dim_v;
  float value = o.away[query * o.dim_v + j];
  if (channel < o.dim_k) {
    const int64_t at = query * o.dim_k + channel;
    value = o.q[at] * (o.c[at * o.dim_v + j] - o.m[at] * o.out[query * o.dim_v + j]);
  }
  y[line * (o.dim_k + 1) * width + i] = value;
}

unsigned blocks_of(int64_t values) { return unsigned((values + kThreads - 1) / kThreads); }

}  // namespace

Status widen_halves(const half_t* x, int64_t n, float* out, CardStreamHandle stream) {
  widen_kernel<<<blocks_of(n), kThreads, 0, stream>>>(reinterpret_cast<const __half*>(x), n, out);
  return launched("widen_halves");
}

Status center_keys(const float* k, int64_t step, const float* mean, int kv_heads, int64_t rows, int dim, float* out,
                   CardStreamHandle stream) {
  center_kernel<<<dim3(blocks_of(rows * dim), unsigned(kv_heads)), kThreads, 0, stream>>>(k, step, mean, rows, dim,
                                                                                          out);
  return launched("center_keys");
}

Status channel_weights(const float* q, const float* mean, const float* lse, int kv_heads, int64_t n, int64_t rows,
                       int dim, float* s, CardStreamHandle stream) {
  weights_kernel<<<unsigned(kv_heads * n), kThreads, 0, stream>>>(q, mean, lse, n, rows, dim, s);
  return launched("channel_weights");
}

Status weighted_values(const float* p, const float* v, int64_t n, int64_t rows, int dim, float* out,
                       CardStreamHandle stream) {
  values_kernel<<<dim3(blocks_of(rows * dim), unsigned(n)), kThreads, 0, stream>>>(p, v, rows, dim, out);
  return launched("weighted_values");
}

Status channel_outputs(const ChannelOutputs& o, float* y, CardStreamHandle stream) {
  const int64_t values = int64_t(o.dim_k + 1) * o.group * o.dim_v;
  outputs_kernel<<<dim3(blocks_of(values), unsigned(o.kv_heads * o.tokens)), kThreads, 0, stream>>>(o, y);
  return launched("channel_outputs");
}

}  // namespace longkv::card
