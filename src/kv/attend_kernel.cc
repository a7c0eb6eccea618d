#include "kv/attend_kernel.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/checked.h"
#include "base/float16.h"
#include "kv/attend_blocks.h"
#include "kv/attend_narrow.h"
#include "kv/attend_quant.h"
#include "kv/layout.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kv/attend_kernel.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kv/attend_products-inl.h"
#include "kv/attend_softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Most heads whose scores are formed while a K row is in registers.
constexpr int kHeads = 4;
static_assert(kHeads <= kSoftmaxHeads);

// Whether rows of a tile later are prefetched into the second cache. Emerald Rapids reads 10 to 25% faster so; Zen 3
// was not measured.
constexpr bool kFarPrefetch = HWY_ARCH_X86 && HWY_MAX_BYTES == 64;

// Rows of a tile, from the stored row's size alone. While keys are multiplied the tile's values are prefetched, and
// while values are summed the next tile's keys: short tiles keep those requests evenly spread (of 8 to 64 rows, these
// measured fastest on Zen 3; without prefetching f16 was 20 to 40% slower). Where more is prefetched tiles can be
// longer.
int64_t tile_rows_for(const KvHeadView& kv) {
  const int64_t bytes = kv_row_bytes(kv.k_type, kv.dim_k) + kv_row_bytes(kv.v_type, kv.dim_v);
  return bytes <= (kFarPrefetch ? 256 : 160) ? 64 : bytes <= (kFarPrefetch ? 512 : 384) ? 32 : 16;
}

struct TilePair {
  TileRows k, v;
  int64_t rows = 0;
  bool runs_on = false;                  // the rows of a tile more follow it in memory and are in the run's ranges
  HWY_ALIGN float bias[kAttendTileMax];  // of rows that have one
};

// Reads the addresses of the next rows; false at the end of the run.
bool next_tile(const KvHeadView& kv, RowCursor& at, int64_t rows, TilePair& tile) {
  tile.rows = rows;
  for (int64_t n = 0; n < rows;) {
    if (at.row >= at.range->end) {
      at.row = (++at.range)->begin;
      continue;
    }
    const int64_t count = std::min(rows - n, at.range->end - at.row);
    const uint8_t* k = kv.k + row_offset(at.row, kv.k_stride);
    const uint8_t* v = kv.v + row_offset(at.row, kv.v_stride);
    for (int64_t i = 0; i < count; ++i) {
      tile.k.row[n + i] = k + row_offset(i, kv.k_stride);
      tile.v.row[n + i] = v + row_offset(i, kv.v_stride);
    }
    if (kv.bias != nullptr) std::copy_n(kv.bias + at.row, count, tile.bias + n);
    n += count;
    at.row += count;
    tile.runs_on = kFarPrefetch && n == rows && at.row + rows <= at.range->end;
  }
  return rows > 0;
}

// Scores of `heads` heads over a tile, softcap and then the rows' bias applied, padded with -inf.
void tile_scores(const AttendRun& run, const TilePair& tile, int head, int heads, const AheadRows& ahead, float* s) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const int64_t padded = round_up(tile.rows, kLanes);
  if (run.q_image != nullptr) {
    QuantKeyTile args;
    args.type = run.kv.k_type;
    args.row = tile.k.row;
    args.rows = tile.rows;
    args.dim = run.kv.dim_k;
    args.q_stride = quant_query_bytes(run.kv.k_type, run.kv.dim_k);
    args.q = run.q_image + head * args.q_stride;
    args.heads = heads;
    args.ahead = ahead;
    args.s = s;
    args.s_stride = kAttendTileMax;
    quant_key_product(args);
  } else if (has_narrow_kernel(run.kv.k_type, run.kv.dim_k)) {
    NarrowKeyTile args;
    args.row = tile.k.row;
    args.rows = tile.rows;
    args.dim = run.kv.dim_k;
    args.q = run.q + head * run.q_stride;
    args.q_stride = run.q_stride;
    args.heads = heads;
    args.ahead = ahead;
    args.s = s;
    args.s_stride = kAttendTileMax;
    narrow_key_product(args);
  } else {
    const float* q = run.q + head * run.q_stride;
    key_product(run.kv.k_type, heads, {&tile.k, tile.rows, run.kv.dim_k, q, run.q_stride, ahead, s});
  }
  if (run.kv.k_type == KvType::kFp8 && run.q_image == nullptr) {
    const DF d;
    for (int h = 0; h < heads; ++h) {
      float* row = s + h * kAttendTileMax;
      for (int64_t i = 0; i < padded; i += kLanes) {
        hn::Store(hn::Mul(hn::Load(d, row + i), hn::LoadU(d, tile.k.scale + i)), d, row + i);
      }
    }
  }
  for (int h = 0; h < heads; ++h) {
    float* row = s + h * kAttendTileMax;
    if (run.softcap > 0.0f) cap_scores(row, padded, run.softcap);
    if (run.kv.bias != nullptr) {
      for (int64_t r = 0; r < tile.rows; ++r) row[r] += tile.bias[r];
    }
    std::fill(row + tile.rows, row + padded, kNone);
  }
}

void tile_values(const AttendRun& run, const TilePair& tile, const float* p, int heads, const AheadRows& ahead,
                 float* sums) {
  if (!has_quant_kernels(run.kv.v_type)) {
    value_product(run.kv.v_type, heads, {&tile.v, tile.rows, run.kv.dim_v, p, ahead, sums, run.partial_stride});
    return;
  }
  QuantValueTile args;
  args.type = run.kv.v_type;
  args.row = tile.v.row;
  args.rows = tile.rows;
  args.dim = run.kv.dim_v;
  args.p = p;
  args.p_stride = kAttendTileMax;
  args.heads = heads;
  args.ahead = ahead;
  args.sums = sums;
  args.stride = run.partial_stride;
  quant_value_product(args);
}

// The partials of a chunk of fp8 values, out of the units in which they were summed.
void finish_chunk(const AttendRun& run, float* partial) {
  if (run.kv.v_type != KvType::kFp8 || has_quant_kernels(run.kv.v_type)) return;
  const DF d;
  for (int h = 0; h < run.n_q; ++h) {
    float* p = partial + h * run.partial_stride;
    for (int64_t c = 0; c < run.partial_stride - kPartialTail; c += kLanes) {
      hn::StoreU(hn::Mul(hn::LoadU(d, p + c), hn::Set(d, kFp8SumLift)), d, p + c);
    }
  }
}

void AttendRunTarget(const AttendRun& run) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  HWY_ALIGN float s[kHeads * kAttendTileMax];
  TilePair tiles[2];
  const int64_t tile_rows = tile_rows_for(run.kv);
  const int64_t k_bytes = kv_row_bytes(run.kv.k_type, run.kv.dim_k);
  const int64_t v_bytes = kv_row_bytes(run.kv.v_type, run.kv.dim_v);
  const int64_t v_padded = run.partial_stride - kPartialTail;

  RowCursor at = run.start;
  int64_t left = run.rows;    // rows not yet in a tile
  int64_t left_in_chunk = 0;  // of those, in the chunk that the newest tile belongs to
  const auto advance = [&](TilePair& tile) {
    if (left_in_chunk == 0) left_in_chunk = std::min(left, run.chunk_rows);
    const int64_t rows = std::min(left_in_chunk, tile_rows);
    next_tile(run.kv, at, rows, tile);
    left -= rows;
    left_in_chunk -= rows;
  };

  const auto ahead_k = [&](const TilePair& t) {
    return AheadRows{t.k.row, t.rows, k_bytes, t.runs_on ? row_offset(tile_rows, run.kv.k_stride) : 0};
  };
  const auto ahead_v = [&](const TilePair& t) {
    return AheadRows{t.v.row, t.rows, v_bytes, t.runs_on ? row_offset(tile_rows, run.kv.v_stride) : 0};
  };
  advance(tiles[0]);
  prefetch_rows<true>(ahead_k(tiles[0]), 0, tiles[0].rows);
  float* partial = run.partials;
  int64_t done_in_chunk = 0;
  for (int current = 0; tiles[current].rows > 0; current ^= 1) {
    TilePair& tile = tiles[current];
    TilePair& next = tiles[current ^ 1];
    advance(next);
    complete_tile(run.kv.k_type, run.kv.dim_k, tile.rows, false, kFp8KeyLift, tile.k);
    complete_tile(run.kv.v_type, run.kv.dim_v, tile.rows, true, kFp8ValueLift, tile.v);
    if (done_in_chunk == 0) {
      for (int h = 0; h < run.n_q; ++h) {
        float* p = partial + h * run.partial_stride;
        std::fill(p, p + v_padded, 0.0f);
        p[v_padded] = kNone;
        p[v_padded + 1] = 0.0f;
      }
    }
    for (int head = 0; head < run.n_q; head += kHeads) {
      const int heads = std::min(kHeads, run.n_q - head);
      const bool first = head == 0;
      tile_scores(run, tile, head, heads, first ? ahead_v(tile) : AheadRows(), s);
      softmax_tile(s, kAttendTileMax, heads, tile.rows, partial + head * run.partial_stride, run.partial_stride);
      tile_values(run, tile, s, heads, first ? ahead_k(next) : AheadRows(), partial + head * run.partial_stride);
    }
    done_in_chunk += tile.rows;
    if (done_in_chunk == run.chunk_rows || next.rows == 0) {
      finish_chunk(run, partial);
      done_in_chunk = 0;
      partial += run.n_q * run.partial_stride;
    }
  }
}

void ScoreRunTarget(const AttendRun& run, float* dst, int64_t dst_stride) {
  HWY_ALIGN float s[kHeads * kAttendTileMax];
  TilePair tile;
  const int64_t tile_rows = tile_rows_for(run.kv);
  RowCursor at = run.start;
  for (int64_t done = 0; done < run.rows; done += tile.rows) {
    next_tile(run.kv, at, std::min(tile_rows, run.rows - done), tile);
    complete_tile(run.kv.k_type, run.kv.dim_k, tile.rows, false, kFp8KeyLift, tile.k);
    for (int head = 0; head < run.n_q; head += kHeads) {
      const int heads = std::min(kHeads, run.n_q - head);
      tile_scores(run, tile, head, heads, {}, s);
      for (int h = 0; h < heads; ++h) {
        std::copy_n(s + h * kAttendTileMax, tile.rows, dst + (head + h) * dst_stride + done);
      }
    }
  }
}

void MergeRunTarget(const float* partials, int64_t chunks, int n_q, int64_t partial_stride, int64_t dim_v, float* out,
                    float* lse) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const DF d;
  const int64_t v_padded = partial_stride - kPartialTail;
  HWY_ALIGN float merged[round_up(1024, kAttendPad)];
  for (int h = 0; h < n_q; ++h) {
    float top = kNone;
    for (int64_t i = 0; i < chunks; ++i) {
      const float m = partials[(i * n_q + h) * partial_stride + v_padded];
      top = m > top ? m : top;
    }
    const float base = top == kNone ? 0.0f : top;
    std::fill(merged, merged + v_padded, 0.0f);
    float sum = 0.0f;
    for (int64_t i = 0; i < chunks; ++i) {
      const float* p = partials + (i * n_q + h) * partial_stride;
      const float weight = exp_scalar(p[v_padded] - base);
      sum += weight * p[v_padded + 1];
      for (int64_t c = 0; c < v_padded; c += kLanes) {
        hn::Store(hn::MulAdd(hn::LoadU(d, p + c), hn::Set(d, weight), hn::Load(d, merged + c)), d, merged + c);
      }
    }
    const bool empty = sum == 0.0f;
    const float inverse = empty ? 0.0f : 1.0f / sum;
    for (int64_t c = 0; c < dim_v; ++c) out[h * dim_v + c] = empty ? 0.0f : merged[c] * inverse;
    lse[h] = empty ? kNone : base + std::log(sum);
  }
}

void ExpTarget(const float* x, float* y, int64_t n) {
  const DF d;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) hn::StoreU(exp_vector(hn::LoadU(d, x + i)), d, y + i);
  for (; i < n; ++i) y[i] = exp_scalar(x[i]);
}

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(AttendRunTarget);
HWY_EXPORT(ScoreRunTarget);
HWY_EXPORT(MergeRunTarget);
HWY_EXPORT(ExpTarget);

void attend_run(const AttendRun& run) {
  if (kv_type_blocked(run.kv.k_type)) return attend_blocks_run(run);
  HWY_DYNAMIC_DISPATCH(AttendRunTarget)(run);
}

void score_run(const AttendRun& run, float* dst, int64_t dst_stride) {
  if (kv_type_blocked(run.kv.k_type)) return score_blocks_run(run, dst, dst_stride);
  HWY_DYNAMIC_DISPATCH(ScoreRunTarget)(run, dst, dst_stride);
}

void merge_run(const float* partials, int64_t chunks, int n_q, int64_t partial_stride, int64_t dim_v, float* out,
               float* lse) {
  HWY_DYNAMIC_DISPATCH(MergeRunTarget)(partials, chunks, n_q, partial_stride, dim_v, out, lse);
}

void exp_nonpositive(const float* x, float* y, int64_t n) { HWY_DYNAMIC_DISPATCH(ExpTarget)(x, y, n); }

}  // namespace longkv
#endif  // HWY_ONCE
