#include "kv/attend_kernel.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/checked.h"
#include "base/float16.h"
#include "kv/layout.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kv/attend_kernel.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kv/attend_products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// exp(x) = 2^n * exp(r), |r| <= ln(2)/2, exp(r) = 1 + r + r^2 g(r) with g of degree 4 through the Chebyshev nodes
// (error below 1e-8). ln(2) is split so that n * ln2_hi is exact.
HWY_INLINE VF exp_vector(VF x) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  // Below this 2^n would be subnormal. Comparisons with NaN are false, so NaN runs through the polynomial.
  const auto tiny = hn::Lt(x, hn::Set(d, -87.33f));
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits, from where a shift takes it to the exponent.
  const VF magic = hn::Set(d, 0x1.8p23f);
  const VF shifted = hn::MulAdd(hn::Max(hn::Set(d, -87.33f), x), hn::Set(d, 1.44269504f), magic);
  const VF n = hn::Sub(shifted, magic);
  const VF r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x));
  VF g = hn::Set(d, 1.3926326e-3f);
  g = hn::MulAdd(g, r, hn::Set(d, 8.3632928e-3f));
  g = hn::MulAdd(g, r, hn::Set(d, 4.1666554e-2f));
  g = hn::MulAdd(g, r, hn::Set(d, 0.16666576f));
  g = hn::MulAdd(g, r, hn::Set(d, 0.5f));
  const VF e = hn::MulAdd(hn::Mul(r, r), g, hn::Add(r, hn::Set(d, 1.0f)));
  // A product, not an addition to e's bits: those of a NaN must stay.
  const auto power = hn::Add(hn::ShiftLeft<23>(hn::BitCast(di, shifted)), hn::Set(di, 0x3f800000));
  return hn::IfThenZeroElse(tiny, hn::Mul(e, hn::BitCast(d, power)));
}

float exp_scalar(float x) { return hn::GetLane(exp_vector(hn::Set(DF(), x))); }

// softcap * tanh(s / softcap), with tanh(y) = (1 - t) / (1 + t), t = exp(-2|y|) <= 1: no overflow.
void cap_scores(float* s, int64_t n, float softcap) {
  const DF d;
  for (int64_t i = 0; i < n; i += kLanes) {
    const VF y = hn::Mul(hn::Load(d, s + i), hn::Set(d, 1.0f / softcap));
    const VF t = exp_vector(hn::Mul(hn::Abs(y), hn::Set(d, -2.0f)));
    const VF tanh = hn::Div(hn::Sub(hn::Set(d, 1.0f), t), hn::Add(hn::Set(d, 1.0f), t));
    hn::Store(hn::CopySign(hn::Mul(tanh, hn::Set(d, softcap)), y), d, s + i);
  }
}

// State of one query head in one chunk.
struct Running {
  float* sum_v;  // [dim_v padded]
  float* max;
  float* sum;
};

// Turns the scores of one head over a tile into exp(score - max), rescaling what was summed when the maximum rises.
// s is padded with -inf to whole vectors.
void softmax_tile(float* s, int64_t rows, int64_t sum_v_size, const Running& state) {
  const DF d;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  VF top = hn::Set(d, kNone);
  for (int64_t i = 0; i < rows; i += kLanes) top = hn::Max(top, hn::Load(d, s + i));
  const float tile_max = hn::GetLane(hn::MaxOfLanes(d, top));
  const float old_max = *state.max;
  const float new_max = tile_max > old_max ? tile_max : old_max;
  // All scores -inf so far: weights are exp(-inf) = 0, not exp(-inf + inf).
  const float base = new_max == kNone ? 0.0f : new_max;
  if (new_max != old_max && old_max != kNone) {
    const float shrink = exp_scalar(old_max - new_max);
    *state.sum *= shrink;
    for (int64_t c = 0; c < sum_v_size; c += kLanes) {
      hn::StoreU(hn::Mul(hn::LoadU(d, state.sum_v + c), hn::Set(d, shrink)), d, state.sum_v + c);
    }
  }
  *state.max = new_max;
  VF sum = hn::Zero(d);
  for (int64_t i = 0; i < rows; i += kLanes) {
    const VF p = exp_vector(hn::Sub(hn::Load(d, s + i), hn::Set(d, base)));
    sum = hn::Add(sum, p);
    hn::Store(p, d, s + i);
  }
  *state.sum += hn::GetLane(hn::SumOfLanes(d, sum));
}

// Most heads whose scores are formed while a K row is in registers.
constexpr int kHeads = 4;

// Rows of a tile, from the stored row's size alone. While keys are multiplied the tile's values are prefetched, and
// while values are summed the next tile's keys: short tiles keep those requests evenly spread (of 8 to 64 rows, these
// measured fastest on Zen 3; without prefetching f16 was 20 to 40% slower).
int64_t tile_rows_for(const KvHeadView& kv) {
  const int64_t bytes = kv_row_bytes(kv.k_type, kv.dim_k) + kv_row_bytes(kv.v_type, kv.dim_v);
  return bytes <= 160 ? 64 : bytes <= 384 ? 32 : 16;
}

struct TilePair {
  TileRows k, v;
  int64_t rows = 0;
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
  }
  return rows > 0;
}

// Scores of `heads` heads over a tile, softcap and then the rows' bias applied, padded with -inf.
void tile_scores(const AttendRun& run, const TilePair& tile, const float* q, int heads, const TileRows* ahead,
                 int64_t ahead_rows, int64_t ahead_bytes, float* s) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const KeyProduct args = {&tile.k, tile.rows, run.kv.dim_k, q, run.q_stride, ahead, ahead_rows, ahead_bytes, s};
  key_product(run.kv.k_type, heads, args);
  const int64_t padded = round_up(tile.rows, kLanes);
  for (int h = 0; h < heads; ++h) {
    float* row = s + h * kAttendTileMax;
    if (run.softcap > 0.0f) cap_scores(row, padded, run.softcap);
    if (run.kv.bias != nullptr) {
      for (int64_t r = 0; r < tile.rows; ++r) row[r] += tile.bias[r];
    }
    std::fill(row + tile.rows, row + padded, kNone);
  }
}

void AttendRunTarget(const AttendRun& run) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  HWY_ALIGN float s[kHeads * kAttendTileMax];
  TilePair tiles[2];
  const int64_t tile_rows = tile_rows_for(run.kv);
  const int64_t k_bytes = kv_row_bytes(run.kv.k_type, run.kv.dim_k);
  const int64_t v_bytes = kv_row_bytes(run.kv.v_type, run.kv.dim_v);
  const int64_t v_padded = run.partial_stride - 2;

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

  advance(tiles[0]);
  prefetch_rows(tiles[0].k, 0, tiles[0].rows, k_bytes);
  float* partial = run.partials;
  int64_t done_in_chunk = 0;
  for (int current = 0; tiles[current].rows > 0; current ^= 1) {
    TilePair& tile = tiles[current];
    TilePair& next = tiles[current ^ 1];
    advance(next);
    complete_tile(run.kv.k_type, run.kv.dim_k, tile.rows, false, tile.k);
    complete_tile(run.kv.v_type, run.kv.dim_v, tile.rows, true, tile.v);
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
      tile_scores(run, tile, run.q + head * run.q_stride, heads, first ? &tile.v : nullptr, tile.rows, v_bytes, s);
      for (int h = 0; h < heads; ++h) {
        float* p = partial + (head + h) * run.partial_stride;
        softmax_tile(s + h * kAttendTileMax, tile.rows, v_padded, {p, p + v_padded, p + v_padded + 1});
      }
      const ValueProduct args = {&tile.v,
                                 tile.rows,
                                 run.kv.dim_v,
                                 s,
                                 first ? &next.k : nullptr,
                                 next.rows,
                                 k_bytes,
                                 partial + head * run.partial_stride,
                                 run.partial_stride};
      value_product(run.kv.v_type, heads, args);
    }
    done_in_chunk += tile.rows;
    if (done_in_chunk == run.chunk_rows) {
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
    complete_tile(run.kv.k_type, run.kv.dim_k, tile.rows, false, tile.k);
    for (int head = 0; head < run.n_q; head += kHeads) {
      const int heads = std::min(kHeads, run.n_q - head);
      tile_scores(run, tile, run.q + head * run.q_stride, heads, nullptr, 0, 0, s);
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
  const int64_t v_padded = partial_stride - 2;
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

void attend_run(const AttendRun& run) { HWY_DYNAMIC_DISPATCH(AttendRunTarget)(run); }

void score_run(const AttendRun& run, float* dst, int64_t dst_stride) {
  HWY_DYNAMIC_DISPATCH(ScoreRunTarget)(run, dst, dst_stride);
}

void merge_run(const float* partials, int64_t chunks, int n_q, int64_t partial_stride, int64_t dim_v, float* out,
               float* lse) {
  HWY_DYNAMIC_DISPATCH(MergeRunTarget)(partials, chunks, n_q, partial_stride, dim_v, out, lse);
}

void exp_nonpositive(const float* x, float* y, int64_t n) { HWY_DYNAMIC_DISPATCH(ExpTarget)(x, y, n); }

}  // namespace longkv
#endif  // HWY_ONCE
