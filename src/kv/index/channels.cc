// SparQ's keys by channel (arXiv 2312.04985): of a group's channels the `channels` with the largest sum of |q| are
// read, and a token scores q.k over them, divided by the root of the share of |q| that they hold. Times 1 / sqrt(D)
// that is SparQ's logit: its temperature is sqrt(D times the share).
//
// Tiles of 256 tokens, [channel][256] f16: the tokens of one channel are four cache lines.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/checked.h"
#include "base/error.h"
#include "base/virtual_array.h"
#include "kv/codec/codec.h"
#include "kv/index/channel_scan.h"
#include "kv/index/kinds.h"

namespace longkv {

namespace {

constexpr int64_t kDecodeRows = 64;

class ChannelsIndex final : public BlockIndex {
 public:
  ChannelsIndex(const IndexSpec& spec, const KvShape& shape)
      : dim_(shape.dim_k), channels_(std::min<int64_t>(spec.channels, shape.dim_k)), rows_(size_t(shape.kv_heads), 0) {}

  Status reserve(int64_t capacity_rows) {
    head_tiles_ = paged_tiles(ceil_div(capacity_rows, kChannelTile), tile_bytes());
    const auto tiles = checked_mul(rows_.size(), uint64_t(head_tiles_));
    const auto bytes = tiles ? checked_mul(*tiles, uint64_t(tile_bytes())) : std::nullopt;
    if (!bytes) return fail(Code::kInvalidArgument, "an index over {} rows exceeds the address space", capacity_rows);
    LONGKV_ASSIGN(tiles_, VirtualArray::reserve(*bytes));
    return {};
  }

  void append(int kv_head, const KvHeadView& keys, int64_t begin, int64_t end) override {
    thread_local std::vector<float> rows;
    rows.resize(size_t(kDecodeRows * dim_));
    for (int64_t row = begin; row < end; row += kDecodeRows) {
      const int64_t stop = std::min(end, row + kDecodeRows);
      decode_k_rows(keys, row, stop, rows.data());
      for (int64_t r = row; r < stop; ++r) {
        f16_t* dst = tile(kv_head, r / kChannelTile) + r % kChannelTile;
        const float* k = rows.data() + (r - row) * dim_;
        for (int64_t c = 0; c < dim_; ++c) dst[c * kChannelTile] = to_f16(k[c]);
      }
    }
    rows_[size_t(kv_head)] = end;
  }

  void truncate(int kv_head, const KvHeadView&, int64_t rows) override {
    rows_[size_t(kv_head)] = std::min(rows_[size_t(kv_head)], rows);
  }

  void score(int kv_head, const float* q, int n_q, int64_t block_begin, int64_t block_end, float* scores,
             int64_t stride) const override {
    const Picked& picked = pick(q, n_q);
    for (int64_t b = block_begin; b < block_end;) {
      const int64_t t = b / kChannelTile, stop = std::min(block_end, (t + 1) * kChannelTile);
      channel_scan(tile(kv_head, t), picked.channels.data(), channels_, picked.q.data(), n_q, b % kChannelTile,
                   stop - b, scores + b - block_begin, stride);
      b = stop;
    }
  }

  int64_t blocks(int kv_head) const override { return rows_[size_t(kv_head)]; }
  int64_t bytes_scored(int64_t n) const override { return n * channels_ * int64_t(sizeof(f16_t)); }
  int64_t bytes_held() const override {
    int64_t tiles = 0;
    for (const int64_t rows : rows_) tiles += ceil_div(rows, kChannelTile);
    return tiles * tile_bytes();
  }

  void visit(KvState& state, std::span<const KvHeadView> heads) override {
    for (size_t h = 0; h < rows_.size() && state.ok(); ++h) {
      const KvState::Level level(state, "h", int64_t(h));
      rows_[h] = heads[h].rows;
      const int64_t begin = int64_t(h) * head_tiles_ * tile_bytes();
      const int64_t bytes = ceil_div(rows_[h], kChannelTile) * tile_bytes();
      state.array("tiles", tiles_, uint64_t(begin), uint64_t(begin + bytes));
    }
  }

 private:
  struct Picked {
    std::vector<float> source;
    std::vector<int32_t> channels;
    std::vector<float> q;  // [n_q][channels], over the root of the share
  };

  // The group's channels, kept while the same queries score one range after another.
  const Picked& pick(const float* q, int n_q) const {
    thread_local Picked last;
    const size_t n = size_t(n_q * dim_);
    const bool same = last.source.size() == n && int64_t(last.channels.size()) == channels_ &&
                      std::memcmp(last.source.data(), q, n * sizeof(float)) == 0;
    if (same) return last;
    last.source.assign(q, q + n);
    std::vector<float> size(size_t(dim_), 0.0f);
    for (int64_t i = 0; i < n_q * dim_; ++i) {
      const float x = std::abs(q[i]);
      size[size_t(i % dim_)] += x > 0 ? x : 0.0f;  // NaN counts as nothing here, and reaches the scores all the same
    }
    last.channels.resize(size_t(dim_));
    std::iota(last.channels.begin(), last.channels.end(), 0);
    std::stable_sort(last.channels.begin(), last.channels.end(),
                     [&](int32_t a, int32_t b) { return size[size_t(a)] > size[size_t(b)]; });
    last.channels.resize(size_t(channels_));
    std::sort(last.channels.begin(), last.channels.end());
    last.q.resize(size_t(n_q * channels_));
    for (int j = 0; j < n_q; ++j) {
      const float* own = q + j * dim_;
      float all = 0, held = 0;
      for (int64_t c = 0; c < dim_; ++c) all += std::abs(own[c]);
      for (const int32_t c : last.channels) held += std::abs(own[c]);
      const float share = all > 0 ? held / all : 1.0f;
      const float factor = channels_ == dim_ ? 1.0f : share > 0 ? 1.0f / std::sqrt(share) : all == all ? 0.0f : all;
      for (int64_t i = 0; i < channels_; ++i) {
        last.q[size_t(j * channels_ + i)] = own[last.channels[size_t(i)]] * factor;
      }
    }
    return last;
  }

  int64_t tile_bytes() const { return dim_ * kChannelTile * int64_t(sizeof(f16_t)); }
  f16_t* tile(int kv_head, int64_t t) {
    return reinterpret_cast<f16_t*>(tiles_.data() + (int64_t(kv_head) * head_tiles_ + t) * tile_bytes());
  }
  const f16_t* tile(int kv_head, int64_t t) const { return const_cast<ChannelsIndex*>(this)->tile(kv_head, t); }

  const int64_t dim_;
  const int64_t channels_;
  std::vector<int64_t> rows_;  // [kv_heads]
  VirtualArray tiles_;
  int64_t head_tiles_ = 0;
};

}  // namespace

Result<std::unique_ptr<BlockIndex>> make_channels_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity) {
  return reserved(std::make_unique<ChannelsIndex>(spec, shape), capacity);
}

}  // namespace longkv
