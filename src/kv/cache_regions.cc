// Old rows of the KV cache that are held in an encoded form.
#include <algorithm>

#include "base/error.h"
#include "kv/cache.h"
#include "kv/codec/codec.h"
#include "kv/layout.h"

namespace longkv {

namespace {
constexpr int64_t kRowsPerTask = 8 * RegionStore::kStep;
constexpr int64_t kPage = 4096;
}  // namespace

Status KvCache::add_regions(RegionStore regions) {
  if (std::any_of(tokens_.begin(), tokens_.end(), [](int64_t n) { return n > 0; })) {
    return fail(Code::kInternal, "regions are added to a KV cache that holds rows");
  }
  regions_.emplace(std::move(regions));
  return {};
}

void KvCache::encode_old(int layer, ThreadPool& pool) {
  if (!regions_ || !regions_->active(layer)) return;
  struct Piece {
    int head;
    int64_t begin, end;
  };
  std::vector<Piece> pieces;
  for (int h = 0; h < shape_.kv_heads; ++h) {
    const int64_t from = regions_->end(layer, h), to = regions_->wanted_end(rows_[slot(layer, h)]);
    if (to > from) regions_->expect(layer, h, to);
    for (int64_t row = from; row < to; row += kRowsPerTask)
      pieces.push_back({h, row, std::min(to, row + kRowsPerTask)});
  }
  if (pieces.empty()) return;
  pool.run(int64_t(pieces.size()), [&](int64_t i, int) {
    const Piece& piece = pieces[size_t(i)];
    regions_->encode(layer, piece.head, view(layer, piece.head), piece.begin, piece.end);
  });
  for (int h = 0; h < shape_.kv_heads; ++h) {
    const size_t s = slot(layer, h);
    const int64_t from = regions_->end(layer, h), to = regions_->wanted_end(rows_[s]);
    if (to <= from) continue;
    regions_->commit(layer, h, view(layer, h), to);
    // From a page earlier: one that straddled the old border is whole now. The sinks' pages stay.
    const auto release = [&](VirtualArray& array, int64_t stride) {
      const int64_t sinks = row_offset(regions_->spec().sink, stride);
      array.release(uint64_t(std::max(sinks, row_offset(from, stride) - kPage)), uint64_t(row_offset(to, stride)));
    };
    release(k_[s], k_stride());
    release(v_[s], v_stride());
  }
}

void KvCache::decode_old_head(int layer, int kv_head, int64_t row) {
  const KvMiddle* middle = regions_->middle(layer, kv_head);
  if (middle == nullptr || row >= middle->end) return;
  // Whole steps, from the middle's first row on.
  const int64_t from = std::max(middle->begin, row - (row - middle->begin) % RegionStore::kStep);
  const KvHeadView head = view(layer, kv_head);
  const size_t s = slot(layer, kv_head);
  std::vector<float> decoded(size_t(std::max(shape_.dim_k, shape_.dim_v)));
  for (int64_t r = from; r < middle->end; ++r) {
    decode_k_rows(head, r, r + 1, decoded.data());
    encode_row(types_.k, decoded.data(), shape_.dim_k, k_[s].data() + row_offset(r, k_stride()));
    decode_v_rows(head, r, r + 1, decoded.data());
    encode_row(types_.v, decoded.data(), shape_.dim_v, v_[s].data() + row_offset(r, v_stride()));
  }
  regions_->cut(layer, kv_head, from);
}

void KvCache::decode_old(int layer, int64_t row, ThreadPool& pool) {
  if (!regions_ || !regions_->active(layer)) return;
  pool.run(shape_.kv_heads, [&](int64_t h, int) { decode_old_head(layer, int(h), row); });
}

}  // namespace longkv
