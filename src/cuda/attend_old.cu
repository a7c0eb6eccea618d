// Attention of a decoded token over old rows in halves (cuda/old.h), of whose keys a head keeps some channels.
#include "cuda/attend_old.cuh"

namespace longkv::card {

namespace {

constexpr int kTile = kTokenTile;

template <int kDim>
__global__ void __launch_bounds__(kTokenWarps * 32) attend_old_kernel(OldArgs p) {
  constexpr int kChunks = kDim / 32;
  using Sums = TokenSums<kDim, true>;
  constexpr int kPasses = Sums::kPasses;
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
  if (split * per_split >= tiles) return leave_nothing(p.scratch, first_head, heads, split);
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
    const uint8_t* keys = head.k + step * old_step_bytes(KvType::kF16, head.kept);
    const uint8_t* values = head.v + step * old_step_bytes(KvType::kF16, kDim);
    uint4 k[2][kChunks], v[4][kPasses];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto* from = reinterpret_cast<const uint4*>(keys) + (in_step + 8 * h + g) * (head.kept / 8) + c * own;
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
        if (i < own) k[h][i] = __ldcs(from + i);
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = in_step + 2 * c + r % 2 + 8 * (r / 2);
      const auto* from = reinterpret_cast<const uint4*>(values) + row * (kDim / 8) + g * kPasses;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) v[r][pass] = __ldcs(from + pass);
    }
    float s[2][4] = {};
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      if (i >= own) continue;  // the same for the whole block
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        mma(s[h], q[2 * i], k[h][i].x, k[h][i].y, tag);
        mma(s[h], q[2 * i + 1], k[h][i].z, k[h][i].w, tag);
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
    sums.add(
        s, keep, [&](int r, int pass) { return v[r][pass]; }, tag);
  }
  sums.leave(shared, p.scratch, first_head, heads, split);
}

template <int kDim>
Status run(const OldArgs& p, CardStreamHandle stream) {
  const int group = p.a.heads / p.a.old.kv_heads;
  const dim3 grid(unsigned(p.scratch.splits), unsigned(p.a.old.kv_heads), unsigned((group + kTile - 1) / kTile));
  return launch_close("attend_old", attend_old_kernel<kDim>, grid, kTokenWarps * 32, stream, p);
}

}  // namespace

Status attend_old(const AttendOldArgs& a, const TileList& list, const DecodeScratch& scratch, CardStreamHandle stream) {
  if (list.marks != nullptr || list.placed) return Status(Code::kInternal, "attend_old: tiles that are marked or placed");
  const OldArgs p{a, list, scratch};
  if (a.old.type != KvType::kF16) return attend_codes(p, stream);
  switch (a.old.dim) {
    case 64: return run<64>(p, stream);
    case 128: return run<128>(p, stream);
    case 256: return run<256>(p, stream);
    default: return Status(Code::kInternal, "attend_old: head dimension");
  }
}

}  // namespace longkv::card
