#include "kv/index/vector_index.h"

#include <algorithm>
#include <cmath>
#include <limits>

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
  head_tiles_ = paged_tiles(ceil_div(ceil_div(capacity_rows, block_), kTileBlocks), tile_bytes());
  const auto tiles = checked_mul(heads_.size(), uint64_t(head_tiles_));
  const auto bytes = tiles ? checked_mul(*tiles, uint64_t(tile_bytes())) : std::nullopt;
  if (!bytes) return fail(Code::kInvalidArgument, "an index over {} rows exceeds the address space", capacity_rows);
  LONGKV_ASSIGN(tiles_, VirtualArray::reserve(*bytes));
  for (Head& head : heads_) {
    head.state.resize(size_t(state_vectors_ * dim_));
    head.summary.resize(size_t(slots_ * dim_));
    head.exact.resize(size_t(slots_ * dim_));
    head.keys.resize(size_t(kDecodeRows * dim_));
  }
  return {};
}

uint8_t* VectorIndex::tile(int kv_head, int64_t t) {
  return tiles_.data() + (int64_t(kv_head) * head_tiles_ + t) * tile_bytes();
}

int64_t VectorIndex::blocks(int kv_head) const { return blocks_for(rows(kv_head), block_); }

int64_t VectorIndex::bytes_held() const {
  int64_t tiles = 0;
  for (int h = 0; h < int(heads_.size()); ++h) tiles += ceil_div(blocks(h), kTileBlocks);
  return tiles * tile_bytes();
}

void VectorIndex::write_summary(int kv_head, int64_t block, const f16_t* summary) {
  f16_t* dst = reinterpret_cast<f16_t*>(tile(kv_head, block / kTileBlocks)) + block % kTileBlocks;
  for (int64_t i = 0; i < slots_ * dim_; ++i) dst[i * kTileBlocks] = summary[i];
}

// exact: centre [dim], width [dim].
void VectorIndex::write_bytes(int kv_head, int64_t block, const float* exact) {
  uint8_t* dst = tile(kv_head, block / kTileBlocks) + block % kTileBlocks;
  auto* scales = reinterpret_cast<float*>(tile(kv_head, block / kTileBlocks) + 2 * dim_ * kTileBlocks);
  float largest = 0;
  bool finite = true;
  for (int64_t c = 0; c < dim_; ++c) {
    finite &= std::isfinite(exact[c]) && std::isfinite(exact[dim_ + c]);
    largest = std::max(largest, std::abs(exact[c]));
  }
  float& of_centre = scales[block % kTileBlocks];
  float& of_width = scales[kTileBlocks + block % kTileBlocks];
  if (!finite) {  // such a block scores NaN
    of_centre = of_width = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  of_centre = largest / 127.0f;
  const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
  const bool bound = form_ == Form::kByteBound;
  const auto width_of = [&](int64_t c) {
    const float rounded = std::nearbyint(exact[c] * inverse) * of_centre;
    // The last term pays for rounding in fp32.
    return exact[dim_ + c] + (bound ? std::abs(exact[c] - rounded) + 1e-6f * std::abs(exact[c]) : 0.0f);
  };
  float widest = 0;
  for (int64_t c = 0; c < dim_; ++c) widest = std::max(widest, width_of(c));
  of_width = widest / 255.0f;
  const float per_width = widest > 0 ? 255.0f / widest : 0.0f;
  for (int64_t c = 0; c < dim_; ++c) {
    dst[c * kTileBlocks] = uint8_t(int8_t(std::nearbyint(exact[c] * inverse)));
    const float width = width_of(c) * per_width;
    const float whole = bound ? std::ceil(width) : std::nearbyint(width);
    dst[(dim_ + c) * kTileBlocks] = uint8_t(std::clamp(whole, 0.0f, 255.0f));
  }
  if (bound) of_width *= 1.0f + 1e-6f;  // 255 may have been a little more
}

void VectorIndex::write_open(int kv_head, int64_t block, int64_t count) {
  Head& head = heads_[size_t(kv_head)];
  if (form_ == Form::kHalf) {
    encode(head.state.data(), count, head.summary.data());
    write_summary(kv_head, block, head.summary.data());
  } else {
    encode_exact(head.state.data(), count, head.exact.data());
    write_bytes(kv_head, block, head.exact.data());
  }
}

void VectorIndex::scan(int kv_head, int64_t first, int64_t tiles, const float* q, int n_q, float* scores,
                       int64_t stride) const {
  const uint8_t* at = tile(kv_head, first);
  if (form_ == Form::kHalf) {
    scan_tiles(rule_, reinterpret_cast<const f16_t*>(at), tiles, slots_, dim_, q, n_q, scores, stride);
  } else {
    scan8_tiles(at, tiles, dim_, q, n_q, form_ == Form::kByteBound, scores, stride);
  }
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
        write_open(kv_head, row / block_, in_block + 1);
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

void VectorIndex::visit(KvState& state, std::span<const KvHeadView> heads) {
  for (size_t h = 0; h < heads_.size() && state.ok(); ++h) {
    const KvState::Level level(state, "h", int64_t(h));
    Head& head = heads_[h];
    head.rows = heads[h].rows;
    state.values("open", std::span(head.state));
    const int64_t begin = int64_t(h) * head_tiles_ * tile_bytes();
    const int64_t tiles = ceil_div(blocks(int(h)), kTileBlocks);
    state.array("tiles", tiles_, uint64_t(begin), uint64_t(begin + tiles * tile_bytes()));
  }
}

template <class Scan>
void VectorIndex::over_tiles(int64_t block_begin, int64_t block_end, int n_q, float* scores, int64_t stride,
                             const Scan& scan) const {
  thread_local std::vector<float> edge;  // [n_q][kTileBlocks]
  edge.resize(size_t(n_q * kTileBlocks));
  for (int64_t b = block_begin; b < block_end;) {
    const int64_t t = b / kTileBlocks, first = t * kTileBlocks;
    float* dst = scores + b - block_begin;
    if (b == first && block_end - b >= kTileBlocks) {
      const int64_t whole = (block_end - b) / kTileBlocks;
      scan(t, whole, dst, stride);
      b += whole * kTileBlocks;
      continue;
    }
    const int64_t stop = std::min(block_end, first + kTileBlocks);
    scan(t, 1, edge.data(), kTileBlocks);
    for (int j = 0; j < n_q; ++j) {
      const float* own = edge.data() + j * kTileBlocks;
      std::copy(own + b - first, own + stop - first, dst + j * stride);
    }
    b = stop;
  }
}

void VectorIndex::score(int kv_head, const float* q, int n_q, int64_t block_begin, int64_t block_end, float* scores,
                        int64_t stride) const {
  over_tiles(block_begin, block_end, n_q, scores, stride,
             [&](int64_t t, int64_t tiles, float* out, int64_t step) { scan(kv_head, t, tiles, q, n_q, out, step); });
}

// Of a box, q * upper where q is positive and q * lower where it is negative add up over heads; of centre and width, q
// and |q|; of a single vector, q.
void VectorIndex::fold(const float* q, int n_q, float* folded) const {
  float *first = folded, *second = folded + dim_;
  std::fill(folded, folded + 2 * dim_, 0.0f);
  for (int j = 0; j < n_q; ++j, q += dim_) {
    for (int64_t c = 0; c < dim_; ++c) {
      const float other = rule_ == ScanRule::kBox ? std::min(q[c], 0.0f) : std::abs(q[c]);
      first[c] += rule_ == ScanRule::kBox ? q[c] - other : q[c];
      second[c] += other;
    }
  }
}

void VectorIndex::score_folded(int kv_head, const float* folded, int64_t block_begin, int64_t block_end, Place ahead,
                               float* scores) const {
  const uint8_t* next = ahead.kv_head >= 0 ? tile(ahead.kv_head, ahead.block / kTileBlocks) : nullptr;
  over_tiles(block_begin, block_end, 1, scores, 0,
             [&](int64_t t, int64_t tiles, float* out, int64_t) { scan_folded(kv_head, t, tiles, folded, next, out); });
}

void VectorIndex::scan_folded(int kv_head, int64_t first, int64_t tiles, const float* folded, const uint8_t* ahead,
                              float* scores) const {
  const uint8_t* at = tile(kv_head, first);
  const float* second = folded + dim_;
  if (form_ != Form::kHalf) {
    scan8_folded(at, tiles, dim_, folded, second, form_ == Form::kByteBound, ahead, scores);
  } else {
    const auto* next = reinterpret_cast<const f16_t*>(ahead);
    longkv::scan_folded(reinterpret_cast<const f16_t*>(at), tiles, slots_, dim_, folded, second, next, scores);
  }
}

}  // namespace longkv
