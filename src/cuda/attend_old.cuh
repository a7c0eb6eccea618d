// What the kernels of a decoded token's attention over old rows (cuda/old.h) share.
#pragma once

#include "cuda/attend_token.cuh"
#include "cuda/old.h"

namespace longkv::card {

struct OldArgs {
  AttendOldArgs a;
  TileList list;
  DecodeScratch scratch;
};
Status attend_codes(const OldArgs& p, CardStreamHandle stream);  // of kivi2 and kivi4

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

}  // namespace longkv::card
