#include "kv/attend_blocks.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "base/checked.h"
#include "base/cpu.h"
#include "base/float16.h"
#include "kv/codec/kivi.h"
#include "kv/layout.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kv/attend_blocks.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kv/attend_softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int kBlockHeads = 4;
static_assert(kBlockHeads <= kSoftmaxHeads);
// Words of a vector of codes: at most eight lanes are used.
using DW = hn::CappedTag<float, 8>;
using VW = hn::Vec<DW>;
constexpr int64_t kWordLanes = kLanes < 8 ? kLanes : 8;

HWY_INLINE VW codes_at(const uint8_t* words, int shift, int levels) {
  const DW d;
  const hn::RebindToSigned<DW> di;
  const auto w = hn::LoadU(di, reinterpret_cast<const int32_t*>(words));
  // The shift brings copies of the sign only above the code.
  return hn::ConvertTo(d, hn::And(hn::ShiftRightSame(w, shift), hn::Set(di, levels)));
}

HWY_INLINE float half_value(const uint8_t* halves, int64_t i) {
  f16_t h;
  __builtin_memcpy(&h, halves + 2 * i, sizeof(h));
  return to_float(h);
}

void block_keys(const BlockKeys& b) {
  const DW d;
  const int bits = kivi_bits(b.type), levels = (1 << bits) - 1;
  const int64_t vectors = bits / 2, per_byte = 8 / bits;
  const uint8_t* scales = b.block + b.dim * kKiviRows * bits / 8;
  const uint8_t* minima = scales + 2 * b.dim;
  float folded[1024];
  for (int h = 0; h < b.heads; ++h) {
    const float* q = b.q + h * b.q_stride;
    float bias = 0.0f;
    for (int64_t c = 0; c < b.dim; ++c) {
      folded[c] = q[c] * half_value(scales, c);
      bias += q[c] * half_value(minima, c);
    }
    for (int64_t v = 0; v < vectors; ++v) {
      for (int64_t w = 0; w < 8; w += kWordLanes) {
        VW sum[4] = {hn::Set(d, bias), hn::Set(d, bias), hn::Set(d, bias), hn::Set(d, bias)};
        for (int64_t c = 0; c < b.dim; ++c) {
          const uint8_t* words = b.block + ((c / 4 * vectors + v) * 8 + w) * 4;
          const VW f = hn::Set(d, folded[c]);
          for (int64_t j = 0; j < per_byte; ++j) {
            sum[j] = hn::MulAdd(codes_at(words, int(8 * (c % 4) + bits * j), levels), f, sum[j]);
          }
        }
        for (int64_t j = 0; j < per_byte; ++j) hn::StoreU(sum[j], d, b.s + h * b.s_stride + 16 * v + 8 * j + w);
      }
    }
  }
}

void block_values(const BlockValues& b) {
  const DW d;
  const int bits = kivi_bits(b.type), levels = (1 << bits) - 1;
  const int64_t groups = b.dim / kKiviRows, group_bytes = kKiviRows * kKiviRows * bits / 8, pairs = 4 / bits;
  const uint8_t* scales = b.block + groups * group_bytes;
  const uint8_t* minima = scales + 2 * b.dim;
  for (int h = 0; h < b.heads; ++h) {
    const float* p = b.p + h * b.p_stride;
    for (int64_t g = 0; g < groups; ++g) {
      float weight[kKiviRows], bias = 0.0f;
      for (int64_t r = 0; r < kKiviRows; ++r) {
        weight[r] = p[r] == 0.0f ? 0.0f : p[r] * half_value(scales, g * kKiviRows + r);
        bias += p[r] == 0.0f ? 0.0f : p[r] * half_value(minima, g * kKiviRows + r);
      }
      for (int64_t i = 0; i < 4; ++i) {
        for (int64_t w = 0; w < 8; w += kWordLanes) {
          VW sum = hn::Set(d, bias);
          for (int64_t r = 0; r < kKiviRows; ++r) {
            const int64_t u = r / (2 * pairs), m = r / 2 % pairs;
            const uint8_t* words = b.block + g * group_bytes + (u * 8 + w) * 4;
            sum =
                hn::MulAdd(codes_at(words, int(16 * (r % 2) + bits * (4 * m + i)), levels), hn::Set(d, weight[r]), sum);
          }
          float* at = b.sums + h * b.stride + g * kKiviRows + 8 * i + w;
          hn::StoreU(hn::Add(sum, hn::LoadU(d, at)), d, at);
        }
      }
    }
  }
}

HWY_INLINE void key_products(const BlockKeys* b, int n) {
#if defined(__x86_64__)
  if (active_isa() >= IsaLevel::kAvx512Vnni) return avx512vnni::block_key_products(b, n);
  if (active_isa() >= IsaLevel::kAvx2) return avx2::block_key_products(b, n);
#endif
  for (int i = 0; i < n; ++i) block_keys(b[i]);
}

HWY_INLINE void value_products(const BlockValues* b, int n) {
#if defined(__x86_64__)
  if (active_isa() >= IsaLevel::kAvx512Vnni) return avx512vnni::block_value_products(b, n);
  if (active_isa() >= IsaLevel::kAvx2) return avx2::block_value_products(b, n);
#endif
  for (int i = 0; i < n; ++i) block_values(b[i]);
}

// The part of a run inside one block: bit t of `mask` stands for its row t.
struct BlockTile {
  int64_t block = 0;
  uint32_t mask = 0;
  int64_t rows = 0;
};

// Takes at most `limit` rows; false at the end of the run.
bool next_block(RowCursor& at, int64_t limit, BlockTile& tile) {
  tile.mask = 0;
  tile.rows = 0;
  while (tile.rows < limit) {
    if (at.row >= at.range->end) {
      at.row = (++at.range)->begin;
      continue;
    }
    const int64_t block = block_of(at.row, kKiviRows);
    if (tile.rows == 0) tile.block = block;
    if (block != tile.block) break;
    const int64_t first = at.row - block * kKiviRows;
    const int64_t count = std::min({limit - tile.rows, at.range->end - at.row, kKiviRows - first});
    tile.mask |= uint32_t(((uint64_t(1) << count) - 1) << first);
    tile.rows += count;
    at.row += count;
    if (at.row >= at.range->end && tile.rows == limit) break;
  }
  return tile.rows > 0;
}

// Consecutive tiles of a run that are attended in one step.
struct BlockTiles {
  BlockTile tile[kBlocksAtOnce];
  int n = 0;
};
constexpr int64_t kScoreStride = kBlocksAtOnce * kKiviRows;

// Scores of `heads` heads over tiles, [heads][kScoreStride], softcap and then the rows' bias applied, -inf for rows
// that are not in the run. ahead: whether to prefetch the blocks' values meanwhile.
void block_scores(const AttendRun& run, const BlockTiles& tiles, int head, int heads, bool ahead, float* s) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  BlockKeys keys[kBlocksAtOnce];
  for (int i = 0; i < tiles.n; ++i) {
    keys[i].type = run.kv.k_type;
    keys[i].block = run.kv.k + row_offset(tiles.tile[i].block, run.kv.k_stride);
    keys[i].dim = run.kv.dim_k;
    keys[i].q = run.q + head * run.q_stride;
    keys[i].q_stride = run.q_stride;
    keys[i].heads = heads;
    keys[i].s = s + i * kKiviRows;
    keys[i].s_stride = kScoreStride;
    keys[i].ahead = ahead ? run.kv.v + row_offset(tiles.tile[i].block, run.kv.v_stride) : nullptr;
    keys[i].ahead_bytes = run.kv.v_stride;
  }
  key_products(keys, tiles.n);
  for (int h = 0; h < heads; ++h) {
    if (run.softcap > 0.0f) cap_scores(s + h * kScoreStride, tiles.n * kKiviRows, run.softcap);
    for (int i = 0; i < tiles.n; ++i) {
      const BlockTile& tile = tiles.tile[i];
      float* row = s + h * kScoreStride + i * kKiviRows;
      if (run.kv.bias != nullptr) {
        const float* bias = run.kv.bias + tile.block * kKiviRows;
        for (int64_t t = 0; t < kKiviRows; ++t) {
          if (tile.mask >> t & 1) row[t] += bias[t];
        }
      }
      if (tile.rows == kKiviRows) continue;
      for (int64_t t = 0; t < kKiviRows; ++t) row[t] = tile.mask >> t & 1 ? row[t] : kNone;
    }
  }
}

// next: the tiles whose keys to prefetch meanwhile, or nullptr.
void block_sums(const AttendRun& run, const BlockTiles& tiles, const float* p, int heads, const BlockTiles* next,
                float* sums) {
  BlockValues values[kBlocksAtOnce];
  for (int i = 0; i < tiles.n; ++i) {
    values[i].type = run.kv.v_type;
    values[i].block = run.kv.v + row_offset(tiles.tile[i].block, run.kv.v_stride);
    values[i].dim = run.kv.dim_v;
    values[i].p = p + i * kKiviRows;
    values[i].p_stride = kScoreStride;
    values[i].heads = heads;
    values[i].sums = sums;
    values[i].stride = run.partial_stride;
    const bool wanted = next != nullptr && i < next->n;
    values[i].ahead = wanted ? run.kv.k + row_offset(next->tile[i].block, run.kv.k_stride) : nullptr;
    values[i].ahead_bytes = run.kv.k_stride;
  }
  value_products(values, tiles.n);
}

void AttendBlocksTarget(const AttendRun& run) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  HWY_ALIGN float s[kBlockHeads * kScoreStride];
  const int64_t v_padded = run.partial_stride - kPartialTail;
  RowCursor at = run.start;
  int64_t left = run.rows;    // rows not yet in a tile
  int64_t left_in_chunk = 0;  // of those, in the chunk that the newest tile belongs to
  int64_t rows[2];
  const auto advance = [&](BlockTiles& tiles) {
    if (left_in_chunk == 0) left_in_chunk = std::min(left, run.chunk_rows);
    int64_t taken = 0;
    for (tiles.n = 0; tiles.n < kBlocksAtOnce && taken < left_in_chunk; ++tiles.n) {
      next_block(at, left_in_chunk - taken, tiles.tile[tiles.n]);
      taken += tiles.tile[tiles.n].rows;
    }
    left -= taken;
    left_in_chunk -= taken;
    return taken;
  };
  BlockTiles steps[2];
  rows[0] = advance(steps[0]);
  float* partial = run.partials;
  int64_t done_in_chunk = 0;
  for (int current = 0; rows[current] > 0; current ^= 1) {
    const BlockTiles& tiles = steps[current];
    BlockTiles& next = steps[current ^ 1];
    rows[current ^ 1] = advance(next);
    if (done_in_chunk == 0) {
      for (int h = 0; h < run.n_q; ++h) {
        float* p = partial + h * run.partial_stride;
        std::fill(p, p + v_padded, 0.0f);
        p[v_padded] = kNone;
        p[v_padded + 1] = 0.0f;
      }
    }
    // While keys are multiplied the tiles' values are prefetched, while values are summed the next tiles' keys.
    for (int head = 0; head < run.n_q; head += kBlockHeads) {
      const int heads = std::min(kBlockHeads, run.n_q - head);
      float* sums = partial + head * run.partial_stride;
      block_scores(run, tiles, head, heads, head == 0, s);
      softmax_tile(s, kScoreStride, heads, tiles.n * kKiviRows, sums, run.partial_stride);
      block_sums(run, tiles, s, heads, head == 0 ? &next : nullptr, sums);
    }
    done_in_chunk += rows[current];
    if (done_in_chunk == run.chunk_rows || rows[current ^ 1] == 0) {
      done_in_chunk = 0;
      partial += run.n_q * run.partial_stride;
    }
  }
}

void ScoreBlocksTarget(const AttendRun& run, float* dst, int64_t dst_stride) {
  HWY_ALIGN float s[kBlockHeads * kScoreStride];
  RowCursor at = run.start;
  BlockTiles tiles;
  tiles.n = 1;
  const BlockTile& tile = tiles.tile[0];
  for (int64_t done = 0; done < run.rows; done += tile.rows) {
    next_block(at, run.rows - done, tiles.tile[0]);
    for (int head = 0; head < run.n_q; head += kBlockHeads) {
      const int heads = std::min(kBlockHeads, run.n_q - head);
      block_scores(run, tiles, head, heads, false, s);
      for (int h = 0; h < heads; ++h) {
        float* out = dst + (head + h) * dst_stride + done;
        for (int64_t t = 0; t < kKiviRows; ++t) {
          if (tile.mask >> t & 1) *out++ = s[h * kScoreStride + t];
        }
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(AttendBlocksTarget);
HWY_EXPORT(ScoreBlocksTarget);

void attend_blocks_run(const AttendRun& run) { HWY_DYNAMIC_DISPATCH(AttendBlocksTarget)(run); }

void score_blocks_run(const AttendRun& run, float* dst, int64_t dst_stride) {
  HWY_DYNAMIC_DISPATCH(ScoreBlocksTarget)(run, dst, dst_stride);
}

}  // namespace longkv
#endif  // HWY_ONCE
