// One bit per channel and token (bits_layout.h), optionally after an orthonormal Hadamard rotation of keys and
// queries, which spreads outlier channels and leaves every dot product as it was.
//
// Score of a block: sqrt(D) * ln(sum over its tokens of exp(s / sqrt(D))), in units of the dot product s; with queries
// scaled by (softmax scale * sqrt(D)) that is the estimated log of the block's softmax mass. With pool=max it is the
// largest s; with block = 1 it is s.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/checked.h"
#include "base/error.h"
#include "base/virtual_array.h"
#include "kv/codec/codec.h"
#include "kv/index/bits_layout.h"
#include "kv/index/kinds.h"

namespace longkv {

namespace {

constexpr int64_t kDecodeRows = 64;

class BitsIndex final : public BlockIndex {
 public:
  BitsIndex(const IndexSpec& spec, const KvShape& shape)
      : block_(spec.block),
        dim_(shape.dim_k),
        groups_(bits_groups(shape.dim_k)),
        rotate_(spec.rotate),
        unbiased_(spec.unbiased),
        pool_(spec.pool_max ? BitsPool::kMax : BitsPool::kMass),
        root_(std::sqrt(float(shape.dim_k))),
        heads_(size_t(shape.kv_heads)) {}

  Status reserve(int64_t capacity_rows) {
    head_tiles_ = ceil_div(capacity_rows, kBitsTile);
    const auto tiles = checked_mul(heads_.size(), uint64_t(head_tiles_));
    const auto bytes = tiles ? checked_mul(*tiles, uint64_t(bits_tile_bytes(dim_))) : std::nullopt;
    if (!bytes) return fail(Code::kInvalidArgument, "an index over {} rows exceeds the address space", capacity_rows);
    LONGKV_ASSIGN(tiles_, VirtualArray::reserve(*bytes));
    for (Head& head : heads_) {
      head.keys.resize(size_t(kDecodeRows * dim_));
      head.padded.resize(size_t(groups_ * kBitsGroup));
    }
    return {};
  }

  void append(int kv_head, const KvHeadView& keys, int64_t begin, int64_t end) override {
    Head& head = heads_[size_t(kv_head)];
    for (int64_t row = begin; row < end;) {
      const int64_t stop = std::min(end, row + kDecodeRows);
      decode_k_rows(keys, row, stop, head.keys.data());
      for (const float* k = head.keys.data(); row < stop; ++row, k += dim_) {
        std::copy(k, k + dim_, head.padded.data());
        if (rotate_) hadamard_rows(head.padded.data(), dim_);
        bits_write_token(head.padded.data(), dim_, unbiased_, tile(kv_head, row / kBitsTile), row % kBitsTile);
      }
    }
    head.rows = end;
  }

  void truncate(int kv_head, const KvHeadView&, int64_t rows) override {
    Head& head = heads_[size_t(kv_head)];
    if (rows >= head.rows) return;
    head.rows = rows;
    if (rows % kBitsTile != 0) bits_clear_tokens(dim_, tile(kv_head, rows / kBitsTile), rows % kBitsTile);
  }

  void score(int kv_head, const float* q, int n_q, int64_t block_begin, int64_t block_end, float* scores,
             int64_t stride) const override {
    const std::vector<BitsTables>& tables = prepare(q, n_q);
    const int64_t rows = heads_[size_t(kv_head)].rows;
    // Whole tiles that cover some whole blocks at a time, so that their scores stay in the first-level cache.
    const int64_t step = std::max<int64_t>(1, kTokensAtOnce / block_);
    for (int64_t b = block_begin; b < block_end; b += step) {
      const int64_t stop = std::min(block_end, b + step);
      const RowRange range{b * block_, std::min(rows, stop * block_)};
      float* out = scores + b - block_begin;
      if (block_ % kBitsUnit == 0) {
        score_units(kv_head, tables, n_q, range, out, stride);
      } else {
        score_tokens(kv_head, tables, n_q, range, out, stride);
      }
    }
  }

  int64_t blocks(int kv_head) const override { return ceil_div(heads_[size_t(kv_head)].rows, block_); }
  int64_t bytes_scored(int64_t n) const override { return n * block_ * bits_token_bytes(dim_); }
  int64_t bytes_held() const override {
    int64_t tiles = 0;
    for (const Head& head : heads_) tiles += ceil_div(head.rows, kBitsTile);
    return tiles * bits_tile_bytes(dim_);
  }

 private:
  static constexpr int64_t kTokensAtOnce = 1024;
  struct Head {
    int64_t rows = 0;
    std::vector<float> keys;    // scratch: decoded rows
    std::vector<float> padded;  // scratch: one rotated key
  };

  // Blocks that are no multiple of a unit, by the scores of their tokens.
  void score_tokens(int kv_head, const std::vector<BitsTables>& tables, int n_q, RowRange rows, float* out,
                    int64_t stride) const {
    thread_local std::vector<float> tokens;  // [n_q][token_stride]
    const int64_t first = rows.begin / kBitsTile, tiles = ceil_div(rows.end, kBitsTile) - first;
    const int64_t token_stride = tiles * kBitsTile;
    tokens.resize(size_t(n_q * token_stride));
    for (int64_t t = 0; t < tiles; ++t) {
      bits_scan_tile(tile(kv_head, first + t), groups_, tables.data(), n_q, tokens.data() + t * kBitsTile,
                     token_stride);
    }
    for (int j = 0; j < n_q; ++j) {
      const float* s = tokens.data() + j * token_stride + rows.begin - first * kBitsTile;
      if (block_ == 1) {
        std::copy(s, s + (rows.end - rows.begin), out + j * stride);
      } else {
        bits_block_scores(pool_, s, block_, rows.end - rows.begin, root_, out + j * stride);
      }
    }
  }

  // Blocks made of units; an open unit is pooled from its tokens.
  void score_units(int kv_head, const std::vector<BitsTables>& tables, int n_q, RowRange rows, float* out,
                   int64_t stride) const {
    thread_local std::vector<float> units;  // [n_q][unit_stride]
    const int64_t first = rows.begin / kBitsTile, tiles = ceil_div(rows.end, kBitsTile) - first;
    const int64_t unit_stride = tiles * (kBitsTile / kBitsUnit);
    units.resize(size_t(n_q * unit_stride));
    bits_scan_units(tile(kv_head, first), tiles, groups_, tables.data(), n_q, pool_, root_, units.data(), unit_stride);
    if (const int64_t open = rows.end % kBitsUnit; open != 0) {
      float tokens[kBitsTile];
      const int64_t at = rows.end / kBitsTile, unit = rows.end / kBitsUnit - first * (kBitsTile / kBitsUnit);
      for (int j = 0; j < n_q; ++j) {
        bits_scan_tile(tile(kv_head, at), groups_, tables.data() + j * groups_, 1, tokens, kBitsTile);
        bits_block_scores(pool_, tokens + (rows.end - open) % kBitsTile, kBitsUnit, open, root_,
                          units.data() + j * unit_stride + unit);
      }
    }
    const int64_t skip = (rows.begin - first * kBitsTile) / kBitsUnit;
    const int64_t count = ceil_div(rows.end - rows.begin, kBitsUnit);
    for (int j = 0; j < n_q; ++j) {
      const float* s = units.data() + j * unit_stride + skip;
      if (block_ == kBitsUnit) {
        std::copy(s, s + count, out + j * stride);
      } else {
        bits_block_scores(pool_, s, block_ / kBitsUnit, count, root_, out + j * stride);
      }
    }
  }

  // Tables of the group's queries. Refining asks for many short ranges with the same queries, so a thread keeps the
  // last ones it made, together with what they were made from.
  const std::vector<BitsTables>& prepare(const float* q, int n_q) const {
    struct Prepared {
      std::vector<float> q;
      int64_t dim = 0;
      bool rotate = false;
      std::vector<float> rotated;
      std::vector<BitsTables> tables;
    };
    thread_local Prepared last;
    const size_t n = size_t(n_q * dim_);
    const bool same = last.q.size() == n && last.dim == dim_ && last.rotate == rotate_ &&
                      std::memcmp(last.q.data(), q, n * sizeof(float)) == 0;
    if (same) return last.tables;
    last.q.assign(q, q + n);
    last.dim = dim_;
    last.rotate = rotate_;
    last.rotated.assign(size_t(groups_ * kBitsGroup), 0.0f);
    last.tables.resize(size_t(n_q * groups_));
    for (int j = 0; j < n_q; ++j) {
      std::copy(q + j * dim_, q + (j + 1) * dim_, last.rotated.data());
      if (rotate_) hadamard_rows(last.rotated.data(), dim_);
      bits_tables(last.rotated.data(), groups_, last.tables.data() + j * groups_);
    }
    return last.tables;
  }

  uint8_t* tile(int kv_head, int64_t t) {
    return tiles_.data() + (int64_t(kv_head) * head_tiles_ + t) * bits_tile_bytes(dim_);
  }
  const uint8_t* tile(int kv_head, int64_t t) const { return const_cast<BitsIndex*>(this)->tile(kv_head, t); }

  const int64_t block_;
  const int64_t dim_;
  const int64_t groups_;
  const bool rotate_;
  const bool unbiased_;
  const BitsPool pool_;
  const float root_;
  std::vector<Head> heads_;
  VirtualArray tiles_;  // [kv_heads][tiles of the capacity]
  int64_t head_tiles_ = 0;
};

}  // namespace

Result<std::unique_ptr<BlockIndex>> make_bits_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity) {
  return reserved(std::make_unique<BitsIndex>(spec, shape), capacity);
}

}  // namespace longkv
