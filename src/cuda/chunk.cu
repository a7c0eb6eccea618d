// Learning on the card. Most kernels give a block to a query.
#include <cuda_fp16.h>

#include "cuda/chunk.h"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"

namespace longkv::card {

namespace {

constexpr int kThreads = 256;

// Halves hold 11 bits; with the largest value of a row between 2^9 and 2^10 the second half of a pair has 11 more.
constexpr int kLargestExponent = 10;

__global__ void __launch_bounds__(kThreads) split_kernel(const float* __restrict__ x, int64_t rows, int64_t n,
                                                         __half* __restrict__ out, float* __restrict__ scale) {
  __shared__ float shared[32];
  const int64_t row = blockIdx.x;
  const float* from = x + row * n;
  float top = 0.0f;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) top = fmaxf(top, fabsf(from[i]));
  top = block_max(top, shared);
  int exponent = 0;
  if (top > 0.0f && isfinite(top)) frexpf(top, &exponent);
  exponent = max(-126, min(126, exponent - kLargestExponent));  // both powers are normal numbers
  const float inverse = ldexpf(1.0f, -exponent);
  __half *high = out + row * n, *low = out + (rows + row) * n;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    const float v = from[i] * inverse;
    const __half h = __float2half_rn(v);
    high[i] = h;
    low[i] = __float2half_rn(v - __half2float(h));
  }
  if (threadIdx.x == 0) scale[row] = ldexpf(1.0f, exponent);
}

__global__ void join_kernel(const float* __restrict__ y, const float* __restrict__ scale, int64_t rows, int64_t n,
                            float* __restrict__ out) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < rows * n) out[i] = scale[i / n] * (y[i] + y[rows * n + i]);
}

// A warp takes 32 channels of a head; its block's warps share the rows.
__global__ void __launch_bounds__(1024) mean_kernel(const float* __restrict__ k, int64_t step, int dim, int64_t begin,
                                                    int64_t end, float* __restrict__ mean) {
  __shared__ double sums[32][33];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = int(blockIdx.x) * 32 + lane;
  const float* from = k + blockIdx.y * step;
  double sum = 0;
  if (c < dim) {
    for (int64_t r = begin + warp; r < end; r += 32) sum += double(from[r * dim + c]);
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || c >= dim) return;
  sum = 0;
  for (int w = 0; w < 32; ++w) sum += sums[w][lane];
  mean[int64_t(blockIdx.y) * dim + c] = float(sum / double(end - begin));
}

__device__ __forceinline__ bool has_mean(const ChunkQueries& q, OldKind kind) {
  return kind == OldKind::kMean || (kind == OldKind::kMixed && q.compensate);
}

__device__ __forceinline__ double warp_sum_double(double v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(kAllLanes, v, step);
  return v;
}

// A warp per query.
__global__ void __launch_bounds__(kThreads)
    shift_kernel(ChunkQueries q, const float* __restrict__ full, const float* __restrict__ mean,
                 float* __restrict__ old, float* __restrict__ shift) {
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (i >= q.all()) return;
  const int64_t head = i / q.of_head();
  const CardOldHead kind = q.heads[head];
  const bool gone = kind.kind != OldKind::kMixed, with_mean = has_mean(q, kind.kind);
  double sum = 0;
  for (int64_t c = lane; c < q.dim_k; c += 32) {
    const int64_t at = i * q.dim_k + c;
    if (gone) old[at] = 0.0f;
    if (with_mean) sum += double(full[at] - (gone ? 0.0f : old[at])) * mean[head * q.dim_k + c];
  }
  sum = warp_sum_double(sum);
  if (lane == 0) shift[i] = kind.kind == OldKind::kConstant ? kind.score : float(sum);
}

// Columns of the scores that query i sees.
__device__ __forceinline__ void seen_columns(const ChunkQueries& q, const ChunkScores& s, int64_t i, int64_t& begin,
                                             int64_t& end) {
  const int64_t position = q.first + i % q.of_head() / q.group;
  const int64_t first = q.window > 0 && position + 1 > q.window ? position + 1 - q.window : 0;
  begin = min(max(first - s.row, int64_t(0)), s.n);
  end = min(max(position + 1 - s.row, begin), s.n);
  if (s.shift != nullptr && q.heads[i / q.of_head()].kind == OldKind::kNone) end = begin;
}

__global__ void __launch_bounds__(kThreads)
    softmax_kernel(ChunkQueries q, ChunkScores s, bool begins, float* __restrict__ top, float* __restrict__ sum,
                   float* __restrict__ out) {
  __shared__ float for_top[32], for_sum[32];
  const int64_t i = blockIdx.x;
  float* line = s.s + i * s.n;
  int64_t begin, end;
  seen_columns(q, s, i, begin, end);
  const float shift = s.shift != nullptr ? s.shift[i] : 0.0f;
  float largest = kMinusInfinity;
  for (int64_t j = begin + threadIdx.x; j < end; j += kThreads) largest = fmaxf(largest, line[j]);
  largest = block_max(largest, for_top);
  const float before = begins ? kMinusInfinity : top[i];
  const float now = fmaxf(before, largest + shift);
  // Nothing seen before: all that was held is zero.
  const float keep = before == kMinusInfinity ? 0.0f : expf(before - now);
  float total = 0.0f;
  for (int64_t j = threadIdx.x; j < s.n; j += kThreads) {
    const float p = j >= begin && j < end ? expf(line[j] + shift - now) : 0.0f;
    line[j] = p;
    total += p;
  }
  total = block_sum(total, for_sum);
  float* o = out + i * q.dim_v;
  for (int c = threadIdx.x; c < q.dim_v; c += kThreads) o[c] = begins ? 0.0f : o[c] * keep;
  if (threadIdx.x == 0) {
    sum[i] = (begins ? 0.0f : sum[i] * keep) + total;
    top[i] = now;
  }
}

__global__ void __launch_bounds__(kThreads)
    finish_kernel(ChunkQueries q, float* __restrict__ top, const float* __restrict__ sum, float* __restrict__ out) {
  const int64_t i = blockIdx.x;
  const float all = sum[i];
  for (int c = threadIdx.x; c < q.dim_v; c += kThreads) out[i * q.dim_v + c] /= all;
  if (threadIdx.x == 0) top[i] += logf(all);
}

// A warp per row.
__global__ void __launch_bounds__(kThreads) products_kernel(const float* __restrict__ a, const float* __restrict__ b,
                                                            int64_t rows, int64_t n, float* __restrict__ out) {
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (i >= rows) return;
  double sum = 0;
  for (int64_t c = lane; c < n; c += 32) sum += double(a[i * n + c]) * b[i * n + c];
  sum = warp_sum_double(sum);
  if (lane == 0) out[i] = float(sum);
}

__global__ void __launch_bounds__(kThreads)
    gradient_kernel(ChunkQueries q, ChunkScores s, const float* __restrict__ lse, const float* __restrict__ delta,
                    float* __restrict__ d, float* __restrict__ total) {
  __shared__ float shared[32];
  const int64_t i = blockIdx.x;
  float *line = s.s + i * s.n, *dline = d + i * s.n;
  int64_t begin, end;
  seen_columns(q, s, i, begin, end);
  const float shift = (s.shift != nullptr ? s.shift[i] : 0.0f) - lse[i], mean = delta[i];
  float sum = 0.0f;
  for (int64_t j = threadIdx.x; j < s.n; j += kThreads) {
    float p = 0.0f, w = 0.0f;
    if (j >= begin && j < end) {
      p = expf(fminf(line[j] + shift, 0.0f));  // a score may exceed the log of all sums by the roundings of that sum
      w = p * (dline[j] - mean);
    }
    line[j] = p;
    dline[j] = w;
    sum += w;
  }
  if (s.shift == nullptr) return;
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) total[i] += sum;
}

__global__ void old_gradient_kernel(ChunkQueries q, const float* __restrict__ mean, const float* __restrict__ total,
                                    float* __restrict__ r) {
  const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, i = at / q.dim_k, c = at % q.dim_k;
  if (i >= q.all()) return;
  const int64_t head = i / q.of_head();
  const OldKind kind = q.heads[head].kind;
  if (kind != OldKind::kMixed) {
    r[at] = 0.0f;
  } else if (q.compensate) {
    r[at] -= total[i] * mean[head * q.dim_k + c];
  }
}

__global__ void query_gradient_kernel(ChunkQueries q, const float* __restrict__ old, const float* __restrict__ mean,
                                      const float* __restrict__ total, float scale, float* __restrict__ full) {
  const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, i = at / q.dim_k, c = at % q.dim_k;
  if (i >= q.all()) return;
  const int64_t head = i / q.of_head();
  const float by_mean = has_mean(q, q.heads[head].kind) ? total[i] * mean[head * q.dim_k + c] : 0.0f;
  full[at] = scale * (old[at] + by_mean + full[at]);
}

unsigned blocks_of(int64_t values) { return unsigned((values + kThreads - 1) / kThreads); }

}  // namespace

Status split_rows(const float* x, int64_t rows, int64_t n, half_t* out, float* scale, CardStreamHandle stream) {
  split_kernel<<<unsigned(rows), kThreads, 0, stream>>>(x, rows, n, reinterpret_cast<__half*>(out), scale);
  return launched("split_rows");
}

Status join_rows(const float* y, const float* scale, int64_t rows, int64_t n, float* out, CardStreamHandle stream) {
  join_kernel<<<blocks_of(rows * n), kThreads, 0, stream>>>(y, scale, rows, n, out);
  return launched("join_rows");
}

Status mean_keys(const float* k, int64_t step, int kv_heads, int dim, int64_t begin, int64_t end, float* mean,
                 CardStreamHandle stream) {
  mean_kernel<<<dim3(unsigned((dim + 31) / 32), unsigned(kv_heads)), 1024, 0, stream>>>(k, step, dim, begin, end, mean);
  return launched("mean_keys");
}

Status old_shift(const ChunkQueries& q, const float* full, const float* mean, float* old, float* shift,
                 CardStreamHandle stream) {
  shift_kernel<<<blocks_of(q.all() * 32), kThreads, 0, stream>>>(q, full, mean, old, shift);
  return launched("old_shift");
}

Status chunk_softmax(const ChunkQueries& q, const ChunkScores& scores, bool begins, float* top, float* sum, float* out,
                     CardStreamHandle stream) {
  softmax_kernel<<<unsigned(q.all()), kThreads, 0, stream>>>(q, scores, begins, top, sum, out);
  return launched("chunk_softmax");
}

Status chunk_finish(const ChunkQueries& q, float* top, const float* sum, float* out, CardStreamHandle stream) {
  finish_kernel<<<unsigned(q.all()), kThreads, 0, stream>>>(q, top, sum, out);
  return launched("chunk_finish");
}

Status row_products(const float* dout, const float* out, int64_t rows, int64_t n, float* delta,
                    CardStreamHandle stream) {
  products_kernel<<<blocks_of(rows * 32), kThreads, 0, stream>>>(dout, out, rows, n, delta);
  return launched("row_products");
}

Status chunk_score_gradient(const ChunkQueries& q, const ChunkScores& scores, const float* lse, const float* delta,
                            float* d, float* total, CardStreamHandle stream) {
  gradient_kernel<<<unsigned(q.all()), kThreads, 0, stream>>>(q, scores, lse, delta, d, total);
  return launched("chunk_score_gradient");
}

Status old_gradient(const ChunkQueries& q, const float* mean, const float* total, float* r, CardStreamHandle stream) {
  old_gradient_kernel<<<blocks_of(q.all() * q.dim_k), kThreads, 0, stream>>>(q, mean, total, r);
  return launched("old_gradient");
}

Status query_gradient(const ChunkQueries& q, const float* old, const float* mean, const float* total, float scale,
                      float* full, CardStreamHandle stream) {
  query_gradient_kernel<<<blocks_of(q.all() * q.dim_k), kThreads, 0, stream>>>(q, old, mean, total, scale, full);
  return launched("query_gradient");
}

}  // namespace longkv::card
