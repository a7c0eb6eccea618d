// Attention of a decoded token over rows of q8_0 and q4_0, tiles of 16 rows as attend_heads.cuh has them. Codes of keys
// are not decoded: with the bits of others masked off they are halves below 2^-14, whose sums of 32 channels scales
// multiply; what they are too large by (128 or 8) comes off as one number for 32 channels of a query. Those of values
// become halves, which are the codes exactly, and scales multiply the weights. Tiles wait in shared memory, so that a
// warp computes while others arrive; pieces of 16 bytes of a row lie there so that the rows that lanes read together
// are in different banks.
#include <algorithm>

#include "cuda/async.cuh"
#include "cuda/attend_heads.cuh"
#include "cuda/attend_quant.cuh"

namespace longkv::card {

namespace {

// kListed: the tiles of a list, else all.
template <int kBits, int kDim, bool kListed>
struct QuantTiles {
  static constexpr int kGroups = kDim / 32;
  static constexpr int kRow = kDim * kBits / 8, kPieces = kRow / 16;  // bytes and pieces of a row's codes
  // Bytes of a tile of K, or of V: codes, scales.
  static constexpr int kCodes = kTokenTile * kRow, kScales = kTokenTile * kGroups * 2, kSide = kCodes + kScales;
  static constexpr int kTiles = !kListed && kSide < 2000 ? 2 : 1;  // that a warp takes at a time
  static constexpr int kStage = kTiles * 2 * kSide + (kListed ? 16 : 0);  // bytes; of a list also which rows count
  static constexpr int kWarps = kDim == 256 ? 4 : 8;
  static constexpr int kStages = std::min(4, 96000 / (kWarps * kStage));
  static constexpr float kOffset = kBits == 8 ? 128.0f : 8.0f;
  static_assert(kStages >= 2);
  // Of two rows whose banks are the same and that lanes read together, the pieces that change places differ.
  static __device__ __forceinline__ int piece(int row, int at) {
    if constexpr (kBits == 8) {
      return at ^ (2 * ((row ^ row >> 2) & 3) & (kPieces - 1));
    } else {
      return at ^ (row / (8 / kPieces) & (kPieces - 1));
    }
  }
};

// Two codes as halves below 2^-14, less their offset, in units of kValueUnit; `factor` makes them such units.
constexpr float kValueUnit = 0x1p-9f;
template <int kOffset>
__device__ __forceinline__ uint32_t value_pair(uint32_t codes, uint32_t factor) {
  return half2_bits(__hfma2(bits_half2(codes), bits_half2(factor), __float2half2_rn(-kOffset * kValueUnit)));
}

// Pairs j of a chunk of K's eight channels, whose places are place(j); of four channels of V those of two rows.
template <int kBits>
struct QuantCodes;
template <>
struct QuantCodes<4> {
  static __device__ __forceinline__ float place(int j) { return j % 2 == 0 ? 1.0f : 16.0f; }
  static __device__ __forceinline__ void key(const uint8_t* chunk, uint32_t (&pairs)[4]) {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(chunk);
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = (j < 2 ? word : word >> 8) & (0x000f000fu << (4 * (j % 2)));
  }
  // Channels 4 g to 4 g + 3 of two rows' pieces of 32.
  static __device__ __forceinline__ void value(const uint8_t* first, const uint8_t* second, int g,
                                               uint32_t (&pairs)[4]) {
    const uint32_t a = reinterpret_cast<const uint32_t*>(first)[g / 2],
                   b = reinterpret_cast<const uint32_t*>(second)[g / 2];
    const unsigned from = g % 2 == 0 ? 0x4400u : 0x5511u;  // bytes of the channels' even numbers
    const uint32_t bytes[2] = {__byte_perm(a, b, from), __byte_perm(a, b, from + 0x2222u)};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      pairs[j] = value_pair<8>(bytes[j] & 0x000f000fu, 0x78007800u);
      pairs[2 + j] = value_pair<8>(bytes[j] & 0x00f000f0u, 0x68006800u);
    }
  }
};
template <>
struct QuantCodes<8> {
  static __device__ __forceinline__ float place(int) { return 1.0f; }
  static __device__ __forceinline__ void key(const uint8_t* chunk, uint32_t (&pairs)[4]) {
    const uint2 words = *reinterpret_cast<const uint2*>(chunk);
    pairs[0] = __byte_perm(words.x ^ 0x80808080u, 0, 0x4140), pairs[1] = __byte_perm(words.x ^ 0x80808080u, 0, 0x4342);
    pairs[2] = __byte_perm(words.y ^ 0x80808080u, 0, 0x4140), pairs[3] = __byte_perm(words.y ^ 0x80808080u, 0, 0x4342);
  }
  // first and second: of the piece that has the channels. With the sign bit turned a byte is 128 too large.
  static __device__ __forceinline__ void value(const uint8_t* first, const uint8_t* second, int g,
                                               uint32_t (&pairs)[4]) {
    const uint32_t a = reinterpret_cast<const uint32_t*>(first)[g % 4] ^ 0x80808080u,
                   b = reinterpret_cast<const uint32_t*>(second)[g % 4] ^ 0x80808080u;
    constexpr unsigned kBytes[4] = {0x5410u, 0x6521u, 0x7632u, 0x4703u};
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = value_pair<128>(__byte_perm(a, b, kBytes[j]) & 0x00ff00ffu, 0x78007800u);
  }
};

template <int kBits, int kDim, bool kListed>
__global__ void __launch_bounds__(QuantTiles<kBits, kDim, kListed>::kWarps * 32, kDim == 256 ? 1 : 2)
    attend_quant_kernel(TokenArgs p) {
  using Tiles = QuantTiles<kBits, kDim, kListed>;
  using Codes = QuantCodes<kBits>;
  constexpr int kGroups = Tiles::kGroups, kWarps = Tiles::kWarps, kStages = Tiles::kStages, kTiles = Tiles::kTiles;
  constexpr int kPerGroup = kBits / 4;  // pieces
  constexpr int kRound = kWarps * kTiles;
  using Sums = HeadSums<kDim, kWarps>;
  extern __shared__ __align__(16) uint8_t shared[];  // [kWarps][kStages][kStage]; in the end Sums::Shared
  static_assert(sizeof(typename Sums::Shared) <= kWarps * kStages * Tiles::kStage);
  const __half* const tag = nullptr;

  let_next_start();
  wait_for_previous();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int split = int(blockIdx.x), kv_head = int(blockIdx.y);
  const CardKv& kv = p.a.kv;
  const int group = p.a.heads / kv.kv_heads;
  const int first_head = kv_head * group + int(blockIdx.z) * kColumns;
  const int heads = min(group - int(blockIdx.z) * kColumns, kColumns);
  const int64_t rows = *p.position + 1;
  const int64_t begin = p.a.window > 0 && rows > p.a.window ? rows - p.a.window : 0;
  const int64_t origin = kListed ? 0 : begin / kTokenTile * kTokenTile;
  // Tiles are counted from `origin`, or in the list.
  const int tiles = kListed ? p.list.count[kv_head] : int((rows - origin + kTokenTile - 1) / kTokenTile);
  const int per_split = ((tiles + p.scratch.splits - 1) / p.scratch.splits + kTiles - 1) / kTiles * kTiles;
  const int tile_end = min(tiles, (split + 1) * per_split), tile_begin = split * per_split + warp * kTiles;
  if (split * per_split >= tiles) return leave_nothing(p.scratch, first_head, heads, split);
  const int last_whole = int((rows - origin) / kTokenTile);  // tiles from here on are not whole
  const int64_t first_row = kv_head * kv.capacity + origin + (kListed ? 0 : int64_t(tile_begin) * kTokenTile);
  // Where a lane's pieces of codes go in a tile's side.
  int place[Tiles::kCodes / 512];
  static_assert(Tiles::kCodes % 512 == 0);
#pragma unroll
  for (int i = 0; i < Tiles::kCodes / 512; ++i) {
    const int from = 32 * i + lane, r = from / Tiles::kPieces;
    place[i] = (r * Tiles::kPieces + Tiles::piece(r, from % Tiles::kPieces)) * 16;
  }
  const uint8_t* codes[2] = {kv.k + first_row * Tiles::kRow + lane * 16, kv.v + first_row * Tiles::kRow + lane * 16};
  const uint8_t* scales[2] = {reinterpret_cast<const uint8_t*>(kv.k_scale + first_row * kGroups) + lane * 16,
                              reinterpret_cast<const uint8_t*>(kv.v_scale + first_row * kGroups) + lane * 16};
  // A tile so many rows behind `first_row`.
  const auto copy_tile = [&](uint8_t* to, int64_t behind) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
#pragma unroll
      for (int i = 0; i < Tiles::kCodes / 512; ++i)
        copy_ahead(to + side * Tiles::kSide + place[i], codes[side] + behind * Tiles::kRow + i * 512);
      if (lane < Tiles::kScales / 16)
        copy_ahead(to + side * Tiles::kSide + Tiles::kCodes + lane * 16, scales[side] + behind * (2 * kGroups));
    }
  };
  const auto fetch = [&](int tile, uint8_t* stage) {
    if constexpr (kListed) {
      uint32_t seen = 0;
      if (tile < tile_end) {
        const int64_t at_list = kv_head * p.list.stride + tile;
        const int2 at = reinterpret_cast<const int2*>(p.list.tiles)[at_list];
        const int first = at.x / kTokenTile * kTokenTile;
        const int64_t known = p.list.placed ? int64_t(first) + kTokenTile : rows;
        const int from = int(max(int64_t(at.x), p.list.placed ? 0 : begin) - first),
                  to = int(min(int64_t(at.x) + at.y, known) - first);
        seen = to > from ? ((1u << to) - 1) & ~((1u << from) - 1) : 0;
        if (p.list.marks != nullptr) seen &= p.list.marks[at_list] << (at.x - first);
        if (seen != 0) copy_tile(stage, first);
      }
      if (lane == 0) *reinterpret_cast<uint32_t*>(stage + 2 * Tiles::kSide) = seen;
    } else {
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
        if (tile + t < tile_end) copy_tile(stage + 2 * t * Tiles::kSide, t * kTokenTile);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        codes[side] += kRound * Tiles::kCodes;
        scales[side] += kRound * Tiles::kScales;
      }
    }
    commit_copies();
  };
  uint8_t* const stages = shared + warp * (kStages * Tiles::kStage);
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) fetch(tile_begin + i * kRound, stages + i * Tiles::kStage);

  // A lane's share of head g's query. `means`: of 32 channels each, what its halves leave behind; keys' scales times
  // these are what codes' offsets add to scores.
  uint32_t q[4 * kGroups], means[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    uint4 words = make_uint4(0, 0, 0, 0);
    if (g < heads) words = *reinterpret_cast<const uint4*>(p.a.q + int64_t(first_head + g) * kDim + (4 * i + c) * 8);
    float mean = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t place = half2_bits(__half2half2(__float2half_rn(1.0f / Codes::place(j))));
      q[4 * i + j] = Codes::place(j) == 1.0f ? word_of(words, j) : times(word_of(words, j), place);
      const float2 both = __half22float2(bits_half2(word_of(words, j)));
      mean += (both.x + both.y) * (1.0f / 32.0f);
    }
    mean += __shfl_xor_sync(kAllLanes, mean, 1);
    mean += __shfl_xor_sync(kAllLanes, mean, 2);
    const __half high = __float2half_rn(mean), low = __float2half_rn(mean - __half2float(high));
    if (c == i / 2) {
      means[0] |= uint32_t(__half_as_ushort(high)) << (i % 2 * 16);
      means[1] |= uint32_t(__half_as_ushort(low)) << (i % 2 * 16);
    }
  }
  // Scores in units of log 2; with a cap, in units of the cap until then.
  const float cap = p.a.softcap > 0.0f ? p.a.softcap * kLog2E : 0.0f;
  const float unit = kCodeUnit * p.a.scale * (p.a.softcap > 0.0f ? 1.0f / p.a.softcap : kLog2E);
  Sums sums;
  uint8_t *here = stages, *behind = stages + (kStages - 1) * Tiles::kStage;
  for (int tile = tile_begin; tile < tile_end; tile += kRound) {
    await_copies<kStages - 2>();
    __syncwarp();
    // To where the tiles before these were, which every lane has read.
    fetch(tile + (kStages - 1) * kRound, behind);
    uint32_t seen[kTiles];
    bool whole;
    if constexpr (kListed) {
      seen[0] = *reinterpret_cast<const uint32_t*>(here + 2 * Tiles::kSide);
      whole = seen[0] == 0xffff;
    } else {
      whole = tile + kTiles <= min(last_whole, tile_end) && (tile > 0 || begin == origin);
    }
    if (!whole) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        if constexpr (!kListed) {
          const int64_t first = origin + int64_t(tile + t) * kTokenTile;
          seen[t] = tile + t < tile_end ? 0xffff : 0;
          if (first < begin) seen[t] &= ~0u << (begin - first);
          if (first + kTokenTile > rows) seen[t] &= first < rows ? (1u << (rows - first)) - 1 : 0;
        }
        // Of rows that are not attended scales may be anything.
        auto* to = reinterpret_cast<uint16_t*>(here + (2 * t + 1) * Tiles::kSide + Tiles::kCodes);
        for (int i = lane; i < kTokenTile * kGroups; i += 32)
          if (!(seen[t] >> (i / kGroups) & 1)) to[i] = 0;
      }
      __syncwarp();
    }
    float s[kTiles][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const uint8_t* keys = here + 2 * t * Tiles::kSide;
      uint32_t scale[2][kGroups / 2], share[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint8_t* from = keys + Tiles::kCodes + (8 * r + g) * kGroups * 2;
        load_chunks<kGroups * 2>(scale[r], from, kGroups * 2);
        share[r] = reinterpret_cast<const uint32_t*>(from)[c % (kGroups / 2)];
      }
      float offset[4] = {};
      const uint32_t shares[4] = {share[0], share[1], share[0], share[1]};
      mma(offset, shares, means[0], means[1], tag);
#pragma unroll
      for (int e = 0; e < 4; ++e) s[t][e] = offset[e] * (-32.0f * Tiles::kOffset / kCodeUnit);
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        uint32_t pairs[2][4];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = 8 * r + g, piece = i * kPerGroup + c * kPerGroup / 4;
          Codes::key(keys + (row * Tiles::kPieces + Tiles::piece(row, piece)) * 16 + c * kBits % 16, pairs[r]);
        }
        float d[4] = {};
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const uint32_t a[4] = {pairs[0][j], pairs[1][j], pairs[0][j + 1], pairs[1][j + 1]};
          mma(d, a, q[4 * i + j], q[4 * i + j + 1], tag);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const __half2 both = bits_half2(scale[r][i / 2]);
          const float factor = i % 2 == 0 ? __low2float(both) : __high2float(both);
          s[t][2 * r] = fmaf(factor, d[2 * r], s[t][2 * r]);
          s[t][2 * r + 1] = fmaf(factor, d[2 * r + 1], s[t][2 * r + 1]);
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) s[t][e] *= unit;
    }
    if (cap > 0.0f) {
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) s[i / 4][i % 4] = cap * tanhf(s[i / 4][i % 4]);
    }
    if (!whole) {
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i)
        if (!(seen[i / 4] >> (g + 8 * (i % 4 / 2)) & 1)) s[i / 4][i % 4] = kMinusInfinity;
    }
    uint32_t largest = 0;
    constexpr int kScaleWords = kGroups * 8;  // of a tile
#pragma unroll
    for (int i = 0; i < kTiles * kScaleWords; i += 32) {
      const int at = i + lane;
      if (kTiles * kScaleWords < 32 && at >= kTiles * kScaleWords) continue;
      const auto* words = reinterpret_cast<const uint32_t*>(
          here + (2 * (at / kScaleWords) + 1) * Tiles::kSide + Tiles::kCodes);
      largest = __vmaxu2(largest, words[at % kScaleWords] & 0x7fff7fffu);
    }
    uint32_t weights[kTiles][2];
    sums.weigh(s, largest, weights);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const uint8_t* values = here + (2 * t + 1) * Tiles::kSide;
      sums.add_extra(sums.extra, weights[t], 0, 0, g);
      // Scales of rows 2 c + r % 2 + 8 (r / 2).
      uint32_t scale[4][kGroups / 2];
#pragma unroll
      for (int r = 0; r < 4; ++r)
        load_chunks<kGroups * 2>(scale[r], values + Tiles::kCodes + (2 * c + r % 2 + r / 2 * 8) * kGroups * 2,
                                 kGroups * 2);
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        uint32_t pairs[2][4], b[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = 2 * c + 8 * r, piece = i * kPerGroup + g * kPerGroup / 8;
          Codes::value(values + (row * Tiles::kPieces + Tiles::piece(row, piece)) * 16,
                       values + ((row + 1) * Tiles::kPieces + Tiles::piece(row + 1, piece)) * 16, g, pairs[r]);
          b[r] = times(weights[t][r],
                       __byte_perm(scale[2 * r][i / 2], scale[2 * r + 1][i / 2], i % 2 == 0 ? 0x5410 : 0x7632));
        }
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const uint32_t a[4] = {pairs[0][j], pairs[0][j + 1], pairs[1][j], pairs[1][j + 1]};
          mma(sums.out[2 * i + j / 2], a, b[0], b[1], tag);
        }
      }
    }
    behind = here;
    here = here == stages + (kStages - 1) * Tiles::kStage ? stages : here + Tiles::kStage;
  }
  await_copies<0>();
  __syncthreads();
  sums.leave(*reinterpret_cast<typename Sums::Shared*>(shared), p.scratch, first_head, heads, split,
             [](int) { return 1.0f / kValueUnit; });
}

template <int kBits, bool kListed>
Status run(const TokenArgs& p, CardStreamHandle stream) {
  const int group = p.a.heads / p.a.kv.kv_heads;
  const dim3 grid(unsigned(p.scratch.splits), unsigned(p.a.kv.kv_heads), unsigned((group + kColumns - 1) / kColumns));
  const auto launch = [&]<int kDim>(std::integral_constant<int, kDim>) {
    using Tiles = QuantTiles<kBits, kDim, kListed>;
    return launch_close_with("attend_quant", attend_quant_kernel<kBits, kDim, kListed>, grid, Tiles::kWarps * 32,
                             Tiles::kWarps * Tiles::kStages * Tiles::kStage, stream, p);
  };
  switch (p.a.kv.dim) {
    case 64: return launch(std::integral_constant<int, 64>());
    case 128: return launch(std::integral_constant<int, 128>());
    case 256: return launch(std::integral_constant<int, 256>());
    default: return Status(Code::kInternal, "attend_quant: head dimension");
  }
}
template <int kBits>
Status run(const TokenArgs& p, CardStreamHandle stream) {
  return p.list.tiles != nullptr ? run<kBits, true>(p, stream) : run<kBits, false>(p, stream);
}

}  // namespace

bool attends_quant(const CardKv& kv) {
  return (kv.type == KvType::kQ4_0 || kv.type == KvType::kQ8_0) && kv.dim % 64 == 0 && kv.capacity % kTokenTile == 0;
}
Status attend_quant(const TokenArgs& p, CardStreamHandle stream) {
  return p.a.kv.type == KvType::kQ4_0 ? run<4>(p, stream) : run<8>(p, stream);
}

}  // namespace longkv::card
