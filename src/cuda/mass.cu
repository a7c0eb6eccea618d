#include "cuda/choice.cuh"
#include "cuda/key_row.cuh"
#include "cuda/launch.cuh"
#include "cuda/mass.h"
#include "cuda/mma.cuh"
#include "cuda/radix.cuh"

namespace longkv::card {

namespace {

constexpr int kTile = 16;
constexpr int kScoreWarps = 8;
constexpr int kMostGroup = 16, kMostDim = 256;
constexpr int kItems = int(MassScratch::kMostTiles) * kTile / kChooseThreads;  // of a thread

// A warp a tile: logits of its rows under all query heads of the KV head.
__global__ void __launch_bounds__(kScoreWarps * 32)
    token_scores_kernel(AttendArgs a, const int2* tiles, const int32_t* count, int64_t stride, MassScratch s) {
  __shared__ float q[kMostGroup * kMostDim];
  let_next_start();
  wait_for_previous();
  const int head = int(blockIdx.y), dim = a.kv.dim, group = a.heads / a.kv.kv_heads, lane = int(threadIdx.x % 32);
  for (int i = int(threadIdx.x); i < group * dim; i += int(blockDim.x)) {
    const half_t bits = a.q[int64_t(head) * group * dim + i];
    q[i] = a.kv.type == KvType::kBf16 ? bfloat_of(bits) : __half2float(__ushort_as_half(bits));
  }
  __syncthreads();
  const int64_t tile = int64_t(blockIdx.x) * kScoreWarps + threadIdx.x / 32;
  if (tile >= count[head]) return;
  const int2 at = tiles[head * stride + tile];
  if (lane == 0) s.marks[head * stride + tile] = 0;
  for (int r = 0; r < kTile; ++r) {
    float key[kMostDim / 32];
    if (r < at.y) {
      const KeyRow row = key_row(a.kv, head, at.x + r);
#pragma unroll
      for (int i = 0; i < kMostDim / 32; ++i) key[i] = i * 32 < dim ? row.at(i * 32 + lane) : 0.0f;
    }
    for (int g = 0; g < group; ++g) {
      float x = kMinusInfinity;
      if (r < at.y) {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < kMostDim / 32; ++i)
          if (i * 32 < dim) dot += key[i] * q[g * dim + i * 32 + lane];
        x = warp_sum(dot) * a.scale;
        if (a.softcap > 0.0f) x = a.softcap * tanhf(x / a.softcap);
      }
      if (lane == 0) s.weights[((int64_t(head) * group + g) * stride + tile) * kTile + r] = x;
    }
  }
}

// One block of threads a query head; items of a thread lie kChooseThreads apart. A smaller weight is a smaller number
// of bits, for none is negative: the threshold is found bit by bit.
__global__ void __launch_bounds__(kChooseThreads)
    mark_mass_kernel(int group, ChoiceRules rules, int block, float p, const int64_t* position, const int2* tiles,
                     const int32_t* count, int64_t stride, MassScratch s) {
  __shared__ float shared[32];
  let_next_start();
  wait_for_previous();
  const int head = int(blockIdx.x) / group, n = count[head] * kTile;
  const Choice c = choice_of(*position, block, rules);
  float* weights = s.weights + int64_t(blockIdx.x) * stride * kTile;
  const int2* list = tiles + head * stride;
  float w[kItems];
  float top = kMinusInfinity;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = i * kChooseThreads + int(threadIdx.x);
    w[i] = at < n ? weights[at] : kMinusInfinity;
    top = fmaxf(top, w[i]);
  }
  top = block_max(top, shared);
  __syncthreads();
  float sum = 0.0f, held = 0.0f;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    w[i] = w[i] == kMinusInfinity ? 0.0f : __expf(w[i] - top);
    sum += w[i];
  }
  sum = block_sum(sum, shared);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = i * kChooseThreads + int(threadIdx.x);
    w[i] /= sum;
    if (at >= n) continue;
    const int64_t row = list[at / kTile].x + at % kTile;
    if (row < c.sink || row >= c.tail) {  // attended anyway
      held += w[i];
      w[i] = 0.0f;
    }
    weights[at] = w[i];
  }
  held = block_sum(held, shared);
  const float wanted = p - held;
  if (!(wanted > 0.0f)) return;
  uint32_t least = 0;
  for (uint32_t bit = 1u << 29; bit > 0; bit /= 2) {  // 1 and less: the two upper bits are 0
    const uint32_t from = least | bit;
    float mass = 0.0f;
#pragma unroll
    for (int i = 0; i < kItems; ++i) mass += __float_as_uint(w[i]) >= from ? w[i] : 0.0f;
    __syncthreads();
    if (block_sum(mass, shared) >= wanted) least = from;
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = i * kChooseThreads + int(threadIdx.x);
    if (w[i] > 0.0f && __float_as_uint(w[i]) >= least)
      atomicOr(&s.marks[head * stride + at / kTile], 1u << (at % kTile));
  }
}

// One block of threads a list: what is over the budget leaves, forced rows are marked, tiles without rows leave.
__global__ void __launch_bounds__(kChooseThreads)
    keep_marked_kernel(int group, ChoiceRules rules, int block, const int64_t* position, int2* tiles, int32_t* count,
                       int64_t stride, MassScratch s) {
  __shared__ ChooseScratch scratch;
  __shared__ int marked;
  let_next_start();
  wait_for_previous();
  const int head = int(blockIdx.x), n = count[head];
  const Choice c = choice_of(*position, block, rules);
  int2* list = tiles + head * stride;
  uint32_t* marks = s.marks + head * stride;
  if (threadIdx.x == 0) marked = 0;
  __syncthreads();
  for (int t = int(threadIdx.x); t < n; t += kChooseThreads) atomicAdd(&marked, __popc(marks[t]));
  __syncthreads();
  const int limit = int(max(int64_t(1), rules.budget - c.sink - (c.rows - c.tail)));
  if (marked > limit) {
    float* totals = s.totals + head * stride * kTile;
    for (int i = int(threadIdx.x); i < n * kTile; i += kChooseThreads) {
      float total = kMinusInfinity;
      if (marks[i / kTile] >> (i % kTile) & 1) {
        total = 0.0f;
        for (int g = 0; g < group; ++g) total += s.weights[(int64_t(head) * group + g) * stride * kTile + i];
      }
      totals[i] = total;
    }
    __syncthreads();
    for (int t = int(threadIdx.x); t < n; t += kChooseThreads) marks[t] = 0;
    __syncthreads();
    const auto keys_of = [&](int64_t at, uint32_t(&keys)[kChooseRun]) {
      load_keys(totals, stride * kTile, at, int64_t(n) * kTile, keys);
    };
    choose_largest(0, int64_t(n) * kTile, limit, keys_of, scratch,
                   [&](int, int64_t i) { atomicOr(&marks[i / kTile], 1u << (i % kTile)); });
    __syncthreads();
  }
  int kept = 0, rows = 0;
  for (int base = 0; base < n; base += kChooseThreads) {
    const int t = base + int(threadIdx.x);
    uint32_t mark = 0;
    int2 at = make_int2(0, 0);
    if (t < n) {
      at = list[t];
      mark = marks[t];
      if (at.x < c.sink || at.x >= c.tail) mark = (1u << at.y) - 1;
    }
    const int2 before = scratch.ranks.next(mark != 0, __popc(mark));
    if (mark != 0) {
      list[kept + before.x] = at;
      marks[kept + before.x] = mark;
    }
    kept += scratch.ranks.total.x;
    rows += scratch.ranks.total.y;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    count[head] = kept;
    atomicAdd(s.counters, static_cast<unsigned long long>(rows));
    atomicAdd(s.counters + 1, static_cast<unsigned long long>(kept));
  }
}

}  // namespace

MassScratch MassScratch::at(uint8_t* memory, int heads, int kv_heads, int64_t stride) {
  MassScratch s;
  s.counters = reinterpret_cast<unsigned long long*>(memory);
  s.weights = reinterpret_cast<float*>(memory + 16);
  s.totals = s.weights + int64_t(heads) * stride * kTile;
  s.marks = reinterpret_cast<uint32_t*>(s.totals + int64_t(kv_heads) * stride * kTile);
  return s;
}

Status choose_mass(const AttendArgs& a, const ChoiceRules& rules, int block, double p, const int64_t* position,
                   int32_t* tiles, int32_t* count, int64_t stride, const MassScratch& scratch,
                   CardStreamHandle stream) {
  const int group = a.heads / a.kv.kv_heads;
  if (group > kMostGroup || a.kv.dim > kMostDim || stride > MassScratch::kMostTiles)
    return Status(Code::kInternal, "choose_mass: shape");
  auto* pairs = reinterpret_cast<int2*>(tiles);
  const dim3 grid(unsigned((stride + kScoreWarps - 1) / kScoreWarps), unsigned(a.kv.kv_heads));
  LONGKV_TRY(launch_close("token_scores", token_scores_kernel, grid, kScoreWarps * 32, stream, a, pairs, count, stride,
                          scratch));
  LONGKV_TRY(launch_close("mark_mass", mark_mass_kernel, unsigned(a.heads), kChooseThreads, stream, group, rules, block,
                          float(p), position, pairs, count, stride, scratch));
  return launch_close("keep_marked", keep_marked_kernel, unsigned(a.kv.kv_heads), kChooseThreads, stream, group, rules,
                      block, position, pairs, count, stride, scratch);
}

}  // namespace longkv::card
