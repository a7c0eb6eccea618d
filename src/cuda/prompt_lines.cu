#include "cuda/prompt_lines.h"

#include <cuda_fp16.h>

#include "cuda/launch.cuh"
#include "cuda/mma.cuh"
#include "cuda/radix.cuh"

namespace longkv::card {

namespace {

constexpr int kStatThreads = 512, kMassThreads = 256, kWordThreads = 128;

__global__ void gather_sample_kernel(const uint4* q, int heads, int pieces, int64_t skip, int queries, uint4* sample) {
  const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= int64_t(heads) * queries * pieces) return;
  const int piece = int(at % pieces), query = int(at / pieces % queries), head = int(at / pieces / queries);
  sample[at] = q[((skip + query) * heads + head) * pieces + piece];
}

// A product in log2 units, after the cap.
struct LogScore {
  float scale, inverse_cap, cap;
  __device__ explicit LogScore(const SampleScores& s)
      : scale(s.scale * kLog2E),
        inverse_cap(s.softcap > 0.0f ? s.scale / s.softcap : 0.0f),
        cap(s.softcap * kLog2E) {}
  __device__ __forceinline__ float operator()(float product) const {
    return inverse_cap > 0.0f ? cap * tanhf(product * inverse_cap) : product * scale;
  }
};

// A block of threads a query: maximum of its visible scores, and 1 over the sum of 2^(score - maximum).
__global__ void __launch_bounds__(kStatThreads) sample_stats_kernel(SampleScores s, float2* stats) {
  __shared__ float shared[2][32];
  const int query = int(blockIdx.x), head = int(blockIdx.y);
  const float* scores = s.scores + (int64_t(head) * s.queries + query) * s.stride;
  const int64_t visible = s.row + query + 1;
  const LogScore log_score(s);
  float top = kMinusInfinity, sum = 0.0f;
  for (int64_t r = threadIdx.x * 4; r < visible; r += kStatThreads * 4) {
    const float4 v = *reinterpret_cast<const float4*>(scores + r);
    float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = r + i < visible ? log_score(x[i]) : kMinusInfinity;
    const float next = fmaxf(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])), top);
    sum = sum * exp2_fast(top - next) + (exp2_fast(x[0] - next) + exp2_fast(x[1] - next)) +
          (exp2_fast(x[2] - next) + exp2_fast(x[3] - next));
    top = next;
  }
  float all = warp_max(top);
  if (threadIdx.x % 32 == 0) shared[0][threadIdx.x / 32] = all;
  __syncthreads();
  all = warp_max(shared[0][threadIdx.x % (kStatThreads / 32)]);
  sum = block_sum(sum * exp2_fast(top - all), shared[1]);
  if (threadIdx.x == 0) stats[int64_t(head) * s.queries + query] = make_float2(all, 1.0f / sum);
}

// A thread a column and a distance.
__global__ void __launch_bounds__(kMassThreads)
    sample_mass_kernel(SampleScores s, const float2* stats, float* columns, float* distances) {
  __shared__ float2 known[kSlashQueries];
  const int head = int(blockIdx.y);
  if (int(threadIdx.x) < s.queries) known[threadIdx.x] = stats[int64_t(head) * s.queries + threadIdx.x];
  __syncthreads();
  const int64_t at = int64_t(blockIdx.x) * kMassThreads + threadIdx.x;
  if (at >= s.rows()) return;
  const LogScore log_score(s);
  const float* scores = s.scores + int64_t(head) * s.queries * s.stride;
  float column = 0.0f, distance = 0.0f;
#pragma unroll 4
  for (int query = 0; query < s.queries; ++query) {
    const int64_t position = s.row + query;
    const float* of_query = scores + query * s.stride;
    const float2 k = known[query];
    if (at <= position) {
      column += exp2_fast(log_score(of_query[at]) - k.x) * k.y;
      distance += exp2_fast(log_score(of_query[position - at]) - k.x) * k.y;
    }
  }
  columns[head * s.stride + at] = column;
  distances[head * s.stride + at] = distance;
}

__global__ void __launch_bounds__(kWordThreads)
    begin_lines_kernel(PromptHeads heads, const HeadLines* patterns, PromptLines lines) {
  const int64_t w = int64_t(blockIdx.x) * kWordThreads + threadIdx.x;
  if (w >= lines.words) return;
  const int head = heads.ids[blockIdx.y];
  const HeadLines p = patterns[head];
  uint64_t column = 0, distance = 0;
  if (p.kind == LineKind::kAShape) {
    column = range_word(w, 0, p.first);
    distance = range_word(w, 0, max(int64_t(1), p.second));
  } else if (p.kind == LineKind::kAll) {
    column = ~uint64_t(0);
  }
  lines.columns[head * lines.words + w] = column;
  lines.distances[head * lines.words + w] = distance;
}

// A block of threads a set.
__global__ void __launch_bounds__(kChooseThreads)
    choose_lines_kernel(const float* columns, const float* distances, int64_t stride, int64_t rows, PromptHeads heads,
                        const HeadLines* patterns, PromptLines lines) {
  __shared__ ChooseScratch scratch;
  const int head = heads.ids[blockIdx.x];
  const HeadLines p = patterns[head];
  if (p.kind != LineKind::kLines) return;
  const bool vertical = blockIdx.y == 0;
  const float* scores = (vertical ? columns : distances) + head * stride;
  const int64_t forced = min(vertical ? kForcedColumns : kForcedDistances, rows);
  const int64_t size = vertical ? max(p.first, kMinColumns) : max(p.second, kMinDistances);
  auto* bits = reinterpret_cast<unsigned long long*>((vertical ? lines.columns : lines.distances) + head * lines.words);
  const auto keys_of = [&](int64_t at, uint32_t(&keys)[kChooseRun]) {
    load_keys(scores, stride, at, rows, keys);
#pragma unroll
    for (int i = 0; i < kChooseRun; ++i)
      if (at + i < forced) keys[i] = ~0u;
  };
  choose_largest(0, rows, int(min(size, rows)), keys_of, scratch,
                 [&](int, int64_t row) { atomicOr(bits + row / 64, 1ull << (row % 64)); });
}

__global__ void __launch_bounds__(kWordThreads)
    spread_lines_kernel(PromptHeads heads, LineQueries queries, PromptLines lines) {
  const int64_t k = int64_t(blockIdx.x) * kWordThreads + threadIdx.x;
  if (k > queries.last_block()) return;
  const int head = heads.ids[blockIdx.y], kind = int(blockIdx.z);
  const uint64_t* distances = lines.distances + head * lines.words;
  lines.spread[(int64_t(head) * 3 + kind) * lines.words + k] =
      spread_word(k > 0 ? distances[k - 1] : 0, distances[k], queries.kind_from(kind), queries.kind_to(kind));
}

dim3 grid_of(int64_t items, int threads, int y, int z = 1) {
  return dim3(unsigned((items + threads - 1) / threads), unsigned(y), unsigned(z));
}

}  // namespace

Status gather_sample(const half_t* q, int heads, int dim, int64_t n, int queries, half_t* sample,
                     CardStreamHandle stream) {
  const int pieces = dim / 8;
  gather_sample_kernel<<<grid_of(int64_t(heads) * queries * pieces, 256, 1), 256, 0, stream>>>(
      reinterpret_cast<const uint4*>(q), heads, pieces, n - queries, queries, reinterpret_cast<uint4*>(sample));
  return launched("gather_sample");
}

Status sample_mass(const SampleScores& s, float* stats, float* columns, float* distances, CardStreamHandle stream) {
  if (s.queries > kSlashQueries || s.stride % 4 != 0) return Status(Code::kInternal, "sample_mass: shape");
  auto* pairs = reinterpret_cast<float2*>(stats);
  sample_stats_kernel<<<dim3(unsigned(s.queries), unsigned(s.heads)), kStatThreads, 0, stream>>>(s, pairs);
  LONGKV_TRY(launched("sample_stats"));
  sample_mass_kernel<<<grid_of(s.rows(), kMassThreads, s.heads), kMassThreads, 0, stream>>>(s, pairs, columns,
                                                                                             distances);
  return launched("sample_mass");
}

Status begin_lines(const PromptHeads& heads, const HeadLines* patterns, const PromptLines& lines,
                   CardStreamHandle stream) {
  if (heads.count == 0) return {};
  begin_lines_kernel<<<grid_of(lines.words, kWordThreads, heads.count), kWordThreads, 0, stream>>>(heads, patterns,
                                                                                                    lines);
  return launched("begin_lines");
}

Status choose_lines(const float* columns, const float* distances, int64_t stride, int64_t rows,
                    const PromptHeads& heads, const HeadLines* patterns, const PromptLines& lines,
                    CardStreamHandle stream) {
  if (heads.count == 0) return {};
  choose_lines_kernel<<<dim3(unsigned(heads.count), 2), kChooseThreads, 0, stream>>>(columns, distances, stride, rows,
                                                                                      heads, patterns, lines);
  return launched("choose_lines");
}

Status spread_lines(const PromptHeads& heads, const LineQueries& queries, const PromptLines& lines,
                    CardStreamHandle stream) {
  if (heads.count == 0 || queries.n <= 0) return {};
  spread_lines_kernel<<<grid_of(queries.last_block() + 1, kWordThreads, heads.count, 3), kWordThreads, 0, stream>>>(
      heads, queries, lines);
  return launched("spread_lines");
}

}  // namespace longkv::card
