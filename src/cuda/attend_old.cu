// Attention of a decoded token over encoded rows (cuda/old.h). Codes become halves in the registers from which tensor
// cores take them; a key's grid is by channel, a value's by row and 32 channels.
#include "cuda/attend_token.cuh"
#include "cuda/old_rows.cuh"

namespace longkv::card {

namespace {

constexpr int kTile = kTokenTile;

struct OldArgs {
  AttendOldArgs a;
  TileList list;
  DecodeScratch scratch;
};

// A head whose old keys are gone: one score and the mean value for all of its rows.
template <int kDim>
__device__ void attend_means(const OldArgs& p, const OldHead& head, int64_t end, int kv_head, int first_head, int heads,
                             int split) {
  __shared__ float shared[32];
  const CardOld& old = p.a.old;
  float rows = 0.0f;
  if (p.list.tiles == nullptr) {
    rows = float(end - old.sink);
  } else {
    const int2* list = reinterpret_cast<const int2*>(p.list.tiles) + kv_head * p.list.stride;
    for (int t = int(threadIdx.x); t < p.list.count[kv_head]; t += int(blockDim.x))
      if (list[t].x >= old.sink && list[t].x < end) rows += float(list[t].y);
    rows = block_sum(rows, shared);
  }
  const bool counts = split == 0 && rows > 0.0f && head.mean_v != nullptr;
  for (int i = int(threadIdx.x); i < heads * kDim; i += int(blockDim.x)) {
    const int h = i / kDim, channel = i % kDim;
    const int64_t at = p.scratch.at(first_head + h, split);
    p.scratch.out[at * kDim + channel] = counts ? head.mean_v[channel] : 0.0f;
    if (channel == 0) p.scratch.lse[at] = counts ? logf(rows) + p.a.shift[first_head + h] : kMinusInfinity;
  }
}

template <int kBits, int kDim>
__global__ void __launch_bounds__(kTokenWarps * 32) attend_old_kernel(OldArgs p) {
  constexpr int kChunks = kDim / 32;
  using Sums = TokenSums<kDim, true>;
  constexpr int kPasses = Sums::kPasses;
  constexpr int kChunkBytes = kBits == 0 ? 16 : kBits;
  constexpr KvType kType = OldFormat<kBits>::kType;
  const __half* const tag = nullptr;
  __shared__ typename Sums::Shared shared;

  let_next_start();
  wait_for_previous();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int split = int(blockIdx.x), kv_head = int(blockIdx.y);
  const CardOld& old = p.a.old;
  const OldHead head = old.heads[kv_head];
  const int group = p.a.heads / old.kv_heads;
  const int first_head = kv_head * group + int(blockIdx.z) * kTile;
  const int heads = min(group - int(blockIdx.z) * kTile, kTile);
  const int64_t end = *old.end;
  if (head.kept == 0) return attend_means<kDim>(p, head, end, kv_head, first_head, heads, split);

  const bool listed = p.list.tiles != nullptr;
  const int2* list = reinterpret_cast<const int2*>(p.list.tiles) + kv_head * p.list.stride;
  const int64_t tiles = listed ? p.list.count[kv_head] : (end - old.sink) / kTile;
  const int64_t per_split = (tiles + p.scratch.splits - 1) / p.scratch.splits;
  const int64_t tile_end = min(tiles, (split + 1) * per_split);
  const int own = head.kept / 32;  // chunks of a K row that a lane loads
  uint32_t q[2 * kChunks][4];
  load_query<kChunks>(
      p.a.q + int64_t(first_head) * kDim, kDim, heads, g, [&](int i) { return i < own ? c * own + i : 0; }, q);
  float shift[2] = {0.0f, 0.0f};
  if (p.a.shift != nullptr) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (g + 8 * r < heads) shift[r] = p.a.shift[first_head + g + 8 * r] * kLog2E;
  }
  Sums sums;
  for (int64_t tile = split * per_split + warp; tile < tile_end; tile += kTokenWarps) {
    int64_t first = old.sink + tile * kTile;
    int seen_from = 0, seen_to = kTile;
    if (listed) {
      const int2 at = list[tile];
      first = at.x / kTile * kTile;
      seen_from = int(at.x - first), seen_to = seen_from + at.y;
      if (first < old.sink || first >= end) continue;
    }
    const int64_t step = (first - old.sink) / kOldStep;
    const int in_step = int((first - old.sink) % kOldStep);
    const uint8_t* keys = head.k + step * old_step_bytes(kType, head.kept);
    const uint8_t* values = head.v + step * old_step_bytes(kType, kDim);
    OldCodes<kBits, kChunks> k[2];
    OldCodes<kBits, kPasses> v[4];
    uint4 k_scale[kBits == 0 ? 1 : kChunks], k_low[kBits == 0 ? 1 : kChunks];
    __half2 v_grid[4];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      k[h].load(keys + ((in_step + 8 * h + g) * (head.kept / 8) + c * own) * kChunkBytes, own);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = in_step + 2 * c + r % 2 + 8 * (r / 2);
      v[r].load(values + (row * (kDim / 8) + g * kPasses) * kChunkBytes, kPasses);
      if constexpr (kBits > 0) {
        const auto* grid = reinterpret_cast<const __half2*>(values + 4 * kBits * kDim);
        v_grid[r] = grid[row * (kDim / 32) + g * kPasses / 4];
      }
    }
    if constexpr (kBits > 0) {
      const auto* grid = reinterpret_cast<const uint4*>(keys + 4 * kBits * head.kept);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        if (i < own) k_scale[i] = grid[c * own + i], k_low[i] = grid[head.kept / 8 + c * own + i];
      }
    }
    float s[2][4] = {};
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      if (i >= own) continue;  // the same for the whole block
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t key[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if constexpr (kBits == 0) {
            key[j] = k[h].words[4 * i + j];
          } else {
            key[j] = half2_bits(
                __hfma2(code_pair(k[h], i, j), bits_half2(word_of(k_scale[i], j)), bits_half2(word_of(k_low[i], j))));
          }
        }
        mma(s[h], q[2 * i], key[0], key[1], tag);
        mma(s[h], q[2 * i + 1], key[2], key[3], tag);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 8 * h + 2 * c + e % 2;
        float x = s[h][e] * p.a.scale;
        if (p.a.softcap > 0.0f) x = p.a.softcap * tanhf(x / p.a.softcap);
        s[h][e] = row >= seen_from && row < seen_to ? x * kLog2E + shift[e / 2] : kMinusInfinity;
      }
    }
    float keep[2];
    sums.weigh(s, keep);
    const auto value = [&](int r, int pass) {
      uint32_t word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (kBits == 0) {
          word[j] = v[r].words[4 * pass + j];
        } else {
          word[j] = half2_bits(__hfma2(code_pair(v[r], pass, j), __low2half2(v_grid[r]), __high2half2(v_grid[r])));
        }
      }
      return make_uint4(word[0], word[1], word[2], word[3]);
    };
    sums.add(s, keep, value, tag);
  }
  sums.leave(shared, p.scratch, first_head, heads, split);
}

template <int kBits>
Status run(const OldArgs& p, CardStreamHandle stream) {
  const int group = p.a.heads / p.a.old.kv_heads;
  const dim3 grid(unsigned(p.scratch.splits), unsigned(p.a.old.kv_heads), unsigned((group + kTile - 1) / kTile));
  constexpr int kThreads = kTokenWarps * 32;
  switch (p.a.old.dim) {
    case 64: return launch_close("attend_old", attend_old_kernel<kBits, 64>, grid, kThreads, stream, p);
    case 128: return launch_close("attend_old", attend_old_kernel<kBits, 128>, grid, kThreads, stream, p);
    case 256: return launch_close("attend_old", attend_old_kernel<kBits, 256>, grid, kThreads, stream, p);
    default: return Status(Code::kInternal, "attend_old: head dimension");
  }
}

}  // namespace

Status attend_old(const AttendOldArgs& a, const TileList& list, const DecodeScratch& scratch, CardStreamHandle stream) {
  const OldArgs p{a, list, scratch};
  if (a.old.type == KvType::kF16) return run<0>(p, stream);
  return a.old.type == KvType::kKivi2 ? run<2>(p, stream) : run<4>(p, stream);
}

}  // namespace longkv::card
