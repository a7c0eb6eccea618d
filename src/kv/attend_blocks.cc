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

HWY_INLINE bool integer_products() {
#if defined(__x86_64__)
  return active_isa() >= IsaLevel::kAvx2;
#else
  return false;
#endif
}

HWY_INLINE void key_products(const BlockKeys& b) {
#if defined(__x86_64__)
  if (integer_products()) return avx2::block_key_product(b);
#endif
  block_keys(b);
}

HWY_INLINE void value_products(const BlockValues& b) {
#if defined(__x86_64__)
  if (integer_products()) return avx2::block_value_product(b);
#endif
  block_values(b);
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

// ahead: the block to prefetch meanwhile, or nullptr.
void block_scores(const AttendRun& run, const BlockTile& tile, int head, int heads, const uint8_t* ahead, float* s) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  BlockKeys keys;
  keys.type = run.kv.k_type;
  keys.block = run.kv.k + row_offset(tile.block, run.kv.k_stride);
  keys.dim = run.kv.dim_k;
  keys.q = run.q + head * run.q_stride;
  keys.q_stride = run.q_stride;
  keys.heads = heads;
  keys.s = s;
  keys.s_stride = kKiviRows;
  keys.ahead = ahead;
  keys.ahead_bytes = run.kv.v_stride;
  key_products(keys);
  for (int h = 0; h < heads; ++h) {
    float* row = s + h * kKiviRows;
    if (run.softcap > 0.0f) cap_scores(row, kKiviRows, run.softcap);
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

void AttendBlocksTarget(const AttendRun& run) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  HWY_ALIGN float s[kBlockHeads * kKiviRows];
  const int64_t v_padded = run.partial_stride - kPartialTail;
  RowCursor at = run.start;
  int64_t left = run.rows;    // rows not yet in a tile
  int64_t left_in_chunk = 0;  // of those, in the chunk that the newest tile belongs to
  const auto advance = [&](BlockTile& tile) {
    if (left_in_chunk == 0) left_in_chunk = std::min(left, run.chunk_rows);
    next_block(at, left_in_chunk, tile);
    left -= tile.rows;
    left_in_chunk -= tile.rows;
  };
  BlockTile tiles[2];
  advance(tiles[0]);
  float* partial = run.partials;
  int64_t done_in_chunk = 0;
  for (int current = 0; tiles[current].rows > 0; current ^= 1) {
    const BlockTile& tile = tiles[current];
    BlockTile& next = tiles[current ^ 1];
    advance(next);
    if (done_in_chunk == 0) {
      for (int h = 0; h < run.n_q; ++h) {
        float* p = partial + h * run.partial_stride;
        std::fill(p, p + v_padded, 0.0f);
        p[v_padded] = kNone;
        p[v_padded + 1] = 0.0f;
      }
    }
    // While keys are multiplied the block's values are prefetched, while values are summed the next block's keys.
    const uint8_t* v = run.kv.v + row_offset(tile.block, run.kv.v_stride);
    const uint8_t* next_k = next.rows > 0 ? run.kv.k + row_offset(next.block, run.kv.k_stride) : nullptr;
    for (int head = 0; head < run.n_q; head += kBlockHeads) {
      const int heads = std::min(kBlockHeads, run.n_q - head);
      block_scores(run, tile, head, heads, head == 0 ? v : nullptr, s);
      softmax_tile(s, kKiviRows, heads, kKiviRows, partial + head * run.partial_stride, run.partial_stride);
      BlockValues values;
      values.type = run.kv.v_type;
      values.block = v;
      values.dim = run.kv.dim_v;
      values.p = s;
      values.p_stride = kKiviRows;
      values.heads = heads;
      values.sums = partial + head * run.partial_stride;
      values.stride = run.partial_stride;
      values.ahead = head == 0 ? next_k : nullptr;
      values.ahead_bytes = run.kv.k_stride;
      value_products(values);
    }
    done_in_chunk += tile.rows;
    if (done_in_chunk == run.chunk_rows || next.rows == 0) {
      done_in_chunk = 0;
      partial += run.n_q * run.partial_stride;
    }
  }
}

void ScoreBlocksTarget(const AttendRun& run, float* dst, int64_t dst_stride) {
  HWY_ALIGN float s[kBlockHeads * kKiviRows];
  RowCursor at = run.start;
  BlockTile tile;
  for (int64_t done = 0; done < run.rows; done += tile.rows) {
    next_block(at, run.rows - done, tile);
    for (int head = 0; head < run.n_q; head += kBlockHeads) {
      const int heads = std::min(kBlockHeads, run.n_q - head);
      block_scores(run, tile, head, heads, nullptr, s);
      for (int h = 0; h < heads; ++h) {
        float* out = dst + (head + h) * dst_stride + done;
        for (int64_t t = 0; t < kKiviRows; ++t) {
          if (tile.mask >> t & 1) *out++ = s[h * kKiviRows + t];
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
