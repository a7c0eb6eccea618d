// Attention of a decoded token over rows in codes of 2 and 4 bits (cuda/old.h). Codes are never decoded: with the bits
// of others masked off, a pair of them is a pair of halves below 2^-14, which products take exactly (attend_heads.cuh).
// A key's grid is by channel: scales are multiplied into the query, and the query's product with the minima is where
// scores start, both once for 32 rows. A value's grid is by row and 32 channels: scales are multiplied into the
// weights, and the weights' products with the minima, one number for 32 channels, are summed on their own. Tiles of 16
// rows wait in shared memory, so that a warp computes while others arrive.
#include <algorithm>

#include "cuda/async.cuh"
#include "cuda/attend_old.cuh"
#include "cuda/old_rows.cuh"

namespace longkv::card {

namespace {

template <int kBits, int kDim>
struct CodeTiles {
  static constexpr int kGroups = kDim / 32;
  // Bytes of a tile: codes of K and of V, scales and minima of K, of V.
  static constexpr int kCodes = 2 * kBits * kDim, kKeyGrid = 4 * kDim, kValueGrid = 2 * kDim;
  static constexpr int kBytes = 2 * kCodes + kKeyGrid + kValueGrid;
  static constexpr int kWarps = kDim == 256 ? 4 : 8;
  static constexpr int kStages = std::min(4, 48000 / (kWarps * kBytes));
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

template <int kBits, int kDim>
__global__ void __launch_bounds__(CodeTiles<kBits, kDim>::kWarps * 32, kDim == 256 ? 1 : 2)
    attend_codes_kernel(OldArgs p) {
  using Tiles = CodeTiles<kBits, kDim>;
  using Format = OldFormat<kBits>;
  constexpr int kChunks = kDim / 32, kGroups = Tiles::kGroups, kWarps = Tiles::kWarps, kStages = Tiles::kStages;
  constexpr int kWords = Format::value_words(kDim);
  using Sums = HeadSums<kDim, kWarps>;
  __shared__ __align__(16) union {
    uint8_t staged[kWarps][kStages][Tiles::kBytes];
    typename Sums::Shared end;
  } shared;
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

  const bool listed = p.list.tiles != nullptr;
  const int2* list = reinterpret_cast<const int2*>(p.list.tiles) + kv_head * p.list.stride;
  const int64_t tiles = listed ? p.list.count[kv_head] : (end - old.sink) / kTokenTile;
  // Two neighbouring tiles, which share grids of K, belong to one warp.
  const int64_t per_split = ((tiles + p.scratch.splits - 1) / p.scratch.splits + 1) / 2 * 2;
  const int64_t tile_end = min(tiles, (split + 1) * per_split), tile_begin = split * per_split + 2 * warp;
  const auto tile_of = [&](int64_t k) { return tile_begin + k / 2 * (2 * kWarps) + k % 2; };
  struct Place {
    int64_t step;  // below 0: these rows are not among the encoded ones
    int half, from, to;
  };
  const auto place_of = [&](int64_t tile) {
    if (tile >= tile_end) return Place{-1, 0, 0, 0};
    if (!listed) return Place{tile / 2, int(tile % 2), 0, kTokenTile};
    const int2 at = list[tile];
    const int64_t first = at.x / kTokenTile * kTokenTile;
    if (first < old.sink || first >= end) return Place{-1, 0, 0, 0};
    const int64_t from = first - old.sink;
    return Place{from / kOldStep, int(from % kOldStep / kTokenTile), int(at.x - first), int(at.x - first + at.y)};
  };
  const int kept = head.kept, own = kept / 32;  // chunks of a K row that a lane has
  const auto fetch = [&](int64_t k, int stage) {
    const Place at = place_of(tile_of(k));
    if (at.step >= 0) {
      uint8_t* to = shared.staged[warp][stage];
      const uint8_t* keys = head.k + at.step * old_step_bytes(Format::kType, kept);
      const uint8_t* values = head.v + at.step * old_step_bytes(Format::kType, kDim);
      const auto copy = [&](int offset, const uint8_t* from, int most, int bytes) {
#pragma unroll
        for (int i = 0; i < most; i += 512)
          if (i + lane * 16 < bytes) copy_ahead(to + offset + i + lane * 16, from + i + lane * 16);
      };
      const int key_codes = 2 * kBits * kept;
      copy(0, keys + at.half * key_codes, Tiles::kCodes, key_codes);
      copy(Tiles::kCodes, keys + 2 * key_codes, Tiles::kKeyGrid, 4 * kept);
      copy(Tiles::kCodes + Tiles::kKeyGrid, values + at.half * Tiles::kCodes, Tiles::kCodes, Tiles::kCodes);
      copy(2 * Tiles::kCodes + Tiles::kKeyGrid, values + 2 * Tiles::kCodes + at.half * Tiles::kValueGrid,
           Tiles::kValueGrid, Tiles::kValueGrid);
    }
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) fetch(i, i);

  // A lane's share of head g's query, as keys have it; what the softmax adds to scores of heads 2 c and 2 c + 1.
  uint32_t q[4 * kChunks], scaled[4 * kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    uint4 words = make_uint4(0, 0, 0, 0);
    if (g < heads && i < own)
      words = *reinterpret_cast<const uint4*>(p.a.q + int64_t(first_head + g) * kDim + (c * own + i) * 8);
#pragma unroll
    for (int j = 0; j < 4; ++j) q[4 * i + j] = word_of(words, j), scaled[4 * i + j] = 0;
  }
  float shift[2] = {0.0f, 0.0f}, start[2] = {0.0f, 0.0f};
  if (p.a.shift != nullptr) {
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (2 * c + e < heads) shift[e] = p.a.shift[first_head + 2 * c + e] * kLog2E;
  }
  Sums sums;
  int64_t step = -1;
  int stage = 0;
  for (int64_t k = 0; tile_of(k / 2 * 2) < tile_end; ++k) {
    await_copies<kStages - 2>();
    __syncwarp();
    // To where the tile before this one was, which every lane has read.
    fetch(k + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
    const uint8_t* here = shared.staged[warp][stage];
    stage = stage == kStages - 1 ? 0 : stage + 1;
    const Place at = place_of(tile_of(k));
    if (at.step < 0) continue;
    if (at.step != step) {
      step = at.step;
      const auto* grid = reinterpret_cast<const uint4*>(here + Tiles::kCodes);
      float low[4] = {};
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        if (i >= own) continue;  // the same for the whole block
        const uint4 scale = grid[c * own + i], least = grid[kept / 8 + c * own + i];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t place = half2_bits(__half2half2(__float2half_rn(1.0f / places<kBits>(j))));
          const uint32_t product = times(q[4 * i + j], word_of(scale, j));
          scaled[4 * i + j] = places<kBits>(j) == 1.0f ? product : times(product, place);
        }
        const uint32_t first[4] = {least.x, least.x, least.y, least.y};
        const uint32_t second[4] = {least.z, least.z, least.w, least.w};
        mma(low, first, q[4 * i], q[4 * i + 1], tag);
        mma(low, second, q[4 * i + 2], q[4 * i + 3], tag);
      }
      start[0] = low[0] * (1.0f / kCodeUnit), start[1] = low[1] * (1.0f / kCodeUnit);
    }
    // Rows g ([0] and [1]) and g + 8 under heads 2 c and 2 c + 1.
    float s[4] = {start[0], start[1], start[0], start[1]};
    {
      constexpr int kPerChunk = kBits == 4 ? 4 : 2;  // bytes
      uint32_t words[2][kBits == 4 ? kChunks : (kChunks + 1) / 2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        load_chunks<kChunks * kPerChunk>(words[r], here + ((8 * r + g) * (kept / 8) + c * own) * kPerChunk,
                                         own * kPerChunk);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        if (i >= own) continue;
        uint32_t word[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
          word[r] = kBits == 4 ? words[r][i] : __byte_perm(words[r][i / 2], 0, i % 2 == 0 ? 0x4140 : 0x4342);
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const uint32_t a[4] = {codes_at<kBits>(word[0], j), codes_at<kBits>(word[1], j),
                                 codes_at<kBits>(word[0], j + 1), codes_at<kBits>(word[1], j + 1)};
          mma(s, a, scaled[4 * i + j], scaled[4 * i + j + 1], tag);
        }
      }
    }
    // In units of log 2.
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float x = s[e] * (kCodeUnit * p.a.scale);
      if (p.a.softcap > 0.0f) x = p.a.softcap * tanhf(x / p.a.softcap);
      s[e] = fmaf(x, kLog2E, shift[e % 2]);
    }
    if (at.from > 0 || at.to < kTokenTile) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (g + 8 * (e / 2) < at.from || g + 8 * (e / 2) >= at.to) s[e] = kMinusInfinity;
    }
    uint32_t weights[2];
    sums.weigh(s, weights);
    const uint8_t* values = here + Tiles::kCodes + Tiles::kKeyGrid;
    const auto* grid = reinterpret_cast<const uint32_t*>(values + Tiles::kCodes);
    const int of_group = 8 * kGroups + c * kGroups + g;
    sums.add_extra(weights, g < kGroups ? grid[of_group] : 0u, g < kGroups ? grid[of_group + 4 * kGroups] : 0u, g);
    uint32_t v[kWords], scale[2][kGroups];
    load_value_words<kWords>(v, reinterpret_cast<const uint32_t*>(values), lane);
    load_chunks<kGroups * 4>(scale[0], grid + c * kGroups, kGroups * 4);
    load_chunks<kGroups * 4>(scale[1], grid + (c + 4) * kGroups, kGroups * 4);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const uint32_t b0 = times(weights[0], scale[0][i]), b1 = times(weights[1], scale[1][i]);
      const int at_word = kBits == 4 ? i : i / 2, down = kBits == 2 && i % 2 == 1 ? 8 : 0;
      const uint32_t upper = v[at_word] >> down, lower = v[kWords / 2 + at_word] >> down;
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const uint32_t a[4] = {codes_at<kBits>(upper, j), codes_at<kBits>(upper, j + 1), codes_at<kBits>(lower, j),
                               codes_at<kBits>(lower, j + 1)};
        mma(sums.out[2 * i + j / 2], a, b0, b1, tag);
      }
    }
  }
  await_copies<0>();
  __syncthreads();
  sums.leave(
      shared.end, p.scratch, first_head, heads, split, [](int j) { return places<kBits>(j); }, 1.0f);
}

template <int kBits>
Status run(const OldArgs& p, CardStreamHandle stream) {
  const int group = p.a.heads / p.a.old.kv_heads;
  const dim3 grid(unsigned(p.scratch.splits), unsigned(p.a.old.kv_heads), unsigned((group + kColumns - 1) / kColumns));
  const auto launch = [&](auto kernel, int warps) {
    return launch_close("attend_codes", kernel, grid, unsigned(warps) * 32, stream, p);
  };
  switch (p.a.old.dim) {
    case 64: return launch(attend_codes_kernel<kBits, 64>, CodeTiles<kBits, 64>::kWarps);
    case 128: return launch(attend_codes_kernel<kBits, 128>, CodeTiles<kBits, 128>::kWarps);
    case 256: return launch(attend_codes_kernel<kBits, 256>, CodeTiles<kBits, 256>::kWarps);
    default: return Status(Code::kInternal, "attend_codes: head dimension");
  }
}

}  // namespace

Status attend_codes(const OldArgs& p, CardStreamHandle stream) {
  return p.a.old.type == KvType::kKivi2 ? run<2>(p, stream) : run<4>(p, stream);
}

}  // namespace longkv::card
