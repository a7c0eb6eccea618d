// One, two or four bits per channel and token (bits_layout.h): of all channels, optionally after an orthonormal
// Hadamard rotation of keys and queries, which spreads outlier channels and leaves every dot product as it was; or,
// `labels`, of a few channels that a file names or the first prompt decides.
//
// Score of a block: sqrt(D) * ln(sum over its tokens of exp(s / sqrt(D))), in units of the dot product s; with queries
// scaled by (softmax scale * sqrt(D)) that is the estimated log of the block's softmax mass. With pool=max it is the
// largest s; with block = 1 it is s.
//
// Double Sparsity's channels (arXiv 2408.07092) are those with the largest mean |q| times mean |k|; |q| is taken from
// the last queries of the first prompt and its group, 1 where none was seen. Rows are written once channels are known.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <numeric>
#include <sstream>

#include "base/checked.h"
#include "base/error.h"
#include "base/inputs.h"
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
        labels_(spec.kind == IndexKind::kLabels),
        kept_(labels_ ? std::min<int64_t>(spec.channels, shape.dim_k) : shape.dim_k),
        width_(labels_ ? 2 : spec.width),
        bits_(kept_ << width_),
        groups_(bits_groups(bits_)),
        rotate_(spec.rotate && !labels_),
        unbiased_(spec.unbiased && !labels_),
        pool_(spec.pool_max ? BitsPool::kMax : BitsPool::kMass),
        root_(std::sqrt(float(shape.dim_k))),
        heads_(size_t(shape.kv_heads)) {}

  Status reserve(int64_t capacity_rows) {
    head_tiles_ = paged_tiles(ceil_div(capacity_rows, kBitsTile), bits_tile_bytes(bits_));
    const auto tiles = checked_mul(heads_.size(), uint64_t(head_tiles_));
    const auto bytes = tiles ? checked_mul(*tiles, uint64_t(bits_tile_bytes(bits_))) : std::nullopt;
    if (!bytes) return fail(Code::kInvalidArgument, "an index over {} rows exceeds the address space", capacity_rows);
    LONGKV_ASSIGN(tiles_, VirtualArray::reserve(*bytes));
    for (Head& head : heads_) {
      head.keys.resize(size_t(kDecodeRows * dim_));
      head.padded.assign(size_t(padded_channels()), 0.0f);
      if (labels_) head.query_size.assign(size_t(dim_), 0.0);
    }
    return {};
  }

  // channels: [kv_heads][channels]
  void set_channels(const std::vector<std::vector<int32_t>>& channels) {
    for (size_t h = 0; h < heads_.size(); ++h) heads_[h].channels = channels[h];
    given_ = true;
  }

  void append(int kv_head, const KvHeadView& keys, int64_t begin, int64_t end) override {
    Head& head = heads_[size_t(kv_head)];
    head.rows = end;
    if (!labels_ || !head.channels.empty()) write_rows(kv_head, keys, begin, end);
  }

  void observe_queries(int kv_head, const float* q, int n_q, int64_t n, int64_t stride) override {
    Head& head = heads_[size_t(kv_head)];
    if (!labels_ || !head.channels.empty()) return;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t c = 0; c < n_q * dim_; ++c) head.query_size[size_t(c % dim_)] += std::abs(double(q[i * stride + c]));
    }
  }

  void finish_prompt(int kv_head, const KvHeadView& keys) override {
    Head& head = heads_[size_t(kv_head)];
    if (!labels_ || !head.channels.empty() || head.rows == 0) return;
    std::vector<double> size(size_t(dim_), 0.0);
    for (int64_t row = 0; row < head.rows; row += kDecodeRows) {
      const int64_t stop = std::min(head.rows, row + kDecodeRows);
      decode_k_rows(keys, row, stop, head.keys.data());
      for (int64_t i = 0; i < (stop - row) * dim_; ++i)
        size[size_t(i % dim_)] += std::abs(double(head.keys[size_t(i)]));
    }
    const bool seen = *std::max_element(head.query_size.begin(), head.query_size.end()) > 0;
    for (int64_t c = 0; seen && c < dim_; ++c) size[size_t(c)] *= head.query_size[size_t(c)];
    std::vector<int32_t> order(static_cast<size_t>(dim_));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return size[size_t(a)] > size[size_t(b)]; });
    order.resize(size_t(kept_));
    std::sort(order.begin(), order.end());
    head.channels = std::move(order);
    write_rows(kv_head, keys, 0, head.rows);
  }

  void truncate(int kv_head, const KvHeadView&, int64_t rows) override {
    Head& head = heads_[size_t(kv_head)];
    if (rows >= head.rows) return;
    head.rows = rows;
    if (rows == 0 && labels_ && !given_) {
      head.channels.clear();
      head.query_size.assign(size_t(dim_), 0.0);
    }
    if (rows % kBitsTile != 0) bits_clear_tokens(bits_, tile(kv_head, rows / kBitsTile), rows % kBitsTile);
  }

  void score(int kv_head, const float* q, int n_q, int64_t block_begin, int64_t block_end, float* scores,
             int64_t stride) const override {
    const std::vector<BitsTables>& tables = prepare(kv_head, q, n_q);
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

  int64_t covered(int kv_head) const override {
    const Head& head = heads_[size_t(kv_head)];
    return labels_ && head.channels.empty() ? 0 : head.rows;
  }
  int64_t blocks(int kv_head) const override { return ceil_div(heads_[size_t(kv_head)].rows, block_); }
  int64_t bytes_scored(int64_t n) const override { return n * block_ * bits_token_bytes(bits_); }
  int64_t bytes_held() const override {
    int64_t tiles = 0;
    for (const Head& head : heads_) tiles += ceil_div(head.rows, kBitsTile);
    return tiles * bits_tile_bytes(bits_);
  }

  void visit(KvState& state, std::span<const KvHeadView> heads) override {
    for (size_t h = 0; h < heads_.size() && state.ok(); ++h) {
      const KvState::Level level(state, "h", int64_t(h));
      Head& head = heads_[h];
      head.rows = heads[h].rows;
      if (labels_) {
        state.list("channels", head.channels, uint64_t(kept_));
        const bool known =
            std::all_of(head.channels.begin(), head.channels.end(), [&](int32_t c) { return c >= 0 && c < dim_; });
        const auto n = int64_t(head.channels.size());
        if (!state.expect(known && (n == kept_ || (n == 0 && !given_)), "the channels")) return;
      }
      const int64_t begin = int64_t(h) * head_tiles_ * bits_tile_bytes(bits_);
      const int64_t bytes = ceil_div(head.rows, kBitsTile) * bits_tile_bytes(bits_);
      state.array("tiles", tiles_, uint64_t(begin), uint64_t(begin + bytes));
    }
  }

 private:
  static constexpr int64_t kTokensAtOnce = 1024;
  struct Head {
    int64_t rows = 0;
    std::vector<float> keys;         // scratch: decoded rows
    std::vector<float> padded;       // scratch: one rotated key
    std::vector<int32_t> channels;   // labels; empty: not known yet
    std::vector<double> query_size;  // labels: sums of |q| seen in the prompt
  };

  int64_t padded_channels() const { return groups_ * (kBitsGroup >> width_); }

  // x [dim] as it is rounded: rotated or cut to the kept channels. out: [padded_channels()], zero beyond.
  void transform(const Head& head, const float* x, float* out) const {
    if (labels_) {
      for (int64_t c = 0; c < kept_; ++c) out[c] = x[head.channels[size_t(c)]];
    } else {
      std::copy(x, x + dim_, out);
      if (rotate_) hadamard_rows(out, dim_);
    }
  }

  void write_rows(int kv_head, const KvHeadView& keys, int64_t begin, int64_t end) {
    Head& head = heads_[size_t(kv_head)];
    for (int64_t row = begin; row < end;) {
      const int64_t stop = std::min(end, row + kDecodeRows);
      decode_k_rows(keys, row, stop, head.keys.data());
      for (const float* k = head.keys.data(); row < stop; ++row, k += dim_) {
        transform(head, k, head.padded.data());
        bits_write_token(head.padded.data(), kept_, width_, unbiased_, tile(kv_head, row / kBitsTile), row % kBitsTile);
      }
    }
  }

  // Blocks that are no multiple of a unit, by the scores of their tokens. Whole tiles of blocks of one token are scored
  // in their place.
  void score_tokens(int kv_head, const std::vector<BitsTables>& tables, int n_q, RowRange rows, float* out,
                    int64_t stride) const {
    thread_local std::vector<float> tokens;  // [n_q][token_stride]
    const int64_t first = rows.begin / kBitsTile, tiles = ceil_div(rows.end, kBitsTile) - first;
    if (block_ == 1 && rows.begin % kBitsTile == 0 && rows.end - rows.begin >= kBitsTile) {
      const int64_t whole = rows.end / kBitsTile - first, scored = whole * kBitsTile;
      bits_scan_tiles(tile(kv_head, first), whole, groups_, tables.data(), n_q, out, stride);
      rows.begin += scored;
      if (rows.begin < rows.end) score_tokens(kv_head, tables, n_q, rows, out + scored, stride);
      return;
    }
    const int64_t token_stride = tiles * kBitsTile;
    tokens.resize(size_t(n_q * token_stride));
    bits_scan_tiles(tile(kv_head, first), tiles, groups_, tables.data(), n_q, tokens.data(), token_stride);
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
        bits_scan_tiles(tile(kv_head, at), 1, groups_, tables.data() + j * groups_, 1, tokens, kBitsTile);
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
  const std::vector<BitsTables>& prepare(int kv_head, const float* q, int n_q) const {
    struct Prepared {
      std::vector<float> q;
      int64_t dim = 0;
      int width = 0;
      bool rotate = false;
      std::vector<int32_t> channels;
      std::vector<float> rotated;
      std::vector<BitsTables> tables;
    };
    thread_local Prepared last[2];  // of a choice, and of the 4-bit keys that refine it
    Prepared& mine = last[width_ == 2 ? 1 : 0];
    const Head& head = heads_[size_t(kv_head)];
    const size_t n = size_t(n_q * dim_);
    const bool same = mine.q.size() == n && mine.dim == dim_ && mine.rotate == rotate_ && mine.width == width_ &&
                      mine.channels == head.channels && std::memcmp(mine.q.data(), q, n * sizeof(float)) == 0;
    if (same) return mine.tables;
    mine.q.assign(q, q + n);
    mine.dim = dim_;
    mine.width = width_;
    mine.rotate = rotate_;
    mine.channels = head.channels;
    mine.rotated.assign(size_t(padded_channels()), 0.0f);
    mine.tables.resize(size_t(n_q * groups_));
    for (int j = 0; j < n_q; ++j) {
      transform(head, q + j * dim_, mine.rotated.data());
      bits_tables(mine.rotated.data(), groups_, width_, mine.tables.data() + j * groups_);
    }
    return mine.tables;
  }

  uint8_t* tile(int kv_head, int64_t t) {
    return tiles_.data() + (int64_t(kv_head) * head_tiles_ + t) * bits_tile_bytes(bits_);
  }
  const uint8_t* tile(int kv_head, int64_t t) const { return const_cast<BitsIndex*>(this)->tile(kv_head, t); }

  const int64_t block_;
  const int64_t dim_;
  const bool labels_;
  const int64_t kept_;  // channels that are rounded
  const int width_;     // log2 of the bits per channel
  const int64_t bits_;  // of a key
  const int64_t groups_;
  const bool rotate_;
  const bool unbiased_;
  const BitsPool pool_;
  const float root_;
  std::vector<Head> heads_;
  VirtualArray tiles_;  // [kv_heads][tiles of the capacity]
  int64_t head_tiles_ = 0;
  bool given_ = false;  // labels: channels come from a file
};

// Lines "layer head channel channel ...", # starts a comment; every KV head of the layer once.
Result<std::vector<std::vector<int32_t>>> read_channels(const IndexSpec& spec, const KvShape& shape) {
  LONGKV_TRY(check_regular(spec.file));
  std::ifstream in(spec.file);
  std::vector<std::vector<int32_t>> channels(size_t(shape.kv_heads));
  std::string line;
  for (int64_t number = 1; std::getline(in, line); ++number) {
    std::istringstream words(line.substr(0, line.find('#')));
    int64_t layer = 0, head = 0;
    if (!(words >> layer)) continue;
    if (!(words >> head) || head < 0 || head >= shape.kv_heads) {
      return fail(Code::kInvalidArgument, "{}, line {}: expected a KV head from 0 to {} after the layer", spec.file,
                  number, shape.kv_heads - 1);
    }
    if (layer != spec.layer) continue;
    std::vector<int32_t>& own = channels[size_t(head)];
    if (!own.empty()) {
      return fail(Code::kInvalidArgument, "{}, line {}: layer {}, head {} is given twice", spec.file, number, layer,
                  head);
    }
    for (int64_t c = 0; words >> c;) {
      if (c < 0 || c >= shape.dim_k || std::find(own.begin(), own.end(), int32_t(c)) != own.end()) {
        return fail(Code::kInvalidArgument, "{}, line {}: channel {} is out of range (0 to {}) or given twice",
                    spec.file, number, c, shape.dim_k - 1);
      }
      own.push_back(int32_t(c));
    }
    if (!words.eof()) return fail(Code::kInvalidArgument, "{}, line {}: expected channel numbers", spec.file, number);
  }
  const size_t wanted = size_t(std::min(spec.channels, shape.dim_k));
  for (int h = 0; h < shape.kv_heads; ++h) {
    if (channels[size_t(h)].size() != wanted) {
      return fail(Code::kInvalidArgument, "{}: layer {}, head {} has {} channels, the recipe wants {}; use channels={}",
                  spec.file, spec.layer, h, channels[size_t(h)].size(), wanted,
                  std::max<size_t>(1, channels[size_t(h)].size()));
    }
  }
  return channels;
}

}  // namespace

Result<std::unique_ptr<BlockIndex>> make_bits_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity) {
  const int64_t channels = spec.kind == IndexKind::kLabels ? std::min(spec.channels, shape.dim_k) : shape.dim_k;
  const int64_t bits = spec.kind == IndexKind::kLabels ? 4 : 1 << spec.width;
  if (channels * bits > kBitsMaxGroups * kBitsGroup) {
    return fail(Code::kInvalidArgument, "an index of {} bits for each of {} channels; at most {} bits a key", bits,
                channels, kBitsMaxGroups * kBitsGroup);
  }
  auto index = std::make_unique<BitsIndex>(spec, shape);
  if (!spec.file.empty()) {
    LONGKV_ASSIGN(const auto channels, read_channels(spec, shape));
    index->set_channels(channels);
  }
  return reserved(std::move(index), capacity);
}

}  // namespace longkv
