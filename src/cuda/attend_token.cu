// Attention of one decoded token. Bound by reading K and V, which go from memory straight into the registers of tensor
// core products: all query heads of a KV head (up to 16 a block) are the rows of one tile, so K and V are read once.
//
// A fragment of K wants, in each lane, pairs of neighbouring channels of one row; the order of channels in a dot
// product is free, so a lane loads 16 bytes (8 channels) and the queries are loaded in the same order. A fragment of V
// wants pairs of rows of one channel: a lane loads the same 8 channels of two rows and interleaves them; instance j of
// the product then covers channels 8 n + j.
#include "cuda/attend_quant.cuh"
#include "cuda/attend_token.cuh"
#include "cuda/row_groups.cuh"

namespace longkv::card {

namespace {

constexpr int kTile = kTokenTile;

// kRuns: a lane loads neighbouring chunks, in wide words. kRowScales: values are read without their row's scale, which
// goes to scores and weights instead. kWarps: of a block, two of which share a multiprocessor.
struct Half {
  using Value = __half;
  using Raw = RawHalves;
  static constexpr bool kRuns = false, kRowScales = false;
  static constexpr int kWarps = 4;
};
struct Bfloat {
  using Value = __nv_bfloat16;
  using Raw = RawHalves;
  static constexpr bool kRuns = false, kRowScales = false;
  static constexpr int kWarps = 4;
};
struct Quant8 {
  using Value = __half;
  using Raw = RawBytes;
  static constexpr bool kRuns = false, kRowScales = false;
  static constexpr int kWarps = 4;
};
struct Quant4 {
  using Value = __half;
  using Raw = RawNibbles;
  static constexpr bool kRuns = true, kRowScales = false;
  static constexpr int kWarps = 4;
};
struct Fp8 {
  using Value = __half;
  using Raw = RawE4m3;
  static constexpr bool kRuns = false, kRowScales = true;
  static constexpr int kWarps = 6;
};

template <class Type, int kDim>
constexpr int kWarpsOf = kDim <= 128 ? Type::kWarps : kTokenWarps;

// kRing: some rows lie elsewhere (cuda/old.h). kBiased: scores have a bias by row.
enum class Rows { kPlain, kRing, kBiased };
template <class Type, int kDim, Rows kRows>
__global__ void __launch_bounds__(kWarpsOf<Type, kDim> * 32, kWarpsOf<Type, kDim> > kTokenWarps ? 2 : 1)
    attend_token_kernel(TokenArgs p) {
  using Value = typename Type::Value;
  constexpr bool kRing = kRows == Rows::kRing, kBiased = kRows == Rows::kBiased;
  constexpr int kWarps = kWarpsOf<Type, kDim>;
  constexpr int kChunks = kDim / 32;  // 16-byte chunks of a K row that a lane loads
  constexpr bool kRuns = Type::kRuns && kDim % 64 == 0;
  using Sums = TokenSums<kDim, kRuns, kWarps>;
  constexpr int kPasses = Sums::kPasses;
  const Value* const tag = nullptr;
  __shared__ typename Sums::Shared shared;

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
  // Without a list `begin` is rounded down to a tile, and rows before it are masked. With a ring, tiles are those of
  // the first rows and of those from old_end on.
  const int64_t origin = begin / kTile * kTile;
  const int64_t old_end = kRing ? *p.a.old_end : 0;
  const int64_t first_tiles = kRing ? (min(rows, kv.fixed) + kTile - 1) / kTile : 0;
  const int64_t tiles = listed  ? p.list.count[kv_head]
                        : kRing ? first_tiles + max(int64_t(0), rows - old_end + kTile - 1) / kTile
                                : (rows - origin + kTile - 1) / kTile;
  const int64_t per_split = (tiles + p.scratch.splits - 1) / p.scratch.splits;
  const int64_t tile_end = min(tiles, (split + 1) * per_split);
  if (split * per_split >= tiles) return leave_nothing(p.scratch, first_head, heads, split);

  uint32_t q[2 * kChunks][4];
  load_query<kChunks>(
      p.a.q + int64_t(first_head) * kDim, kDim, heads, g, [&](int i) { return kRuns ? c * kChunks + i : c + 4 * i; },
      q);
  Sums sums;

  for (int64_t tile = split * per_split + warp; tile < tile_end; tile += kWarps) {
    int64_t first = origin + tile * kTile, end = rows;
    uint32_t marks = ~0u;
    if (listed) {
      if (p.list.marks != nullptr) marks = p.list.marks[kv_head * p.list.stride + tile];
      const int2 at = list[tile];
      first = at.x;
      end = p.list.placed ? first + at.y : min(rows, first + at.y);
      if (kRing && first >= kv.fixed && first < old_end) continue;
    } else if (kRing) {
      first = tile < first_tiles ? tile * kTile : old_end + (tile - first_tiles) * kTile;
      end = min(rows, tile < first_tiles ? min(first + kTile, kv.fixed) : first + kTile);
    }
    // Rows past the tile are masked below; what is loaded for them is the tile's last row, which is finite.
    const int64_t last = max(end - 1, first);
    const int64_t head_row = kv_head * kv.capacity + (kRing ? kv.place(first) - first : 0);
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
    float bias[2][2];  // of the same rows
    if constexpr (kBiased) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        bias[i / 2][i % 2] = kv.bias[head_row + min(first + 8 * (i / 2) + 2 * c + i % 2, last)];
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
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int64_t row = first + 8 * h + 2 * c + e % 2;
        float x = s[h][e] * p.a.scale;
        if constexpr (Type::kRowScales) x *= bfloat_of(of_k[h][e % 2]) * 256.0f;
        if (p.a.softcap > 0.0f) x = p.a.softcap * tanhf(x / p.a.softcap);
        if constexpr (kBiased) x += bias[h][e % 2];
        const bool seen = row < end && row >= begin && (marks >> (8 * h + 2 * c + e % 2) & 1);
        s[h][e] = seen ? x * kLog2E : kMinusInfinity;
      }
    }
    float keep[2];
    sums.weigh(s, keep);
    if constexpr (Type::kRowScales) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[h][e] *= bfloat_of(of_v[h][e % 2]) * 256.0f;
      }
    }
    sums.add(
        s, keep, [&](int r, int pass) { return v[r][pass].halves(); }, tag);
  }
  sums.leave(shared, p.scratch, first_head, heads, split);
}

// A block takes 32 channels of one head, a warp of it every kMergeWarps-th piece.
constexpr int kMergeWarps = 4;
__global__ void __launch_bounds__(kMergeWarps * 32)
    merge_kernel(DecodeScratch scratch, int heads, int dim, CardRow out) {
  __shared__ float sums[kMergeWarps][32], tops[kMergeWarps], weights[kMergeWarps];
  let_next_start();
  wait_for_previous();
  const int groups = heads * dim / 32, pieces = scratch.pieces();
  const int group = int(blockIdx.x), warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32);
  const int head = group / (dim / 32), channel = group % (dim / 32) * 32 + lane;
  const float* lse = scratch.lse + int64_t(head) * pieces;
  const float* from = scratch.out + int64_t(head) * pieces * dim + channel;
  float top = kMinusInfinity, sum = 0.0f, weight = 0.0f;
  for (int base = warp; base < pieces; base += 32 * kMergeWarps) {
    const int mine = base + lane * kMergeWarps;
    const float of_mine = mine < pieces ? lse[mine] : kMinusInfinity;
    // Pieces without rows have left nothing; what is not a number is to be seen.
    const unsigned there = __ballot_sync(kAllLanes, of_mine != kMinusInfinity);
    if (there == 0) continue;
    const float best = fmaxf(top, warp_max(of_mine));
    const float keep = top == kMinusInfinity ? 0.0f : __expf(top - best);
    top = best;
    const float w = of_mine != kMinusInfinity ? __expf(of_mine - top) : 0.0f;
    sum *= keep;
    weight = weight * keep + warp_sum(w);
    const int used = 32 - __clz(int(there));
#pragma unroll 8
    for (int s = 0; s < used; ++s) {
      const float share = __shfl_sync(kAllLanes, w, s), x = from[int64_t(base + s * kMergeWarps) * dim];
      sum += there >> s & 1 ? share * x : 0.0f;
    }
  }
  sums[warp][lane] = sum;
  if (lane == 0) tops[warp] = top, weights[warp] = weight;
  __syncthreads();
  if (warp > 0) return;
#pragma unroll
  for (int w = 1; w < kMergeWarps; ++w) top = fmaxf(top, tops[w]);
  sum = weight = 0.0f;
#pragma unroll
  for (int w = 0; w < kMergeWarps; ++w) {
    const float share = weights[w] != 0.0f ? __expf(tops[w] - top) : 0.0f;
    sum += share * sums[w][lane], weight += share * weights[w];
  }
  const float v = weight != 0.0f ? sum / weight : 0.0f;
  out.f[int64_t(group) * 32 + lane] = v;
  store_group(v, group, groups, lane, out);
}

template <class Type, Rows kRows = Rows::kPlain>
Status run(const TokenArgs& p, CardStreamHandle stream) {
  const int group = p.a.heads / p.a.kv.kv_heads;
  const dim3 grid(unsigned(p.scratch.splits), unsigned(p.a.kv.kv_heads), unsigned((group + kTile - 1) / kTile));
  const auto launch = [&]<int kDim>(std::integral_constant<int, kDim>) {
    return launch_close("attend_token", attend_token_kernel<Type, kDim, kRows>, grid, kWarpsOf<Type, kDim> * 32, stream,
                        p);
  };
  switch (p.a.kv.dim) {
    case 64: return launch(std::integral_constant<int, 64>());
    case 96: return launch(std::integral_constant<int, 96>());
    case 128: return launch(std::integral_constant<int, 128>());
    case 256: return launch(std::integral_constant<int, 256>());
    default: return Status(Code::kInternal, "attend_token: head dimension");
  }
}

}  // namespace

Status attend_token(const AttendArgs& a, const TileList& list, const int64_t* position, const DecodeScratch& scratch,
                    CardStreamHandle stream) {
  const TokenArgs p{a, list, position, scratch};
  if (a.kv.bias != nullptr) {
    if (a.kv.ring > 0) return Status(Code::kInternal, "attend_token: biases of rows in a ring");
    switch (a.kv.type) {
      case KvType::kF16: return run<Half, Rows::kBiased>(p, stream);
      case KvType::kBf16: return run<Bfloat, Rows::kBiased>(p, stream);
      case KvType::kQ4_0: return run<Quant4, Rows::kBiased>(p, stream);
      case KvType::kFp8: return run<Fp8, Rows::kBiased>(p, stream);
      default: return run<Quant8, Rows::kBiased>(p, stream);
    }
  }
  if (a.kv.ring > 0) return run<Half, Rows::kRing>(p, stream);
  if (attends_quant(a.kv)) return attend_quant(p, stream);
  if (a.kv.type == KvType::kF16) return run<Half>(p, stream);
  if (a.kv.type == KvType::kBf16) return run<Bfloat>(p, stream);
  if (a.kv.type == KvType::kQ4_0) return run<Quant4>(p, stream);
  if (a.kv.type == KvType::kFp8) return run<Fp8>(p, stream);
  return run<Quant8>(p, stream);
}

Status merge_partials(const DecodeScratch& scratch, int heads, int dim, const CardRow& out, CardStreamHandle stream) {
  const int groups = heads * dim / 32;
  return launch_close("merge_partials", merge_kernel, unsigned(groups), kMergeWarps * 32, stream, scratch, heads, dim,
                      out);
}

}  // namespace longkv::card
