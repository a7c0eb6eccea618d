#include "prefill/attention_tile.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "prefill/attention_tile.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h, once per target:
#include <hwy/highway.h>

#include "ops/fast_exp-inl.h"
#include "prefill/attention_pack-inl.h"
#include "prefill/product-inl.h"

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

static_assert(kScoreRows % kBlock == 0 && kMaxPanel % kPanel == 0);

// What a query row sees of a key tile, relative to the tile's first key; empty if begin >= end.
struct Visible {
  int64_t begin;
  int64_t end;
};

struct TileView {
  const QueryTile& tile;
  int64_t rows;      // query rows in use
  int64_t key_tile;  // rows per key tile
  int64_t dim_k;
  int64_t dim_v;
  int64_t s_stride;
  std::span<const int64_t> listed;  // rows of the key tile, ascending, where the tile has a list of rows

  // Query rows are ordered (token, head).
  Visible visible(int64_t row, int64_t key_begin) const {
    if (row >= rows) return {0, 0};
    const int64_t position = tile.position + row / tile.group;
    int64_t begin = tile.kv->first_row;
    if (tile.window > 0) begin = std::max(begin, position - tile.window + 1);
    if (!listed.empty()) {
      const auto from = std::lower_bound(listed.begin(), listed.end(), begin);
      const auto to = std::upper_bound(listed.begin(), listed.end(), position);
      return {from - listed.begin(), to - listed.begin()};
    }
    return {std::clamp<int64_t>(begin - key_begin, 0, key_tile),
            std::clamp<int64_t>(position + 1 - key_begin, 0, key_tile)};
  }
};

// kScoreRows query rows against one key tile: what each row sees, and each block of rows in whole panels.
struct RowTile {
  int64_t row;
  int64_t rows;  // in use
  Visible all;
  Visible blocks[kScoreRows / kBlock];
  Visible seen[kScoreRows];

  RowTile(const TileView& view, int64_t first, int64_t key_begin)
      : row(first), rows(std::min<int64_t>(kScoreRows, view.rows - first)) {
    all = {view.key_tile, 0};
    // Away from the diagonal and the window's edge every row sees the whole tile.
    const Visible low = view.visible(row, key_begin);
    const Visible high = view.visible(row + rows - 1, key_begin);
    const bool whole = low.begin == 0 && high.begin == 0 && low.end == view.key_tile;
    for (int b = 0; b < kScoreRows / kBlock; ++b) {
      Visible block{view.key_tile, 0};
      for (int i = b * kBlock; i < (b + 1) * kBlock; ++i) {
        seen[i] = whole && i < rows ? Visible{0, view.key_tile} : view.visible(row + i, key_begin);
        if (seen[i].begin >= seen[i].end) continue;
        block.begin = std::min(block.begin, seen[i].begin);
        block.end = std::max(block.end, seen[i].end);
      }
      blocks[b] = block.begin < block.end
                      ? Visible{block.begin / kPanel * kPanel, (block.end + kPanel - 1) / kPanel * kPanel}
                      : Visible{0, 0};
      if (blocks[b].end == 0) continue;
      all.begin = std::min(all.begin, blocks[b].begin);
      all.end = std::max(all.end, blocks[b].end);
    }
    if (all.begin >= all.end) all = {0, 0};
  }
  int n_blocks() const { return int((rows + kBlock - 1) / kBlock); }
};

TileView make_view(const QueryTile& tile) {
  const int64_t dim_k = tile.kv->dim_k;
  const int64_t dim_v = tile.kv->dim_v;
  const int64_t key_tile = prefill_key_tile(dim_k, dim_v);
  return {tile, tile.tokens * tile.group, key_tile, dim_k, dim_v, key_tile + 16, {}};
}

// Copies the queries of tokens [first, first + rows / group) so that q.k is in log2 units (or, with a soft cap, the
// argument of fast_tanh_of_log2); rows up to the next multiple of kBlock become zero.
void load_queries(const TileView& view, int64_t first, int64_t rows, float* dst) {
  const DF df;
  const AttendParams& p = view.tile.params;
  const float factor = p.softcap > 0 ? 2.0f * kLog2E * (p.scale / p.softcap) : kLog2E * p.scale;
  const VF scale = hn::Set(df, factor);
  for (int64_t row = 0; row < rows; ++row) {
    const float* src =
        view.tile.q + (first + row / view.tile.group) * view.tile.q_stride + row % view.tile.group * view.dim_k;
    float* to = dst + row * view.dim_k;
    int64_t i = 0;
    for (; i + kLanes <= view.dim_k; i += kLanes) hn::StoreU(hn::Mul(hn::LoadU(df, src + i), scale), df, to + i);
    for (; i < view.dim_k; ++i) to[i] = src[i] * factor;
  }
  const int64_t padded = (rows + kBlock - 1) / kBlock * kBlock;
  std::memset(dst + rows * view.dim_k, 0, size_t((padded - rows) * view.dim_k) * sizeof(float));
}

void pack_tile_keys(const TileView& view, int64_t key_begin, int64_t begin, int64_t end, const TileScratch& scratch) {
  pack_keys<kPanel>(*view.tile.kv, key_begin, begin, end, scratch.decoded, scratch.k);
  if (view.tile.kv->bias == nullptr) return;
  std::fill_n(scratch.bias, view.key_tile, 0.0f);
  for (int64_t row = begin; row < end; ++row) scratch.bias[row - key_begin] = view.tile.kv->bias[row] * kLog2E;
}

// Scores of a tile of query rows in log2 units; only the panels that a block of rows sees are written.
void score_rows(const TileView& view, const RowTile& rows, const TileScratch& scratch) {
  const DF df;
  for (int64_t key = rows.all.begin; key < rows.all.end; key += kPanel) {  // the panel stays in L1 for all rows
    for (int b = 0; b < rows.n_blocks(); ++b) {
      if (key < rows.blocks[b].begin || key >= rows.blocks[b].end) continue;
      VF c[kBlock][2];
      product_block(scratch.q + (rows.row + b * kBlock) * view.dim_k, view.dim_k, scratch.k + key * view.dim_k,
                    view.dim_k, c);
      float* to = scratch.s + b * kBlock * view.s_stride + key;
#pragma GCC unroll 16
      for (int i = 0; i < kBlock; ++i) {
        hn::Store(c[i][0], df, to + i * view.s_stride);
        hn::Store(c[i][1], df, to + i * view.s_stride + kLanes);
      }
    }
  }
  if (view.tile.params.softcap > 0) {
    const VF cap = hn::Set(df, view.tile.params.softcap * kLog2E);
    for (int64_t r = 0; r < rows.rows; ++r) {
      const Visible& block = rows.blocks[r / kBlock];
      float* s = scratch.s + r * view.s_stride;
      for (int64_t key = block.begin; key < block.end; key += kLanes) {
        hn::Store(hn::Mul(cap, fast_tanh_of_log2(df, hn::Load(df, s + key))), df, s + key);
      }
    }
  }
  if (view.tile.kv->bias == nullptr) return;
  for (int64_t r = 0; r < rows.rows; ++r) {
    const Visible& block = rows.blocks[r / kBlock];
    float* s = scratch.s + r * view.s_stride;
    for (int64_t key = block.begin; key < block.end; key += kLanes) {
      hn::Store(hn::Add(hn::Load(df, s + key), hn::Load(df, scratch.bias + key)), df, s + key);
    }
  }
}

// Lanes of keys [key, key + kLanes) that lie in v.
HWY_INLINE hn::Mask<DF> visible_lanes(const DF df, const Visible& v, int64_t key) {
  const hn::RebindToSigned<DF> di;
  const auto lane = hn::Iota(di, int32_t(key));
  const auto inside =
      hn::And(hn::Gt(lane, hn::Set(di, int32_t(v.begin - 1))), hn::Lt(lane, hn::Set(di, int32_t(v.end))));
  return hn::RebindMask(df, inside);
}

// Turns a row of scores over the keys of `block` into 2^(s - max), 0 where the row does not see the key, and updates
// the running maximum and sum. Returns the factor of what was accumulated before.
float softmax_row(float* HWY_RESTRICT s, const Visible& seen, const Visible& block, float* max, float* sum) {
  const DF df;
  if (seen.begin >= seen.end) {
    for (int64_t key = block.begin; key < block.end; key += kLanes) hn::Store(hn::Zero(df), df, s + key);
    return 1.0f;
  }
  const VF lowest = hn::Set(df, -std::numeric_limits<float>::infinity());
  const bool whole = seen.begin <= block.begin && seen.end >= block.end;
  VF top0 = lowest;
  VF top1 = lowest;
  for (int64_t key = block.begin; key < block.end; key += kPanel) {
    VF s0 = hn::Load(df, s + key);
    VF s1 = hn::Load(df, s + key + kLanes);
    if (!whole) {
      s0 = hn::IfThenElse(visible_lanes(df, seen, key), s0, lowest);
      s1 = hn::IfThenElse(visible_lanes(df, seen, key + kLanes), s1, lowest);
    }
    top0 = hn::Max(top0, s0);
    top1 = hn::Max(top1, s1);
  }
  const float old_max = *max;
  const float new_max = std::max(old_max, hn::GetLane(hn::MaxOfLanes(df, hn::Max(top0, top1))));
  const VF shift = hn::Set(df, new_max);
  VF sum0 = hn::Zero(df);
  VF sum1 = hn::Zero(df);
  for (int64_t key = block.begin; key < block.end; key += kPanel) {
    VF p0 = fast_exp2(df, hn::Sub(hn::Load(df, s + key), shift));
    VF p1 = fast_exp2(df, hn::Sub(hn::Load(df, s + key + kLanes), shift));
    if (!whole) {
      p0 = hn::IfThenElseZero(visible_lanes(df, seen, key), p0);
      p1 = hn::IfThenElseZero(visible_lanes(df, seen, key + kLanes), p1);
    }
    hn::Store(p0, df, s + key);
    hn::Store(p1, df, s + key + kLanes);
    sum0 = hn::Add(sum0, p0);
    sum1 = hn::Add(sum1, p1);
  }
  const float tile_sum = hn::GetLane(hn::SumOfLanes(df, hn::Add(sum0, sum1)));
  const float factor = old_max == new_max ? 1.0f : hn::GetLane(fast_exp2(df, hn::Set(df, old_max - new_max)));
  *sum = *sum * factor + tile_sum;
  *max = new_max;
  return factor;
}

// acc[row] = acc[row] * factor + P V over the key tile, summed within the tile first: at 1M rows a single running sum
// would lose bits.
void accumulate_values(const TileView& view, const RowTile& rows, const float* factors, const TileScratch& scratch) {
  const DF df;
  const int64_t acc_stride = (view.dim_v + kPanel - 1) / kPanel * kPanel;
  for (int64_t channel = 0; channel < acc_stride; channel += kPanel) {
    const float* panel = scratch.v + channel * view.key_tile;
    for (int b = 0; b < rows.n_blocks(); ++b) {
      const Visible& block = rows.blocks[b];
      if (block.begin >= block.end) continue;
      VF c[kBlock][2];
      product_block(scratch.s + b * kBlock * view.s_stride + block.begin, view.s_stride, panel + block.begin * kPanel,
                    block.end - block.begin, c);
      float* acc = scratch.acc + (rows.row + b * kBlock) * acc_stride + channel;
#pragma GCC unroll 16
      for (int i = 0; i < kBlock; ++i) {
        const VF factor = hn::Set(df, factors[b * kBlock + i]);
        float* to = acc + i * acc_stride;
        hn::Store(hn::MulAdd(hn::Load(df, to), factor, c[i][0]), df, to);
        hn::Store(hn::MulAdd(hn::Load(df, to + kLanes), factor, c[i][1]), df, to + kLanes);
      }
    }
  }
}

void attend_key_tile(const TileView& view, int64_t key_begin, const TileScratch& scratch) {
  float factors[kScoreRows];
  for (int64_t row = 0; row < view.rows; row += kScoreRows) {
    const RowTile rows(view, row, key_begin);
    if (rows.all.end == 0) continue;
    score_rows(view, rows, scratch);
    for (int64_t i = 0; i < rows.n_blocks() * kBlock; ++i) {
      factors[i] = softmax_row(scratch.s + i * view.s_stride, rows.seen[i], rows.blocks[i / kBlock],
                               scratch.max + row + i, scratch.sum + row + i);
    }
    accumulate_values(view, rows, factors, scratch);
  }
}

bool cancelled(const QueryTile& tile) { return tile.cancel != nullptr && tile.cancel->load(std::memory_order_relaxed); }

// All rows that the tile sees; false: cancelled.
bool attend_all_rows(const TileView& view, const TileScratch& scratch) {
  const QueryTile& tile = view.tile;
  const int64_t end = tile.position + tile.tokens;
  int64_t begin = tile.kv->first_row;
  if (tile.window > 0) begin = std::max(begin, tile.position - tile.window + 1);
  for (int64_t key = begin / view.key_tile * view.key_tile; key < end; key += view.key_tile) {
    if (cancelled(tile)) return false;
    const int64_t from = std::max(begin, key);
    const int64_t to = std::min(end, key + view.key_tile);
    pack_tile_keys(view, key, from, to, scratch);
    pack_values<kPanel>(*tile.kv, key, view.key_tile, from, to, scratch.decoded, scratch.v);
    attend_key_tile(view, key, scratch);
  }
  return true;
}

// Key tiles gathered from the tile's list of rows. A list of all rows gives the tiles, and so the bits, of no list.
bool attend_listed_rows(const TileView& dense, const TileScratch& scratch) {
  const QueryTile& tile = dense.tile;
  int64_t ids[kMaxKeyTile];
  TileView view = dense;
  int64_t held = 0;
  const auto flush = [&] {
    view.listed = std::span<const int64_t>(ids, size_t(held));
    pack_listed_keys<kPanel>(*tile.kv, view.listed, scratch.decoded, scratch.k);
    pack_listed_values<kPanel>(*tile.kv, view.listed, view.key_tile, scratch.decoded, scratch.v);
    if (tile.kv->bias != nullptr) {
      std::fill_n(scratch.bias, view.key_tile, 0.0f);
      for (int64_t i = 0; i < held; ++i) scratch.bias[i] = tile.kv->bias[ids[i]] * kLog2E;
    }
    attend_key_tile(view, 0, scratch);
    held = 0;
  };
  for (const RowRange& range : tile.listed) {
    for (int64_t row = range.begin; row < range.end; ++row) {
      ids[held++] = row;
      if (held < view.key_tile) continue;
      if (cancelled(tile)) return false;
      flush();
    }
  }
  if (held > 0) flush();
  return true;
}

void attend_query_tile_impl(const QueryTile& tile, const TileScratch& scratch, float* out, int64_t out_stride) {
  const DF df;
  const TileView view = make_view(tile);
  const int64_t acc_stride = (view.dim_v + kPanel - 1) / kPanel * kPanel;
  const int64_t padded = (view.rows + kScoreRows - 1) / kScoreRows * kScoreRows;
  load_queries(view, 0, view.rows, scratch.q);
  std::memset(scratch.acc, 0, size_t(padded * acc_stride) * sizeof(float));
  std::fill_n(scratch.max, padded, -std::numeric_limits<float>::infinity());
  std::fill_n(scratch.sum, padded, 0.0f);

  if (!(tile.listed.empty() ? attend_all_rows(view, scratch) : attend_listed_rows(view, scratch))) return;

  for (int64_t row = 0; row < view.rows; ++row) {
    const float inverse = 1.0f / scratch.sum[row];
    const float* acc = scratch.acc + row * acc_stride;
    float* to = out + row / tile.group * out_stride + row % tile.group * view.dim_v;
    int64_t i = 0;
    for (; i + kLanes <= view.dim_v; i += kLanes) {
      hn::StoreU(hn::Mul(hn::Load(df, acc + i), hn::Set(df, inverse)), df, to + i);
    }
    for (; i < view.dim_v; ++i) to[i] = acc[i] * inverse;
    if (tile.row_max != nullptr) {
      tile.row_max[row] = scratch.max[row];
      tile.row_sum[row] = scratch.sum[row];
    }
  }
}

void mass_of_key_tile_impl(const QueryTile& tile, int64_t key_begin, int64_t max_rows, const TileScratch& scratch,
                           float* mass, int64_t mass_stride) {
  const DF df;
  const TileView all = make_view(tile);
  const int64_t begin = std::max(tile.kv->first_row, key_begin);
  const int64_t end = std::min(tile.position + tile.tokens, key_begin + all.key_tile);
  if (begin >= end) return;
  pack_tile_keys(all, key_begin, begin, end, scratch);
  // The sums so far are read first, so that every query is added in order whatever chunk it comes in.
  for (int64_t h = 0; h < tile.group; ++h) {
    float* sums = scratch.mass + h * all.key_tile;
    std::memset(sums, 0, size_t(all.key_tile) * sizeof(float));
    std::memcpy(sums + (begin - key_begin), mass + h * mass_stride + begin, size_t(end - begin) * sizeof(float));
  }
  const int64_t step = std::max<int64_t>(1, max_rows / tile.group);
  for (int64_t token = 0; token < tile.tokens; token += step) {
    QueryTile part = tile;
    part.q += token * tile.q_stride;
    part.position += token;
    part.tokens = std::min(step, tile.tokens - token);
    const TileView view = make_view(part);
    load_queries(view, 0, view.rows, scratch.q);
    for (int64_t row = 0; row < view.rows; row += kScoreRows) {
      const RowTile rows(view, row, key_begin);
      score_rows(view, rows, scratch);
      for (int64_t i = 0; i < rows.rows; ++i) {
        const Visible& seen = rows.seen[i];
        const int64_t r = row + i;
        const VF shift = hn::Set(df, tile.row_max[token * tile.group + r]);
        const VF inverse = hn::Set(df, 1.0f / tile.row_sum[token * tile.group + r]);
        const float* s = scratch.s + i * view.s_stride;
        float* sums = scratch.mass + r % tile.group * view.key_tile;
        for (int64_t key = seen.begin / kLanes * kLanes; key < seen.end; key += kLanes) {
          const VF p = hn::Mul(fast_exp2(df, hn::Sub(hn::Load(df, s + key), shift)), inverse);
          const VF seen_p = hn::IfThenElseZero(visible_lanes(df, seen, key), p);
          hn::Store(hn::Add(hn::Load(df, sums + key), seen_p), df, sums + key);
        }
      }
    }
  }
  for (int64_t h = 0; h < tile.group; ++h) {
    std::memcpy(mass + h * mass_stride + begin, scratch.mass + h * all.key_tile + (begin - key_begin),
                size_t(end - begin) * sizeof(float));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(attend_query_tile_impl);
HWY_EXPORT(mass_of_key_tile_impl);

void attend_query_tile(const QueryTile& tile, const TileScratch& scratch, float* out, int64_t out_stride) {
  HWY_DYNAMIC_DISPATCH(attend_query_tile_impl)(tile, scratch, out, out_stride);
}

void mass_of_key_tile(const QueryTile& tile, int64_t key_begin, int64_t max_rows, const TileScratch& scratch,
                      float* mass, int64_t mass_stride) {
  HWY_DYNAMIC_DISPATCH(mass_of_key_tile_impl)(tile, key_begin, max_rows, scratch, mass, mass_stride);
}

}  // namespace longkv
#endif  // HWY_ONCE
