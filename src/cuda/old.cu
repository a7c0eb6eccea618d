// Encoding of old rows, reading them back, and the means that stand for what masks drop.
#include "cuda/launch.cuh"
#include "cuda/old_rows.cuh"

namespace longkv::card {

namespace {

constexpr int kThreads = 256, kMostDim = 256;

// The grid and the codes of one group of values, by the rules of kv/codec/kivi.h.
struct Grid {
  __half scale, low;
  float inverse, base;
  __device__ Grid(float least, float most, float poison, int levels) {
    scale = __float2half_rn((most - least) / float(levels) + poison);
    low = __float2half_rn(least + poison);
    const float s = __half2float(scale);
    inverse = s > 0.0f ? 1.0f / s : 0.0f;
    base = s == s ? __half2float(low) : 0.0f;
  }
  __device__ int code(float x, int levels) const {
    return __float2int_rn(fminf(fmaxf((x - base) * inverse, 0.0f), float(levels)));
  }
};

__device__ __forceinline__ float row_value(const CardKv& kv, bool key, int head, int64_t row, int c) {
  const int64_t at = (head * kv.capacity + kv.place(row)) * kv.dim + c;
  return __half2float(reinterpret_cast<const __half*>(key ? kv.k : kv.v)[at]);
}

// Codes of K [32][width] to their words.
template <int kBits>
__device__ void pack_keys(const uint8_t (&codes)[kOldStep][kMostDim], int width, uint8_t* out) {
  using Format = OldFormat<kBits>;
  const int per_row = width / Format::kPerWord;
  for (int i = int(threadIdx.x); i < int(kOldStep) * per_row; i += kThreads) {
    uint32_t word = 0;
    for (int c = 0; c < Format::kPerWord; ++c)
      word |= uint32_t(codes[i / per_row][i % per_row * Format::kPerWord + c]) << Format::shift(c);
    reinterpret_cast<uint32_t*>(out)[i] = word;
  }
}
// Codes of V [32][dim]: a thread a word, two rows of runs of four channels.
template <int kBits>
__device__ void pack_values(const uint8_t (&codes)[kOldStep][kMostDim], int dim, uint8_t* out) {
  using Format = OldFormat<kBits>;
  constexpr int kRuns = kBits == 2 ? 2 : 1;  // that a word holds of a row, 32 channels apart
  const int rows = int(kOldStep) / 2, runs = dim / 4 / kRuns;
  for (int i = int(threadIdx.x); i < rows * runs; i += kThreads) {
    const int r = i / runs * 2, first = i % runs / 8 * (32 * kRuns) + i % 8 * 4;
    uint32_t word = 0;
    for (int n = 0; n < 8 * kRuns; ++n) {
      const int row = r + n % 2, c = first + n / 8 * 32 + n / 2 % 4;
      word |= uint32_t(codes[row][c]) << Format::value_place(row, c, dim).shift;
    }
    reinterpret_cast<uint32_t*>(out)[Format::value_place(r, first, dim).word] = word;
  }
}

// Rows [first, first + 32) of a head; first: a step's. Every thread of a block of kThreads takes part.
template <int kBits>
__device__ void encode_step(const CardOld& old, const CardKv& rows, int head_index, int64_t first) {
  using Format = OldFormat<kBits>;
  __shared__ uint8_t codes[kOldStep][kMostDim];
  const OldHead head = old.heads[head_index];
  if (head.kept == 0) return;
  const int dim = old.dim, kept = head.kept, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t step = (first - old.sink) / kOldStep;
  uint8_t* keys = head.k + step * old_step_bytes(Format::kType, kept);
  uint8_t* values = head.v + step * old_step_bytes(Format::kType, dim);
  const auto channel = [&](int i) { return head.channel == nullptr ? i : int(head.channel[i]); };
  if constexpr (kBits == 0) {
    for (int i = int(threadIdx.x); i < int(kOldStep) * kept; i += kThreads) {
      const float x =
          i % kept < head.channels ? row_value(rows, true, head_index, first + i / kept, channel(i % kept)) : 0.0f;
      reinterpret_cast<__half*>(keys)[i] = __float2half_rn(x);
    }
    for (int i = int(threadIdx.x); i < int(kOldStep) * dim; i += kThreads)
      reinterpret_cast<__half*>(values)[i] =
          __float2half_rn(row_value(rows, false, head_index, first + i / dim, i % dim));
    return;
  }
  auto* key_grid = reinterpret_cast<__half*>(keys + 4 * kBits * kept);
  auto* value_grid = reinterpret_cast<__half*>(values + 4 * kBits * dim);
  for (int i = int(threadIdx.x); i < kept; i += kThreads) {
    const bool there = i < head.channels;
    const int c = there ? channel(i) : 0;
    float least = __builtin_huge_valf(), most = -least, poison = 0.0f;
    for (int r = 0; r < kOldStep; ++r) {
      const float x = there ? row_value(rows, true, head_index, first + r, c) : 0.0f;
      least = fminf(least, x), most = fmaxf(most, x), poison += x * 0.0f;
    }
    const Grid grid(least, most, poison, Format::kLevels);
    key_grid[i] = grid.scale, key_grid[kept + i] = grid.low;
    for (int r = 0; r < kOldStep; ++r)
      codes[r][i] = uint8_t(grid.code(there ? row_value(rows, true, head_index, first + r, c) : 0.0f, Format::kLevels));
  }
  __syncthreads();
  pack_keys<kBits>(codes, kept, keys);
  __syncthreads();
  const int groups = dim / 32;
  for (int i = warp; i < int(kOldStep) * groups; i += kThreads / 32) {
    const int r = i / groups, c = i % groups * 32 + lane;
    const float x = row_value(rows, false, head_index, first + r, c);
    const Grid grid(-warp_max(-x), warp_max(x), warp_sum(x * 0.0f), Format::kLevels);
    codes[r][c] = uint8_t(grid.code(x, Format::kLevels));
    if (lane == 0) {
      __half* at = value_grid + Format::value_grid(r, i % groups, groups);
      at[0] = grid.scale, at[16 * groups] = grid.low;
    }
  }
  __syncthreads();
  pack_values<kBits>(codes, dim, values);
}

template <int kBits>
__global__ void __launch_bounds__(kThreads) encode_kernel(CardOld old, CardKv rows, int64_t begin) {
  encode_step<kBits>(old, rows, int(blockIdx.y), begin + int64_t(blockIdx.x) * kOldStep);
}

// The means of what the middle's keys lost and, of heads that keep nothing, of its values. A thread a channel; `rows`
// of them were summed.
__device__ void update_means(const OldHead& head, int dim, int64_t rows, float* lost) {
  const int c = int(threadIdx.x);
  const double n = double(max(int64_t(1), rows));
  const float mean = c < dim ? float(head.sums[c] / n) : 0.0f;
  if (c < dim) lost[c] = mean;
  __syncthreads();
  if (c < head.channels) {
    const int channel = head.channel == nullptr ? c : int(head.channel[c]);
    const double whole = head.sums[channel] / n;
    lost[channel] = float(whole - whole * (head.alpha == nullptr ? 1.0 : double(head.alpha[c])));
  }
  __syncthreads();
  if (c >= dim) return;
  if (head.mean_k != nullptr) head.mean_k[c] = lost[c];
  if (head.mean_v != nullptr) head.mean_v[c] = float(head.sums[dim + c] / n);
}

__device__ void add_to_means(const CardOld& old, const CardKv& rows, int head_index, int64_t begin, int64_t end) {
  __shared__ float lost[kMostDim];
  const OldHead head = old.heads[head_index];
  if (head.sums == nullptr) return;
  const int c = int(threadIdx.x);
  if (c < old.dim) {
    double k = 0.0, v = 0.0;
    for (int64_t r = begin; r < end; ++r) {
      k += double(row_value(rows, true, head_index, r, c));
      v += double(row_value(rows, false, head_index, r, c));
    }
    head.sums[c] += k, head.sums[old.dim + c] += v;
  }
  __syncthreads();
  update_means(head, old.dim, end - old.sink, lost);
}

__global__ void __launch_bounds__(kThreads) add_means_kernel(CardOld old, CardKv rows, int64_t begin, int64_t end) {
  add_to_means(old, rows, int(blockIdx.x), begin, end);
}
__global__ void __launch_bounds__(kThreads) cut_means_kernel(CardOld old, int64_t had, int64_t left) {
  __shared__ float lost[kMostDim];
  const OldHead head = old.heads[blockIdx.x];
  if (head.sums == nullptr) return;
  // What was summed over the rows that leave is not known any more: the means stay.
  for (int i = int(threadIdx.x); i < 2 * old.dim; i += kThreads) head.sums[i] *= double(left) / double(had);
  __syncthreads();
  update_means(head, old.dim, left, lost);
}

__device__ bool completes_step(const CardOld& old, int64_t rows, int64_t& begin) {
  begin = *old.end;
  return old_end(rows, old.sink, old.window) > begin;
}
template <int kBits>
__global__ void __launch_bounds__(kThreads) encode_last_kernel(const OldLayer* layers, const int64_t* position) {
  let_next_start();
  wait_for_previous();
  const OldLayer& l = layers[blockIdx.y];
  int64_t begin = 0;
  if (completes_step(l.old, *position + 1, begin)) encode_step<kBits>(l.old, l.rows, int(blockIdx.x), begin);
}
__global__ void __launch_bounds__(kThreads) means_last_kernel(const OldLayer* layers, const int64_t* position) {
  let_next_start();
  wait_for_previous();
  const OldLayer& l = layers[blockIdx.y];
  int64_t begin = 0;
  if (completes_step(l.old, *position + 1, begin))
    add_to_means(l.old, l.rows, int(blockIdx.x), begin, begin + kOldStep);
}

// A block a row, a thread a channel.
template <int kBits>
__global__ void read_kernel(CardOld old, CardKv rows, int64_t begin, int64_t old_end, CardKv to) {
  using Format = OldFormat<kBits>;
  __shared__ float key[kMostDim];
  const int head_index = int(blockIdx.y), c = int(threadIdx.x);
  const int64_t row = begin + blockIdx.x;
  float k, v;
  if (row < old.sink || row >= old_end) {
    k = row_value(rows, true, head_index, row, c), v = row_value(rows, false, head_index, row, c);
  } else {
    const OldHead head = old.heads[head_index];
    const int64_t step = (row - old.sink) / kOldStep;
    const int r = int((row - old.sink) % kOldStep);
    key[c] = 0.0f;
    __syncthreads();
    if (c < head.channels) {
      const float x = Format::key(head.k + step * old_step_bytes(Format::kType, head.kept), r, c, head.kept);
      key[head.channel == nullptr ? c : int(head.channel[c])] = head.alpha == nullptr ? x : x * head.alpha[c];
    }
    __syncthreads();
    k = key[c] + (head.mean_k == nullptr ? 0.0f : head.mean_k[c]);
    v = head.kept > 0            ? Format::value(head.v + step * old_step_bytes(Format::kType, old.dim), r, c, old.dim)
        : head.mean_v == nullptr ? 0.0f
                                 : head.mean_v[c];
  }
  const int64_t at = (head_index * to.capacity + to.place(row)) * to.dim + c;
  reinterpret_cast<__half*>(to.k)[at] = __float2half_rn(k);
  reinterpret_cast<__half*>(to.v)[at] = __float2half_rn(v);
}

// A thread 16 bytes of a row of K or V.
__global__ void copy_kernel(CardKv from, int64_t begin, int64_t end, CardKv to) {
  const int per_row = from.dim / 8;
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, row = begin + i / per_row;
  if (row >= end) return;
  const int head = int(blockIdx.y) / 2, chunk = int(i % per_row);
  const bool key = blockIdx.y % 2 == 0;
  const auto* source = reinterpret_cast<const uint4*>(key ? from.k : from.v);
  auto* target = reinterpret_cast<uint4*>(key ? to.k : to.v);
  target[(head * to.capacity + to.place(row)) * per_row + chunk] =
      source[(head * from.capacity + from.place(row)) * per_row + chunk];
}

// A block a query head.
__global__ void gather_kernel(const half_t* q, int group, CardOld old, float scale, half_t* to, float* shift) {
  __shared__ float shared[32];
  let_next_start();
  wait_for_previous();
  const int h = int(blockIdx.x), c = int(threadIdx.x);
  const OldHead head = old.heads[h / group];
  const auto* from = reinterpret_cast<const __half*>(q) + int64_t(h) * old.dim;
  if (c < head.kept) {
    float x = 0.0f;
    if (c < head.channels) x = __half2float(from[head.channel == nullptr ? c : int(head.channel[c])]);
    if (c < head.channels && head.alpha != nullptr) x *= head.alpha[c];
    reinterpret_cast<__half*>(to)[int64_t(h) * old.dim + c] = __float2half_rn(x);
  }
  const float product = head.mean_k == nullptr ? 0.0f : __half2float(from[c]) * head.mean_k[c];
  const float sum = block_sum(product, shared);
  if (c == 0) shift[h] = scale * sum + (head.kept == 0 ? head.score : 0.0f);
}

#define LONGKV_FOR_OLD_TYPE(type, call)         \
  if ((type) == KvType::kF16) return call(0);   \
  if ((type) == KvType::kKivi2) return call(2); \
  if ((type) == KvType::kKivi4) return call(4); \
  return Status(Code::kInternal, "encoded rows of another type")

}  // namespace

Status encode_old(const CardOld& old, const CardKv& rows, int64_t begin, int64_t end, CardStreamHandle stream) {
  if (begin >= end) return {};
  const dim3 grid(unsigned((end - begin) / kOldStep), unsigned(old.kv_heads));
  const auto launch = [&](auto kernel) {
    kernel<<<grid, kThreads, 0, stream>>>(old, rows, begin);
    return launched("encode_old");
  };
#define LONGKV_CALL(bits) launch(encode_kernel<bits>)
  LONGKV_FOR_OLD_TYPE(old.type, LONGKV_CALL);
#undef LONGKV_CALL
}

Status read_old(const CardOld& old, const CardKv& rows, int64_t begin, int64_t end, int64_t old_end, const CardKv& to,
                CardStreamHandle stream) {
  if (begin >= end) return {};
  const dim3 grid(unsigned(end - begin), unsigned(old.kv_heads));
  const auto launch = [&](auto kernel) {
    kernel<<<grid, unsigned(old.dim), 0, stream>>>(old, rows, begin, old_end, to);
    return launched("read_old");
  };
#define LONGKV_CALL(bits) launch(read_kernel<bits>)
  LONGKV_FOR_OLD_TYPE(old.type, LONGKV_CALL);
#undef LONGKV_CALL
}

Status copy_rows(const CardKv& from, int64_t begin, int64_t end, const CardKv& to, CardStreamHandle stream) {
  if (begin >= end) return {};
  const int64_t words = (end - begin) * (from.dim / 8);
  copy_kernel<<<dim3(unsigned((words + kThreads - 1) / kThreads), unsigned(2 * from.kv_heads)), kThreads, 0, stream>>>(
      from, begin, end, to);
  return launched("copy_rows");
}

Status add_means(const CardOld& old, const CardKv& rows, int64_t begin, int64_t end, CardStreamHandle stream) {
  if (begin >= end) return {};
  add_means_kernel<<<unsigned(old.kv_heads), kThreads, 0, stream>>>(old, rows, begin, end);
  return launched("add_means");
}
Status cut_means(const CardOld& old, int64_t had, int64_t left, CardStreamHandle stream) {
  if (had <= left) return {};
  cut_means_kernel<<<unsigned(old.kv_heads), kThreads, 0, stream>>>(old, had, left);
  return launched("cut_means");
}

Status encode_last(const OldLayer* layers, int count, int kv_heads, KvType type, bool means, const int64_t* position,
                   CardStreamHandle stream) {
  const dim3 grid{unsigned(kv_heads), unsigned(count)};
  if (means) LONGKV_TRY(launch_close("means_last", means_last_kernel, grid, kThreads, stream, layers, position));
#define LONGKV_CALL(bits) \
  launch_close("encode_last", encode_last_kernel<bits>, grid, kThreads, stream, layers, position)
  LONGKV_FOR_OLD_TYPE(type, LONGKV_CALL);
#undef LONGKV_CALL
}

Status gather_queries(const half_t* q, int heads, const CardOld& old, float scale, half_t* to, float* shift,
                      CardStreamHandle stream) {
  return launch_close("gather_queries", gather_kernel, unsigned(heads), unsigned(old.dim), stream, q,
                      heads / old.kv_heads, old, scale, to, shift);
}

}  // namespace longkv::card
