// Attention of a decoded token over rows of q8_0 and q4_0, tiles of 16 rows as attend_heads.cuh has them. Codes are not
// decoded: with the bits of others masked off they are halves below 2^-14. Scales are by row and 32 channels: those of
// keys multiply the sums of 32 channels, those of values the weights. What codes are too large by (128 or 8) comes off
// as one number for 32 channels. Tiles wait in shared memory, so that a warp computes while others arrive; pieces of 16
// bytes of a row lie there so that the rows that lanes read together are in different banks.
#include <algorithm>

#include "cuda/async.cuh"
#include "cuda/attend_heads.cuh"
#include "cuda/attend_quant.cuh"

namespace longkv::card {

namespace {

template <int kBits, int kDim>
struct QuantTiles {
  static constexpr int kGroups = kDim / 32;
  static constexpr int kRow = kDim * kBits / 8, kPieces = kRow / 16;  // bytes and pieces of a row's codes
  // Bytes of a tile of K, or of V: codes, scales.
  static constexpr int kCodes = kTokenTile * kRow, kScales = kTokenTile * kGroups * 2, kSide = kCodes + kScales;
  static constexpr int kWarps = std::min(8, 24000 / (2 * kSide));
  static constexpr int kStages = std::min(4, 48000 / (kWarps * 2 * kSide));
  static constexpr float kOffset = kBits == 8 ? 128.0f : 8.0f;
  // Of two rows whose banks are the same and that lanes read together, the pieces that change places differ.
  static __device__ __forceinline__ int piece(int row, int at) {
    if constexpr (kBits == 8) {
      return at ^ (2 * ((row ^ row >> 2) & 3) & (kPieces - 1));
    } else {
      return at ^ (row / (8 / kPieces) & (kPieces - 1));
    }
  }
};

// Pairs j of a chunk of K's eight channels; of four channels of V, j of two rows. Their places: places(j).
template <int kBits>
struct QuantCodes;
template <>
struct QuantCodes<4> {
  static __device__ __forceinline__ float key_place(int j) { return j % 2 == 0 ? 1.0f : 16.0f; }
  static __device__ __forceinline__ float value_place(int j) { return j < 2 ? 1.0f : 16.0f; }
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
    const uint32_t even = __byte_perm(a, b, from), odd = __byte_perm(a, b, from + 0x2222u);
    pairs[0] = even & 0x000f000fu, pairs[1] = odd & 0x000f000fu;
    pairs[2] = even & 0x00f000f0u, pairs[3] = odd & 0x00f000f0u;
  }
};
template <>
struct QuantCodes<8> {
  static __device__ __forceinline__ float key_place(int) { return 1.0f; }
  static __device__ __forceinline__ float value_place(int) { return 1.0f; }
  static __device__ __forceinline__ void key(const uint8_t* chunk, uint32_t (&pairs)[4]) {
    const uint2 words = *reinterpret_cast<const uint2*>(chunk);
    pairs[0] = __byte_perm(words.x ^ 0x80808080u, 0, 0x4140), pairs[1] = __byte_perm(words.x ^ 0x80808080u, 0, 0x4342);
    pairs[2] = __byte_perm(words.y ^ 0x80808080u, 0, 0x4140), pairs[3] = __byte_perm(words.y ^ 0x80808080u, 0, 0x4342);
  }
  // first and second: of the piece that has the channels.
  static __device__ __forceinline__ void value(const uint8_t* first, const uint8_t* second, int g,
                                               uint32_t (&pairs)[4]) {
    const uint32_t a = reinterpret_cast<const uint32_t*>(first)[g % 4],
                   b = reinterpret_cast<const uint32_t*>(second)[g % 4];
    constexpr unsigned kBytes[4] = {0x5410u, 0x6521u, 0x7632u, 0x4703u};
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = (__byte_perm(a, b, kBytes[j]) ^ 0x00800080u) & 0x00ff00ffu;
  }
};

template <int kBits, int kDim>
__global__ void __launch_bounds__(QuantTiles<kBits, kDim>::kWarps * 32, kDim == 256 ? 1 : 2)
    attend_quant_kernel(TokenArgs p) {
  using Tiles = QuantTiles<kBits, kDim>;
  using Codes = QuantCodes<kBits>;
  constexpr int kGroups = Tiles::kGroups, kWarps = Tiles::kWarps, kStages = Tiles::kStages;
  constexpr int kPerGroup = kBits / 4;  // pieces
  using Sums = HeadSums<kDim, kWarps>;
  __shared__ __align__(16) union {
    uint8_t staged[kWarps][kStages][2 * Tiles::kSide];
    typename Sums::Shared end;
  } shared;
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
  const bool listed = p.list.tiles != nullptr;
  const int2* list = reinterpret_cast<const int2*>(p.list.tiles) + kv_head * p.list.stride;
  const int64_t origin = begin / kTokenTile * kTokenTile;
  const int64_t tiles = listed ? p.list.count[kv_head] : (rows - origin + kTokenTile - 1) / kTokenTile;
  const int64_t per_split = (tiles + p.scratch.splits - 1) / p.scratch.splits;
  const int64_t tile_end = min(tiles, (split + 1) * per_split), tile_begin = split * per_split + warp;
  // Rows [first, first + 16), of which those with a bit are attended.
  struct Place {
    int64_t first;
    uint32_t seen;
  };
  const auto place_of = [&](int64_t tile) {
    if (tile >= tile_end) return Place{0, 0};
    int64_t first = origin + tile * kTokenTile, from = max(first, begin), to = min(first + kTokenTile, rows);
    uint32_t marks = ~0u;
    if (listed) {
      const int2 at = list[tile];
      first = at.x / kTokenTile * kTokenTile;
      from = max(int64_t(at.x), p.list.placed ? 0 : begin);
      to = int64_t(at.x) + at.y;
      if (!p.list.placed) to = min(to, rows);
      if (p.list.marks != nullptr) marks = p.list.marks[kv_head * p.list.stride + tile] << (at.x - first);
    }
    if (to <= from) return Place{first, 0};
    return Place{first, marks & ((1u << (to - first)) - 1) & ~((1u << (from - first)) - 1)};
  };
  const auto fetch = [&](int64_t tile, int stage) {
    const Place at = place_of(tile);
    if (at.seen != 0) {
      const int64_t row = kv_head * kv.capacity + at.first;
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        uint8_t* to = shared.staged[warp][stage] + side * Tiles::kSide;
        const uint8_t* codes = (side == 0 ? kv.k : kv.v) + row * Tiles::kRow;
        const auto* scales = reinterpret_cast<const uint8_t*>((side == 0 ? kv.k_scale : kv.v_scale) + row * kGroups);
#pragma unroll
        for (int i = 0; i < Tiles::kCodes / 16; i += 32) {
          const int from = i + lane, r = from / Tiles::kPieces, piece = from % Tiles::kPieces;
          if (from < Tiles::kCodes / 16)
            copy_ahead(to + (r * Tiles::kPieces + Tiles::piece(r, piece)) * 16, codes + from * 16);
        }
        if (lane < Tiles::kScales / 16) copy_ahead(to + Tiles::kCodes + lane * 16, scales + lane * 16);
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) fetch(tile_begin + i * kWarps, i);

  // A lane's share of head g's query; what codes' offsets add to sums of 32 channels under heads 2 c and 2 c + 1.
  uint32_t q[4 * kGroups];
  float start[kGroups][2];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    uint4 words = make_uint4(0, 0, 0, 0);
    if (g < heads) words = *reinterpret_cast<const uint4*>(p.a.q + int64_t(first_head + g) * kDim + (4 * i + c) * 8);
    const uint32_t offset = half2_bits(__half2half2(__float2half_rn(Tiles::kOffset)));
    const uint32_t offsets[4] = {offset, offset, offset, offset};
    float sum[4] = {};
    mma(sum, offsets, words.x, words.y, tag);
    mma(sum, offsets, words.z, words.w, tag);
    start[i][0] = sum[0] * (-1.0f / kCodeUnit), start[i][1] = sum[1] * (-1.0f / kCodeUnit);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t place = half2_bits(__half2half2(__float2half_rn(1.0f / Codes::key_place(j))));
      q[4 * i + j] = Codes::key_place(j) == 1.0f ? word_of(words, j) : times(word_of(words, j), place);
    }
  }
  Sums sums;
  int stage = 0;
  for (int64_t tile = tile_begin; tile < tile_end; tile += kWarps) {
    await_copies<kStages - 2>();
    __syncwarp();
    // To where the tile before this one was, which every lane has read.
    fetch(tile + (kStages - 1) * kWarps, stage == 0 ? kStages - 1 : stage - 1);
    const uint8_t* keys = shared.staged[warp][stage];
    stage = stage == kStages - 1 ? 0 : stage + 1;
    const uint32_t seen = place_of(tile).seen;
    if (seen == 0) continue;
    const bool whole = seen == 0xffff;
    float s[4] = {};
    {
      uint32_t scale[2][(kGroups + 1) / 2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        load_chunks<kGroups * 2>(scale[r], keys + Tiles::kCodes + (8 * r + g) * kGroups * 2, kGroups * 2);
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        uint32_t pairs[2][4];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = 8 * r + g, piece = i * kPerGroup + c * kPerGroup / 4;
          Codes::key(keys + (row * Tiles::kPieces + Tiles::piece(row, piece)) * 16 + c * kBits % 16, pairs[r]);
        }
        float d[4] = {start[i][0], start[i][1], start[i][0], start[i][1]};
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const uint32_t a[4] = {pairs[0][j], pairs[1][j], pairs[0][j + 1], pairs[1][j + 1]};
          mma(d, a, q[4 * i + j], q[4 * i + j + 1], tag);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const __half2 both = bits_half2(scale[r][i / 2]);
          const float factor = i % 2 == 0 ? __low2float(both) : __high2float(both);
          s[2 * r] = fmaf(factor, d[2 * r], s[2 * r]), s[2 * r + 1] = fmaf(factor, d[2 * r + 1], s[2 * r + 1]);
        }
      }
    }
    // In units of log 2.
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float x = s[e] * (kCodeUnit * p.a.scale);
      if (p.a.softcap > 0.0f) x = p.a.softcap * tanhf(x / p.a.softcap);
      s[e] = whole || (seen >> (g + 8 * (e / 2)) & 1) ? x * kLog2E : kMinusInfinity;
    }
    uint32_t weights[2];
    sums.weigh(s, weights);
    const uint8_t* values = keys + Tiles::kSide;
    // Scales of rows 2 c + r % 2 + 8 (r / 2); those of rows that are not attended may be anything.
    uint32_t scale[4][(kGroups + 1) / 2], own[4] = {};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = 2 * c + r % 2 + r / 2 * 8;
      const uint8_t* from = values + Tiles::kCodes + row * kGroups * 2;
      load_chunks<kGroups * 2>(scale[r], from, kGroups * 2);
      if (g < kGroups) own[r] = reinterpret_cast<const uint16_t*>(from)[g];
      if (!whole && !(seen >> row & 1)) {
        own[r] = 0;
#pragma unroll
        for (int i = 0; i < (kGroups + 1) / 2; ++i) scale[r][i] = 0;
      }
    }
    sums.add_extra(weights, own[0] | own[1] << 16, own[2] | own[3] << 16, g);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      uint32_t pairs[2][4], b[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = 2 * c + 8 * r, piece = i * kPerGroup + g * kPerGroup / 8;
        Codes::value(values + (row * Tiles::kPieces + Tiles::piece(row, piece)) * 16,
                     values + ((row + 1) * Tiles::kPieces + Tiles::piece(row + 1, piece)) * 16, g, pairs[r]);
        b[r] =
            times(weights[r], __byte_perm(scale[2 * r][i / 2], scale[2 * r + 1][i / 2], i % 2 == 0 ? 0x5410 : 0x7632));
      }
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const uint32_t a[4] = {pairs[0][j], pairs[0][j + 1], pairs[1][j], pairs[1][j + 1]};
        mma(sums.out[2 * i + j / 2], a, b[0], b[1], tag);
      }
    }
  }
  await_copies<0>();
  __syncthreads();
  sums.leave(
      shared.end, p.scratch, first_head, heads, split, [](int j) { return Codes::value_place(j); }, -Tiles::kOffset);
}

template <int kBits>
Status run(const TokenArgs& p, CardStreamHandle stream) {
  const int group = p.a.heads / p.a.kv.kv_heads;
  const dim3 grid(unsigned(p.scratch.splits), unsigned(p.a.kv.kv_heads), unsigned((group + kColumns - 1) / kColumns));
  const auto launch = [&](auto kernel, int warps) {
    return launch_close("attend_quant", kernel, grid, unsigned(warps) * 32, stream, p);
  };
  switch (p.a.kv.dim) {
    case 64: return launch(attend_quant_kernel<kBits, 64>, QuantTiles<kBits, 64>::kWarps);
    case 128: return launch(attend_quant_kernel<kBits, 128>, QuantTiles<kBits, 128>::kWarps);
    case 256:
      if constexpr (kBits == 4) return launch(attend_quant_kernel<4, 256>, QuantTiles<4, 256>::kWarps);
      [[fallthrough]];
    default: return Status(Code::kInternal, "attend_quant: head dimension");
  }
}

}  // namespace

bool attends_quant(const CardKv& kv) {
  const bool there =
      kv.type == KvType::kQ4_0 ? kv.dim % 64 == 0 : kv.type == KvType::kQ8_0 && kv.dim % 64 == 0 && kv.dim < 256;
  return there && kv.capacity % kTokenTile == 0;
}
Status attend_quant(const TokenArgs& p, CardStreamHandle stream) {
  return p.a.kv.type == KvType::kQ4_0 ? run<4>(p, stream) : run<8>(p, stream);
}

}  // namespace longkv::card
