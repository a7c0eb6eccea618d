#include "kv/index/vector_index.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "base/error.h"
#include "kv/codec/codec.h"
#include "kv/layout.h"

namespace longkv {

namespace {

constexpr int64_t kDecodeRows = 64;
constexpr float kMaxHalf = 65504.0f;

// The neighbouring half towards +inf (finite, not the largest).
f16_t next_up(f16_t h) {
  if ((h.bits & 0x7fffu) == 0) return {1};
  return {uint16_t((h.bits & 0x8000u) != 0 ? h.bits - 1 : h.bits + 1)};
}

}  // namespace

f16_t f16_at_least(float v) {
  v = std::clamp(v, -kMaxHalf, kMaxHalf);
  const f16_t h = to_f16(v);
  return to_float(h) < v ? next_up(h) : h;
}

f16_t f16_at_most(float v) {
  const f16_t h = f16_at_least(-v);
  return {uint16_t(h.bits ^ 0x8000u)};
}

Status VectorIndex::reserve(int64_t capacity_rows) {
  head_tiles_ = ceil_div(ceil_div(capacity_rows, block_), kTileBlocks);
  const auto tiles = checked_mul(heads_.size(), uint64_t(head_tiles_));
  const auto bytes = tiles ? checked_mul(*tiles, uint64_t(tile_size()) * sizeof(f16_t)) : std::nullopt;
  if (!bytes) return fail(Code::kInvalidArgument, "an index over {} rows exceeds the address space", capacity_rows);
  LONGKV_ASSIGN(tiles_, VirtualArray::reserve(*bytes));
  for (Head& head : heads_) {
    head.state.resize(size_t(slots_ * dim_));
    head.summary.resize(size_t(slots_ * dim_));
    head.keys.resize(size_t(kDecodeRows * dim_));
  }
  return {};
}

f16_t* VectorIndex::tile(int kv_head, int64_t t) {
  return reinterpret_cast<f16_t*>(tiles_.data()) + (int64_t(kv_head) * head_tiles_ + t) * tile_size();
}

int64_t VectorIndex::blocks(int kv_head) const { return blocks_for(rows(kv_head), block_); }

int64_t VectorIndex::bytes_held() const {
  int64_t tiles = 0;
  for (int h = 0; h < int(heads_.size()); ++h) tiles += ceil_div(blocks(h), kTileBlocks);
  return tiles * tile_size() * int64_t(sizeof(f16_t));
}

void VectorIndex::write_summary(int kv_head, int64_t block, const f16_t* summary) {
  f16_t* dst = tile(kv_head, block / kTileBlocks) + block % kTileBlocks;
  for (int64_t i = 0; i < slots_ * dim_; ++i) dst[i * kTileBlocks] = summary[i];
}

void VectorIndex::append(int kv_head, const KvHeadView& keys, int64_t begin, int64_t end) {
  Head& head = heads_[size_t(kv_head)];
  for (int64_t row = begin; row < end;) {
    const int64_t stop = std::min(end, row + kDecodeRows);
    decode_k_rows(keys, row, stop, head.keys.data());
    for (const float* k = head.keys.data(); row < stop; ++row, k += dim_) {
      const int64_t in_block = row % block_;
      add_row(head.state.data(), k, in_block);
      // The open block is written once per call, since nobody reads it in between.
      if (in_block + 1 == block_ || row + 1 == end) {
        encode(head.state.data(), in_block + 1, head.summary.data());
        write_summary(kv_head, row / block_, head.summary.data());
      }
    }
  }
  head.rows = end;
}

void VectorIndex::truncate(int kv_head, const KvHeadView& keys, int64_t rows) {
  Head& head = heads_[size_t(kv_head)];
  if (rows >= head.rows) return;
  head.rows = full_blocks(rows, block_) * block_;
  if (head.rows < rows) append(kv_head, keys, head.rows, rows);
}

void VectorIndex::score(int kv_head, const float* q, int n_q, int64_t block_begin, int64_t block_end, float* scores,
                        int64_t stride) const {
  constexpr int kEdgeHeads = 8;
  float edge[kEdgeHeads * kTileBlocks];
  for (int64_t b = block_begin; b < block_end;) {
    const int64_t t = b / kTileBlocks, first = t * kTileBlocks;
    float* dst = scores + b - block_begin;
    if (b == first && block_end - b >= kTileBlocks) {
      const int64_t whole = (block_end - b) / kTileBlocks;
      scan_tiles(rule_, tile(kv_head, t), whole, slots_, dim_, q, n_q, dst, stride);
      b += whole * kTileBlocks;
      continue;
    }
    const int64_t stop = std::min(block_end, first + kTileBlocks);
    for (int j = 0; j < n_q; j += kEdgeHeads) {
      const int heads = std::min(kEdgeHeads, n_q - j);
      scan_tiles(rule_, tile(kv_head, t), 1, slots_, dim_, q + j * dim_, heads, edge, kTileBlocks);
      for (int i = 0; i < heads; ++i) {
        std::copy(edge + i * kTileBlocks + b - first, edge + i * kTileBlocks + stop - first, dst + (j + i) * stride);
      }
    }
    b = stop;
  }
}

}  // namespace longkv
