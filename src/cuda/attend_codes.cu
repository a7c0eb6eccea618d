// Attention of a decoded token over rows in codes of 2 and 4 bits (cuda/old.h). Codes are never decoded: with the bits
// of others masked off, a pair of them is a pair of halves below 2^-14, which products take exactly (attend_heads.cuh).
// A key's grid is by channel: scales are multiplied into the query, and the query's product with the minima is where
// scores start, both once for 32 rows. A value's grid is by row and 32 channels: scales are multiplied into the
// weights, and the weights' products with the minima, one number for 32 channels, are summed on their own. A warp takes
// the 32 rows of a step at a time, or one tile of 16 rows of a list; the next ones wait in shared memory.
#include <algorithm>

#include "cuda/async.cuh"
#include "cuda/attend_old.cuh"
#include "cuda/old_rows.cuh"

namespace longkv::card {

namespace {

// kTiles: 2 takes whole steps, 1 the tiles of a list.
template <int kBits, int kDim, int kTiles>
struct CodeTiles {
  static constexpr int kGroups = kDim / 32;
  // Bytes: codes of a tile of K, or of V; scales and minima of K; those of a tile of V.
  static constexpr int kCodes = 2 * kBits * kDim, kKeyGrid = 4 * kDim, kValueGrid = 2 * kDim;
  static constexpr int kKeys = kTiles * kCodes + kKeyGrid;  // all of K; V lies behind
  static constexpr int kBytes = kKeys + kTiles * (kCodes + kValueGrid);
  static constexpr int kWarps = kDim == 256 ? 4 : 8;
  static constexpr int kStages = std::min(4, 96000 / (kWarps * kBytes));
  static_assert(kStages >= 2);
};

// Pair j of four neighbouring ones: a chunk of K, or channels of V with two rows each. Its place: places(j).
template <int kBits>
__device__ __forceinline__ uint32_t codes_at(uint32_t word, int j) {
  if constexpr (kBits == 4) return (j < 2 ? word : word >> 8) & (0x000f000fu << (4 * (j % 2)));
  return word & (0x00030003u << (2 * j));
}
template <int kBits>
__device__ __forceinline__ constexpr float places(int j) {
  return kBits == 4 ? (j % 2 == 0 ? 1.0f : 16.0f) : float(1 << (2 * j));
}

template <int kBits, int kDim, int kTiles>
__global__ void __launch_bounds__(CodeTiles<kBits, kDim, kTiles>::kWarps * 32, kDim == 256 ? 1 : 2)
    attend_codes_kernel(OldArgs p) {
  using Tiles = CodeTiles<kBits, kDim, kTiles>;
  using Format = OldFormat<kBits>;
  constexpr int kChunks = kDim / 32, kGroups = Tiles::kGroups, kWarps = Tiles::kWarps, kStages = Tiles::kStages;
  constexpr int kWords = Format::value_words(kDim);
  constexpr bool kListed = kTiles == 1;
  using Sums = HeadSums<kDim, kWarps>;
  extern __shared__ __align__(16) uint8_t shared[];  // [kWarps][kStages][kBytes]; in the end Sums::Shared
  static_assert(sizeof(typename Sums::Shared) <= kWarps * kStages * Tiles::kBytes);
  const __half* const tag = nullptr;

  let_next_start();
  wait_for_previous();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int split = int(blockIdx.x), kv_head = int(blockIdx.y);
  const CardOld& old = p.a.old;
  const OldHead head = old.heads[kv_head];
  const int group = p.a.heads / old.kv_heads;
  const int first_head = kv_head * group + int(blockIdx.z) * kColumns;
  const int heads = min(group - int(blockIdx.z) * kColumns, kColumns);
  const int64_t end = *old.end;
  if (head.kept == 0) return attend_means<kDim>(p, head, end, kv_head, first_head, heads, split);

  // Steps, or tiles of the list, of this block's piece: from `first` on every kWarps-th. Of a list a warp takes two
  // neighbours, which may share grids of K.
  const int2* list = reinterpret_cast<const int2*>(p.list.tiles) + kv_head * p.list.stride;
  const auto all = kListed ? p.list.count[kv_head] : int((end - old.sink) / kOldStep);
  const int together = kListed ? 2 : 1;
  const int per_split = ((all + p.scratch.splits - 1) / p.scratch.splits + together - 1) / together * together;
  const int piece_end = min(all, (split + 1) * per_split), piece_begin = split * per_split + together * warp;
  if (split * per_split >= all) return leave_nothing(p.scratch, first_head, heads, split);
  const auto number_of = [&](int k) {
    return kListed ? piece_begin + k / 2 * (2 * kWarps) + k % 2 : piece_begin + k * kWarps;
  };
  struct Place {
    int step;  // below 0: these rows are not among the encoded ones
    int half, from, to;
  };
  const auto place_of = [&](int number) {
    if (number >= piece_end) return Place{-1, 0, 0, 0};
    const int2 at = list[number];
    const int64_t first = at.x / kTokenTile * kTokenTile;
    if (first < old.sink || first >= end) return Place{-1, 0, 0, 0};
    const int64_t from = first - old.sink;
    return Place{int(from / kOldStep), int(from % kOldStep / kTokenTile), int(at.x - first), int(at.x - first + at.y)};
  };
  const int kept = head.kept, own = kept / 32;  // chunks of a K row that a lane has
  const int key_codes = 2 * kBits * kept;       // bytes of a tile
  const int64_t key_step = old_step_bytes(Format::kType, kept), value_step = old_step_bytes(Format::kType, kDim);
  const uint8_t *keys = head.k + lane * 16, *values = head.v + lane * 16;  // without a list: of the next step
  if constexpr (!kListed) keys += piece_begin * key_step, values += piece_begin * value_step;
  const auto copy = [&](uint8_t* to, const uint8_t* from, int most, int bytes) {
#pragma unroll
    for (int i = 0; i < most; i += 512)
      if (i + lane * 16 < bytes) copy_ahead(to + i, from + i);
  };
  const auto fetch = [&](int k, uint8_t* stage) {
    uint8_t* to = stage + lane * 16;
    if constexpr (kListed) {
      const Place at = place_of(number_of(k));
      if (at.step >= 0) {
        const uint8_t *from_k = keys + at.step * key_step, *from_v = values + at.step * value_step;
        copy(to, from_k + at.half * key_codes, Tiles::kCodes, key_codes);
        copy(to + key_codes, from_k + 2 * key_codes, Tiles::kKeyGrid, 4 * kept);
        copy(to + Tiles::kKeys, from_v + at.half * Tiles::kCodes, Tiles::kCodes, Tiles::kCodes);
        copy(to + Tiles::kKeys + Tiles::kCodes, from_v + 2 * Tiles::kCodes + at.half * Tiles::kValueGrid,
             Tiles::kValueGrid, Tiles::kValueGrid);
      }
    } else {
      if (number_of(k) < piece_end) {
        copy(to, keys, Tiles::kKeys, int(key_step));
        copy(to + Tiles::kKeys, values, Tiles::kBytes - Tiles::kKeys, Tiles::kBytes - Tiles::kKeys);
      }
      keys += kWarps * key_step, values += kWarps * value_step;
    }
    commit_copies();
  };
  uint8_t* const stages = shared + warp * (kStages * Tiles::kBytes);
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) fetch(i, stages + i * Tiles::kBytes);

  // A lane's share of head g's query, as keys have it, which all warps read again for each step; what the softmax adds
  // to scores of heads 2 c and 2 c + 1.
  __shared__ uint4 queries[kChunks][32];
  for (int i = warp; i < kChunks; i += kWarps) {
    uint4 words = make_uint4(0, 0, 0, 0);
    if (g < heads && i < own)
      words = *reinterpret_cast<const uint4*>(p.a.q + int64_t(first_head + g) * kDim + (c * own + i) * 8);
    queries[i][lane] = words;
  }
  __syncthreads();
  uint32_t scaled[4 * kChunks] = {};
  float shift[2] = {0.0f, 0.0f};
  if (p.a.shift != nullptr) {
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (2 * c + e < heads) shift[e] = p.a.shift[first_head + 2 * c + e] * kLog2E;
  }
  // Scores in units of log 2; with a cap, in units of the cap until then.
  const float cap = p.a.softcap > 0.0f ? p.a.softcap * kLog2E : 0.0f;
  const float unit = p.a.scale * (p.a.softcap > 0.0f ? 1.0f / p.a.softcap : kLog2E);
  float start[2] = {0.0f, 0.0f};
  Sums sums;
  int step = -1;
  uint8_t *here = stages, *behind = stages + (kStages - 1) * Tiles::kBytes;
  for (int k = 0; number_of(kListed ? k / 2 * 2 : k) < piece_end; ++k) {
    await_copies<kStages - 2>();
    __syncwarp();
    // To where the rows before these were, which every lane has read.
    fetch(k + kStages - 1, behind);
    behind = here;
    const uint8_t* const there = here;
    here = here == stages + (kStages - 1) * Tiles::kBytes ? stages : here + Tiles::kBytes;
    Place at{0, 0, 0, kTokenTile};
    if constexpr (kListed) {
      at = place_of(number_of(k));
      if (at.step < 0) continue;
    }
    if (!kListed || at.step != step) {
      step = at.step;
      const auto* grid = reinterpret_cast<const uint4*>(there + kTiles * key_codes);
      float low[2][4] = {};
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        // Where a row has fewer chunks, queries are zeros.
        uint4 scale = make_uint4(0, 0, 0, 0), least = scale;
        if (i < own) scale = grid[c * own + i], least = grid[kept / 8 + c * own + i];
        const uint4 q = queries[i][lane];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t place = half2_bits(__half2half2(__float2half_rn(1.0f / places<kBits>(j))));
          const uint32_t product = times(word_of(q, j), word_of(scale, j));
          scaled[4 * i + j] = places<kBits>(j) == 1.0f ? product : times(product, place);
        }
        const uint32_t first[4] = {least.x, least.x, least.y, least.y};
        const uint32_t second[4] = {least.z, least.z, least.w, least.w};
        mma(low[0], first, q.x, q.y, tag);
        mma(low[1], second, q.z, q.w, tag);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        start[e] = (low[0][e] + low[1][e]) * unit;
        if (cap == 0.0f) start[e] += shift[e];
      }
    }
    // Rows g ([0] and [1]) and g + 8 under heads 2 c and 2 c + 1.
    float s[kTiles][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      constexpr int kPerChunk = kBits == 4 ? 4 : 2;  // bytes
      uint32_t words[2][kBits == 4 ? kChunks : (kChunks + 1) / 2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        load_chunks<kChunks * kPerChunk>(
            words[r], there + t * key_codes + ((8 * r + g) * (kept / 8) + c * own) * kPerChunk, own * kPerChunk);
      float sum[2][4] = {};
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        uint32_t word[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
          word[r] = kBits == 4 ? words[r][i] : __byte_perm(words[r][i / 2], 0, i % 2 == 0 ? 0x4140 : 0x4342);
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const uint32_t a[4] = {codes_at<kBits>(word[0], j), codes_at<kBits>(word[1], j),
                                 codes_at<kBits>(word[0], j + 1), codes_at<kBits>(word[1], j + 1)};
          mma(sum[j / 2], a, scaled[4 * i + j], scaled[4 * i + j + 1], tag);
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) s[t][e] = fmaf(sum[0][e] + sum[1][e], unit * kCodeUnit, start[e % 2]);
    }
    if (cap > 0.0f) {
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) s[i / 4][i % 4] = fmaf(cap, tanhf(s[i / 4][i % 4]), shift[i % 2]);
    }
    if (kListed && (at.from > 0 || at.to < kTokenTile)) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (g + 8 * (e / 2) < at.from || g + 8 * (e / 2) >= at.to) s[0][e] = kMinusInfinity;
    }
    const uint8_t* codes = there + Tiles::kKeys;
    const auto* grids = reinterpret_cast<const uint32_t*>(codes + kTiles * Tiles::kCodes);
    constexpr int kGridWords = 16 * kGroups;  // of a tile: scales, then minima
    uint32_t largest = 0, weights[kTiles][2];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < kGridWords / 2; i += 32)
        if (kGridWords / 2 % 32 == 0 || lane < kGridWords / 2)
          largest = __vmaxu2(largest, grids[t * kGridWords + i + lane]);
    }
    sums.weigh(s, largest, weights);
    // Codes are not below 0, and minima seldom above: both sums are far larger than what is left of them, and products
    // cut their sums off towards zero. So those of these rows start from 0 and are added rounded.
    uint32_t v[kTiles][kWords], scale[kTiles][2][kGroups];
    float more[4] = {};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const uint32_t* grid = grids + t * kGridWords;
      const int of_group = 8 * kGroups + c * kGroups + g;
      sums.add_extra(more, weights[t], g < kGroups ? grid[of_group] : 0u,
                     g < kGroups ? grid[of_group + 4 * kGroups] : 0u, g);
      load_value_words<kWords>(v[t], reinterpret_cast<const uint32_t*>(codes + t * Tiles::kCodes), lane);
      load_chunks<kGroups * 4>(scale[t][0], grid + c * kGroups, kGroups * 4);
      load_chunks<kGroups * 4>(scale[t][1], grid + (c + 4) * kGroups, kGroups * 4);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) sums.extra[e] += more[e];
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      float sum[2][4] = {};
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint32_t b0 = times(weights[t][0], scale[t][0][i]), b1 = times(weights[t][1], scale[t][1][i]);
        const int at_word = kBits == 4 ? i : i / 2, down = kBits == 2 && i % 2 == 1 ? 8 : 0;
        const uint32_t upper = v[t][at_word] >> down, lower = v[t][kWords / 2 + at_word] >> down;
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const uint32_t a[4] = {codes_at<kBits>(upper, j), codes_at<kBits>(upper, j + 1), codes_at<kBits>(lower, j),
                                 codes_at<kBits>(lower, j + 1)};
          mma(sum[j / 2], a, b0, b1, tag);
        }
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) sums.out[2 * i + e / 4][e % 4] += sum[e / 4][e % 4];
    }
  }
  await_copies<0>();
  __syncthreads();
  sums.leave(*reinterpret_cast<typename Sums::Shared*>(shared), p.scratch, first_head, heads, split,
             [](int j) { return kCodeUnit / places<kBits>(j); });
}

template <int kBits, int kTiles>
Status run(const OldArgs& p, CardStreamHandle stream) {
  const int group = p.a.heads / p.a.old.kv_heads;
  const dim3 grid(unsigned(p.scratch.splits), unsigned(p.a.old.kv_heads), unsigned((group + kColumns - 1) / kColumns));
  const auto launch = [&]<int kDim>(std::integral_constant<int, kDim>) {
    using Tiles = CodeTiles<kBits, kDim, kTiles>;
    return launch_close_with("attend_codes", attend_codes_kernel<kBits, kDim, kTiles>, grid, Tiles::kWarps * 32,
                             Tiles::kWarps * Tiles::kStages * Tiles::kBytes, stream, p);
  };
  switch (p.a.old.dim) {
    case 64: return launch(std::integral_constant<int, 64>());
    case 128: return launch(std::integral_constant<int, 128>());
    case 256: return launch(std::integral_constant<int, 256>());
    default: return Status(Code::kInternal, "attend_codes: head dimension");
  }
}

}  // namespace

Status attend_codes(const OldArgs& p, CardStreamHandle stream) {
  const bool two = p.a.old.type == KvType::kKivi2;
  if (p.list.tiles != nullptr) return two ? run<2, 1>(p, stream) : run<4, 1>(p, stream);
  return two ? run<2, 2>(p, stream) : run<4, 2>(p, stream);
}

}  // namespace longkv::card
