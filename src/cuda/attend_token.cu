// Attention of one decoded token. Bound by reading K and V, which go from memory straight into the registers of tensor
// core products: all query heads of a KV head (up to 16 a block) are the rows of one tile, so K and V are read once.
//
// A fragment of K wants, in each lane, pairs of neighbouring channels of one row; the order of channels in a dot
// product is free, so a lane loads 16 bytes (8 channels) and the queries are loaded in the same order. A fragment of V
// wants pairs of rows of one channel: a lane loads the same 8 channels of two rows and interleaves them; instance j of
// the product then covers channels 8 n + j.
#include "cuda/key_row.cuh"
#include "cuda/kv.h"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"
#include "cuda/row_groups.cuh"

namespace longkv::card {

namespace {

constexpr int kWarps = 4;
constexpr int kTile = 16;  // rows that a warp takes at a time

// kRuns: a lane loads neighbouring chunks, in wide words. kRowScales: values are read without their row's scale, which
// goes to scores and weights instead.
struct Half {
  using Value = __half;
  using Raw = RawHalves;
  static constexpr bool kRuns = false, kRowScales = false;
};
struct Bfloat {
  using Value = __nv_bfloat16;
  using Raw = RawHalves;
  static constexpr bool kRuns = false, kRowScales = false;
};
struct Quant8 {
  using Value = __half;
  using Raw = RawBytes;
  static constexpr bool kRuns = false, kRowScales = false;
};
struct Quant4 {
  using Value = __half;
  using Raw = RawNibbles;
  static constexpr bool kRuns = true, kRowScales = false;
};
struct Fp8 {
  using Value = __half;
  using Raw = RawE4m3;
  static constexpr bool kRuns = false, kRowScales = true;
};

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

struct TokenArgs {
  AttendArgs a;
  TileList list;
  const int64_t* position;
  DecodeScratch scratch;
};

template <class Type, int kDim>
__global__ void __launch_bounds__(kWarps * 32) attend_token_kernel(TokenArgs p) {
  using Value = typename Type::Value;
  constexpr int kChunks = kDim / 32;         // 16-byte chunks of a K row that a lane loads
  constexpr int kPasses = (kDim + 63) / 64;  // of 64 channels of V
  constexpr bool kRuns = Type::kRuns && kDim % 64 == 0;
  const Value* const tag = nullptr;
  __shared__ float merged[kTile][kDim + 4];  // rows of different heads start in different banks
  __shared__ float maxima[kWarps][kTile], sums[kWarps][kTile];

  let_next_start();
  wait_for_previous();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int split = int(blockIdx.x), kv_head = int(blockIdx.y);
  const CardKv& kv = p.a.kv;
  const int group = p.a.heads / kv.kv_heads;
  const int first_head = kv_head * group + int(blockIdx.z) * kTile;
  const int heads = min(group - int(blockIdx.z) * kTile, kTile);

  const int64_t rows = *p.position + 1;
  const int64_t begin = p.a.window > 0 && rows > p.a.window ? rows - p.a.window : 0;
  const bool listed = p.list.tiles != nullptr;
  const int2* list = reinterpret_cast<const int2*>(p.list.tiles) + kv_head * p.list.stride;
  // Without a list `begin` is rounded down to a tile, and rows before it are masked.
  const int64_t origin = begin / kTile * kTile;
  const int64_t tiles = listed ? p.list.count[kv_head] : (rows - origin + kTile - 1) / kTile;
  const int64_t per_split = (tiles + p.scratch.splits - 1) / p.scratch.splits;
  const int64_t tile_end = min(tiles, (split + 1) * per_split);

  uint32_t q[2 * kChunks][4];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    uint4 upper = make_uint4(0, 0, 0, 0), lower = upper;
    const half_t* from = p.a.q + int64_t(first_head) * kDim + (kRuns ? c * kChunks + i : c + 4 * i) * 8;
    if (g < heads) upper = *reinterpret_cast<const uint4*>(from + g * kDim);
    if (g + 8 < heads) lower = *reinterpret_cast<const uint4*>(from + (g + 8) * kDim);
    q[2 * i][0] = upper.x, q[2 * i][1] = lower.x, q[2 * i][2] = upper.y, q[2 * i][3] = lower.y;
    q[2 * i + 1][0] = upper.z, q[2 * i + 1][1] = lower.z, q[2 * i + 1][2] = upper.w, q[2 * i + 1][3] = lower.w;
  }
  float out[kPasses * 8][4] = {};
  float top[2] = {kMinusInfinity, kMinusInfinity}, sum[2] = {0.0f, 0.0f};  // of heads g and g + 8
  const int64_t head_row = kv_head * kv.capacity;

  for (int64_t tile = split * per_split + warp; tile < tile_end; tile += kWarps) {
    int64_t first = origin + tile * kTile, end = rows;
    uint32_t marks = ~0u;
    if (listed) {
      if (p.list.marks != nullptr) marks = p.list.marks[kv_head * p.list.stride + tile];
      const int2 at = list[tile];
      first = at.x;
      end = p.list.placed ? first + at.y : min(rows, first + at.y);
    }
    // Rows past the tile are masked below; what is loaded for them is the tile's last row, which is finite.
    const int64_t last = max(end - 1, first);
    typename Type::Raw k[2][kChunks], v[4][kPasses];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t row = head_row + min(first + 8 * h + g, last);
      if constexpr (kRuns) {
        Type::Raw::load_run(k[h], kv.k, kv.k_scale, row, kDim, c * kChunks);
      } else {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) k[h][i].load(kv.k, kv.k_scale, row, kDim, c + 4 * i);
      }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int64_t row = head_row + min(first + 2 * c + r % 2 + (r / 2) * 8, last);
      if constexpr (kRuns) {
        Type::Raw::load_run(v[r], kv.v, kv.v_scale, row, kDim, g * kPasses);
      } else {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          // With 96 channels the upper half of the second pass has none: it repeats some, and they are not stored.
          const int chunk = kDim % 64 == 0 || pass * 64 + g * 8 < kDim ? g + 8 * pass : g;
          v[r][pass].load(kv.v, kv.v_scale, row, kDim, chunk);
        }
      }
    }
    half_t of_k[2][2], of_v[2][2];  // scales of the rows that a lane has scores of
    if constexpr (Type::kRowScales) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t row = head_row + min(first + 8 * (i / 2) + 2 * c + i % 2, last);
        of_k[i / 2][i % 2] = kv.k_scale[row];
        of_v[i / 2][i % 2] = kv.v_scale[row];
      }
    }
    float s[2][4] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const uint4 key = k[h][i].halves();
        mma(s[h], q[2 * i], key.x, key.y, tag);
        mma(s[h], q[2 * i + 1], key.z, key.w, tag);
      }
    }
    // In units of log 2. Masked: rows past the tile, and before the window.
    float best[2] = {kMinusInfinity, kMinusInfinity};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int64_t row = first + 8 * h + 2 * c + e % 2;
        float x = s[h][e] * p.a.scale;
        if constexpr (Type::kRowScales) x *= bfloat_of(of_k[h][e % 2]) * 256.0f;
        if (p.a.softcap > 0.0f) x = p.a.softcap * tanhf(x / p.a.softcap);
        const bool seen = row < end && row >= begin && (marks >> (8 * h + 2 * c + e % 2) & 1);
        x = seen ? x * kLog2E : kMinusInfinity;
        s[h][e] = x;
        best[e / 2] = fmaxf(best[e / 2], x);
      }
    }
    float keep[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      best[r] = fmaxf(best[r], __shfl_xor_sync(kAllLanes, best[r], 1));
      best[r] = fmaxf(best[r], __shfl_xor_sync(kAllLanes, best[r], 2));
      const float next = fmaxf(top[r], best[r]);
      keep[r] = next == kMinusInfinity ? 1.0f : exp2_fast(top[r] - next);
      top[r] = next;
      sum[r] *= keep[r];
    }
    uint32_t weights[4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[h][e] = top[e / 2] == kMinusInfinity ? 0.0f : exp2_fast(s[h][e] - top[e / 2]);
        sum[e / 2] += s[h][e];
        if constexpr (Type::kRowScales) s[h][e] *= bfloat_of(of_v[h][e % 2]) * 256.0f;
      }
      weights[2 * h] = pack_pair(s[h][0], s[h][1], tag);
      weights[2 * h + 1] = pack_pair(s[h][2], s[h][3], tag);
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint4 rows_of[4] = {v[0][pass].halves(), v[1][pass].halves(), v[2][pass].halves(), v[3][pass].halves()};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float* o = out[pass * 8 + j];
        o[0] *= keep[0], o[1] *= keep[0], o[2] *= keep[1], o[3] *= keep[1];
        const unsigned halves = j % 2 == 0 ? 0x5410u : 0x7632u;
        const uint32_t b0 = __byte_perm(word_of(rows_of[0], j / 2), word_of(rows_of[1], j / 2), halves);
        const uint32_t b1 = __byte_perm(word_of(rows_of[2], j / 2), word_of(rows_of[3], j / 2), halves);
        mma(o, weights, b0, b1, tag);
      }
    }
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 1);
    sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 2);
    if (c == 0) maxima[warp][g + 8 * r] = top[r], sums[warp][g + 8 * r] = sum[r];
  }
  __syncthreads();
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float all = kMinusInfinity;
    for (int w = 0; w < kWarps; ++w) all = fmaxf(all, maxima[w][g + 8 * r]);
    factor[r] = top[r] == kMinusInfinity ? 0.0f : exp2_fast(top[r] - all);
  }
  for (int w = 0; w < kWarps; ++w) {  // in order, so that every run gives the same sum
    if (w == warp) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (g + 8 * (e / 2) >= heads) continue;
            const int column = 2 * c + e % 2;
            const int channel = (kRuns ? column * kPasses + pass : pass * 8 + column) * 8 + j;
            if (kDim % 64 != 0 && channel >= kDim) continue;
            float& to = merged[g + 8 * (e / 2)][channel];
            const float x = out[pass * 8 + j][e] * factor[e / 2];
            to = w == 0 ? x : to + x;
          }
        }
      }
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < heads * kDim; i += blockDim.x) {
    const int h = i / kDim, channel = i % kDim;
    float all = kMinusInfinity, total = 0.0f;
    for (int w = 0; w < kWarps; ++w) all = fmaxf(all, maxima[w][h]);
    for (int w = 0; w < kWarps; ++w) {
      if (maxima[w][h] != kMinusInfinity) total += sums[w][h] * exp2_fast(maxima[w][h] - all);
    }
    const int64_t at = int64_t(first_head + h) * p.scratch.splits + split;
    p.scratch.out[at * kDim + channel] = total > 0.0f ? merged[h][channel] / total : 0.0f;
    if (channel == 0) p.scratch.lse[at] = total > 0.0f ? all * kLn2 + logf(total) : kMinusInfinity;
  }
}

// One warp takes 32 channels of one head.
__global__ void merge_kernel(DecodeScratch scratch, int heads, int dim, CardRow out) {
  let_next_start();
  wait_for_previous();
  const int groups = heads * dim / 32;
  const int group = int(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32), lane = threadIdx.x % 32;
  if (group >= groups) return;
  const int head = group / (dim / 32), channel = group % (dim / 32) * 32 + lane;
  const float* lse = scratch.lse + int64_t(head) * scratch.splits;
  float top = kMinusInfinity;
  for (int s = lane; s < scratch.splits; s += 32) top = fmaxf(top, lse[s]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
  float sum = 0.0f, weight = 0.0f;
  const float* from = scratch.out + int64_t(head) * scratch.splits * dim + channel;
  for (int base = 0; base < scratch.splits; base += 32) {
    const int mine = base + lane;
    const float w = mine < scratch.splits && lse[mine] != kMinusInfinity ? __expf(lse[mine] - top) : 0.0f;
    const int n = min(32, scratch.splits - base);
    // Pieces without rows hold zeros, so that no load waits for a decision.
#pragma unroll 8
    for (int s = 0; s < n; ++s) {
      const float share = __shfl_sync(kAllLanes, w, s);
      weight += share;
      sum += share * from[int64_t(base + s) * dim];
    }
  }
  const float v = weight > 0.0f ? sum / weight : 0.0f;
  out.f[int64_t(group) * 32 + lane] = v;
  store_group(v, group, groups, lane, out);
}

template <class Type>
Status run(const TokenArgs& p, CardStreamHandle stream) {
  const int group = p.a.heads / p.a.kv.kv_heads;
  const dim3 grid(unsigned(p.scratch.splits), unsigned(p.a.kv.kv_heads), unsigned((group + kTile - 1) / kTile));
  switch (p.a.kv.dim) {
    case 64: return launch_close("attend_token", attend_token_kernel<Type, 64>, grid, kWarps * 32, stream, p);
    case 96: return launch_close("attend_token", attend_token_kernel<Type, 96>, grid, kWarps * 32, stream, p);
    case 128: return launch_close("attend_token", attend_token_kernel<Type, 128>, grid, kWarps * 32, stream, p);
    case 256: return launch_close("attend_token", attend_token_kernel<Type, 256>, grid, kWarps * 32, stream, p);
    default: return Status(Code::kInternal, "attend_token: head dimension");
  }
}

}  // namespace

Status attend_token(const AttendArgs& a, const TileList& list, const int64_t* position, const DecodeScratch& scratch,
                    CardStreamHandle stream) {
  const TokenArgs p{a, list, position, scratch};
  if (a.kv.type == KvType::kF16) return run<Half>(p, stream);
  if (a.kv.type == KvType::kBf16) return run<Bfloat>(p, stream);
  if (a.kv.type == KvType::kQ4_0) return run<Quant4>(p, stream);
  if (a.kv.type == KvType::kFp8) return run<Fp8>(p, stream);
  return run<Quant8>(p, stream);
}

Status merge_partials(const DecodeScratch& scratch, int heads, int dim, const CardRow& out, CardStreamHandle stream) {
  const int groups = heads * dim / 32;
  return launch_close("merge_partials", merge_kernel, unsigned((groups + 3) / 4), 128, stream, scratch, heads, dim,
                      out);
}

}  // namespace longkv::card
