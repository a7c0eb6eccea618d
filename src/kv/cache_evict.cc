// Eviction and rewriting of rows of the KV cache.
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "kv/cache.h"
#include "kv/codec/codec.h"
#include "kv/layout.h"

namespace longkv {

namespace {

bool ascending_rows(std::span<const int64_t> rows, int64_t end) {
  int64_t next = 0;
  for (const int64_t row : rows) {
    if (row < next || row >= end) return false;
    next = row + 1;
  }
  return true;
}

// Moves the kept rows down, whole runs at a time. A run never lands above its old place, so no second copy is needed.
void move_down(uint8_t* data, int64_t stride, std::span<const int64_t> kept) {
  for (size_t i = 0; i < kept.size();) {
    size_t n = 1;
    while (i + n < kept.size() && kept[i + n] == kept[i] + int64_t(n)) ++n;
    if (kept[i] != int64_t(i)) {
      std::memmove(data + row_offset(int64_t(i), stride), data + row_offset(kept[i], stride), n * size_t(stride));
    }
    i += n;
  }
}

}  // namespace

Status KvCache::compact(int layer, std::span<const std::vector<int64_t>> kept, ThreadPool& pool) {
  if (shape_.window_of(layer) > 0) {
    return fail(Code::kInternal, "layer {} has a sliding window: its rows are positions and cannot be evicted", layer);
  }
  if (kept.size() != size_t(shape_.kv_heads)) {
    return fail(Code::kInternal, "layer {}: lists of kept rows for {} of {} KV heads", layer, kept.size(),
                shape_.kv_heads);
  }
  bool drops = false;
  for (int h = 0; h < shape_.kv_heads; ++h) {
    const int64_t rows = rows_[slot(layer, h)];
    if (!ascending_rows(kept[size_t(h)], rows)) {
      return fail(Code::kInternal, "layer {}, KV head {}: the list of kept rows is not an ascending part of {} rows",
                  layer, h, rows);
    }
    drops |= int64_t(kept[size_t(h)].size()) < rows;
  }
  if (!drops) return {};
  pool.run(shape_.kv_heads, [&](int64_t h, int) {
    const size_t s = slot(layer, int(h));
    const std::span<const int64_t> rows(kept[size_t(h)]);
    move_down(k_[s].data(), k_stride(), rows);
    move_down(v_[s].data(), v_stride(), rows);
    if (fields_.pos) move_down(pos_[s].data(), sizeof(int32_t), rows);
    if (fields_.bias) move_down(bias_[s].data(), sizeof(float), rows);
    if (fields_.count) move_down(counts_[s].data(), sizeof(uint16_t), rows);
    shrink(s, int64_t(rows.size()));
  });
  fixed_[size_t(layer)] = tokens_[size_t(layer)];
  return {};
}

void KvCache::replace_with_last(int layer, int kv_head, int64_t row) {
  const size_t s = slot(layer, kv_head);
  const int64_t last = --rows_[s];
  fixed_[size_t(layer)] = tokens_[size_t(layer)];
  if (row == last) return;
  const auto move = [&](std::vector<VirtualArray>& arrays, int64_t stride) {
    if (arrays.empty()) return;
    uint8_t* data = arrays[s].data();
    std::memcpy(data + row_offset(row, stride), data + row_offset(last, stride), size_t(stride));
  };
  move(k_, k_stride());
  move(v_, v_stride());
  move(pos_, sizeof(int32_t));
  move(bias_, sizeof(float));
  move(counts_, sizeof(uint16_t));
}

void KvCache::read_row(int layer, int kv_head, int64_t row, float* k, float* v) const {
  const size_t s = slot(layer, kv_head);
  if (k != nullptr) decode_row(types_.k, k_[s].data() + row_offset(row, k_stride()), shape_.dim_k, k);
  if (v != nullptr) decode_row(types_.v, v_[s].data() + row_offset(row, v_stride()), shape_.dim_v, v);
}

void KvCache::write_row(int layer, int kv_head, int64_t row, const float* k, const float* v) {
  const size_t s = slot(layer, kv_head);
  if (k != nullptr) encode_row(types_.k, k, shape_.dim_k, k_[s].data() + row_offset(row, k_stride()));
  if (v != nullptr) encode_row(types_.v, v, shape_.dim_v, v_[s].data() + row_offset(row, v_stride()));
}

}  // namespace longkv
