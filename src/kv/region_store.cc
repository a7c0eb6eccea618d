#include "kv/region_store.h"

#include <algorithm>

#include "base/checked.h"
#include "base/error.h"
#include "kv/codec/codec.h"
#include "kv/codec/kivi.h"
#include "kv/layout.h"

namespace longkv {

namespace {

// Bytes from one unit to the next: a row, or a block of 32 rows.
int64_t unit_bytes(KvType type, int64_t dim) {
  return kv_type_blocked(type) ? kivi_block_bytes(type, dim) : kv_row_bytes(type, dim);
}

Status check_channels(const char* what, KvType type, int64_t dim) {
  if ((kv_type_blocked(type) || kv_type_quantized(type)) && dim % kKvQuantGroup != 0) {
    return fail(Code::kInvalidArgument, "{} type {} needs channels in groups of {}, a head keeps {}; use fp8 or f16",
                what, kv_type_name(type), kKvQuantGroup, dim);
  }
  return {};
}

}  // namespace

Result<RegionStore> RegionStore::create(const KvShape& shape, RegionSpec spec, RowCapacity capacity) {
  if (kv_type_blocked(spec.k) != kv_type_blocked(spec.v)) {
    return fail(Code::kInvalidArgument,
                "K type {} and V type {}: kivi2 and kivi4 encode blocks of rows and go together; nearest legal: both "
                "kivi, or q8_0, q4_0 and fp8 in any pair",
                kv_type_name(spec.k), kv_type_name(spec.v));
  }
  const size_t slots = size_t(shape.layers) * size_t(shape.kv_heads);
  if (!spec.masks.empty() && spec.masks.size() != slots) {
    return fail(Code::kInvalidArgument, "{} channel masks for {} layers of {} KV heads", spec.masks.size(),
                shape.layers, shape.kv_heads);
  }
  RegionStore store;
  store.kv_heads_ = shape.kv_heads;
  store.dim_k_ = shape.dim_k;
  store.dim_v_ = shape.dim_v;
  store.capacity_ = round_up(capacity.v, kStep);
  store.window_ = shape.window;
  store.heads_.resize(slots);
  store.spec_ = std::move(spec);
  for (size_t i = 0; i < slots; ++i) {
    Head& head = store.heads_[i];
    if (!store.spec_.masks.empty()) {
      head.mask = std::move(store.spec_.masks[i]);
    } else {
      for (int c = 0; c < shape.dim_k; ++c) head.mask.channels.push_back(uint16_t(c));
    }
    if (store.active(int(i / size_t(shape.kv_heads)))) LONGKV_TRY(store.shape_head(head));
  }
  store.spec_.masks.clear();
  return store;
}

Status RegionStore::shape_head(Head& head) {
  const auto& channels = head.mask.channels;
  if (!head.mask.alpha.empty() && head.mask.alpha.size() != channels.size()) {
    return fail(Code::kInvalidArgument, "{} factors for {} kept channels", head.mask.alpha.size(), channels.size());
  }
  for (size_t i = 0; i < channels.size(); ++i) {
    if (channels[i] >= dim_k_ || (i > 0 && channels[i] <= channels[i - 1])) {
      return fail(Code::kInvalidArgument, "kept channels must ascend below {}; found {} at place {}", dim_k_,
                  channels[i], i);
    }
  }
  const auto n = int64_t(channels.size());
  LONGKV_TRY(check_channels("K", spec_.k, n));
  LONGKV_TRY(check_channels("V", spec_.v, dim_v_));
  KvMiddle& m = head.middle;
  m = KvMiddle{};
  m.begin = m.end = spec_.sink;
  m.k_type = spec_.k;
  m.v_type = spec_.v;
  m.dim_k = int(n);
  m.dim_v = dim_v_;
  head.k = VirtualArray();
  head.v = VirtualArray();
  if (n == 0) {
    head.sum_v.assign(size_t(dim_v_), 0.0);
    head.mean_v.assign(size_t(dim_v_), 0.0f);
    if (spec_.removed_as_mean) m.mean_v = head.mean_v.data();
    return {};
  }
  m.k_stride = unit_bytes(spec_.k, n);
  m.v_stride = unit_bytes(spec_.v, dim_v_);
  LONGKV_ASSIGN(head.k, VirtualArray::reserve(uint64_t(capacity_) * uint64_t(kv_row_bytes(spec_.k, n))));
  LONGKV_ASSIGN(head.v, VirtualArray::reserve(uint64_t(capacity_) * uint64_t(kv_row_bytes(spec_.v, dim_v_))));
  m.k = head.k.data();
  m.v = head.v.data();
  if (n < dim_k_) m.channels = channels.data();
  if (!head.mask.alpha.empty()) m.alpha = head.mask.alpha.data();
  return {};
}

const KvMiddle* RegionStore::middle(int layer, int kv_head) const {
  const KvMiddle& m = head(layer, kv_head).middle;
  return m.begin < m.end ? &m : nullptr;
}

Status RegionStore::set_mask(int layer, int kv_head, HeadMask mask) {
  Head& h = head(layer, kv_head);
  if (h.middle.begin < h.middle.end) {
    return fail(Code::kInternal, "the channel mask of layer {} head {} is set after rows were encoded", layer, kv_head);
  }
  h.mask = std::move(mask);
  return shape_head(h);
}

void RegionStore::encode(int layer, int kv_head, const KvHeadView& raw, int64_t begin, int64_t end) {
  Head& h = head(layer, kv_head);
  const KvMiddle& m = h.middle;
  if (m.dim_k == 0) return;
  std::vector<float> rows(size_t(kStep * std::max(dim_k_, dim_v_))), kept(size_t(kStep * m.dim_k));
  for (int64_t row = begin; row < end; row += kStep) {
    const int64_t at = row - m.begin;
    decode_k_rows(raw, row, row + kStep, rows.data());
    const float* keys = rows.data();
    if (m.channels != nullptr) {
      for (int64_t r = 0; r < kStep; ++r) {
        for (int64_t i = 0; i < m.dim_k; ++i) kept[size_t(r * m.dim_k + i)] = rows[size_t(r * dim_k_ + m.channels[i])];
      }
      keys = kept.data();
    }
    if (kv_type_blocked(m.k_type)) {
      kivi_encode_keys(m.k_type, keys, m.dim_k, m.dim_k, h.k.data() + row_offset(at / kStep, m.k_stride));
    } else {
      encode_rows(m.k_type, keys, m.dim_k, kStep, m.dim_k, h.k.data() + row_offset(at, m.k_stride), m.k_stride);
    }
    decode_v_rows(raw, row, row + kStep, rows.data());
    if (kv_type_blocked(m.v_type)) {
      kivi_encode_values(m.v_type, rows.data(), dim_v_, dim_v_, h.v.data() + row_offset(at / kStep, m.v_stride));
    } else {
      encode_rows(m.v_type, rows.data(), dim_v_, kStep, dim_v_, h.v.data() + row_offset(at, m.v_stride), m.v_stride);
    }
  }
}

void RegionStore::commit(int layer, int kv_head, const KvHeadView& raw, int64_t end) {
  Head& h = head(layer, kv_head);
  KvMiddle& m = h.middle;
  if (m.dim_k == 0) {
    std::vector<float> row(static_cast<size_t>(dim_v_));
    for (int64_t r = m.end; r < end; ++r) {
      decode_v_rows(raw, r, r + 1, row.data());
      for (size_t c = 0; c < row.size(); ++c) h.sum_v[c] += row[c];
    }
    const double n = double(end - m.begin);
    for (size_t c = 0; c < row.size(); ++c) h.mean_v[c] = float(h.sum_v[c] / n);
  }
  m.end = end;
}

void RegionStore::cut(int layer, int kv_head, int64_t end) {
  Head& h = head(layer, kv_head);
  KvMiddle& m = h.middle;
  if (end >= m.end) return;
  const double left = double(end - m.begin);
  for (size_t c = 0; c < h.sum_v.size(); ++c) h.sum_v[c] = double(h.mean_v[c]) * left;
  m.end = end;
  h.advised = std::min(h.advised, end - m.begin);
  h.k.release(uint64_t((end - m.begin) * kv_row_bytes(m.k_type, m.dim_k)), h.k.size());
  h.v.release(uint64_t((end - m.begin) * kv_row_bytes(m.v_type, m.dim_v)), h.v.size());
}

int64_t RegionStore::head_bytes(int layer, int kv_head, int64_t rows) const {
  const KvMiddle& m = head(layer, kv_head).middle;
  if (m.dim_k == 0) return 0;
  return rows * (kv_row_bytes(m.k_type, m.dim_k) + kv_row_bytes(m.v_type, m.dim_v));
}

void RegionStore::expect(int layer, int kv_head, int64_t end) {
  Head& h = head(layer, kv_head);
  const int64_t rows = end - h.middle.begin;
  if (h.middle.dim_k == 0 || rows <= h.advised + h.advised / 32) return;
  h.advised = rows;
  h.k.advise_huge(uint64_t(rows * kv_row_bytes(h.middle.k_type, h.middle.dim_k)));
  h.v.advise_huge(uint64_t(rows * kv_row_bytes(h.middle.v_type, h.middle.dim_v)));
}

void RegionStore::visit(KvState& state, int layer, int kv_head, int64_t rows) {
  if (!active(layer)) return;
  Head& h = head(layer, kv_head);
  int64_t end = h.middle.end;
  state.value("encoded", end);
  const bool whole = end >= spec_.sink && (end - spec_.sink) % kStep == 0 && end <= wanted_end(rows);
  if (!state.expect(whole, "the ends of encoded rows")) return;
  HeadMask mask = h.mask;
  state.list("channels", mask.channels, mask.channels.size());
  state.list("alpha", mask.alpha, mask.alpha.size());
  if (!state.ok()) return;
  if (state.loading() && (mask.channels != h.mask.channels || mask.alpha != h.mask.alpha)) {
    // Channels may have been chosen for a prompt, but their number follows from the recipe.
    const bool sized = mask.channels.size() == h.mask.channels.size() && mask.alpha.size() == h.mask.alpha.size();
    if (!state.expect(sized, "the kept channels")) return;
    const Status set = set_mask(layer, kv_head, std::move(mask));
    if (!set.ok()) return state.refuse(set.code(), set.message());
  }
  h.middle.end = end;
  const auto encoded = uint64_t(end - spec_.sink);
  if (h.middle.dim_k == 0) {
    state.values("sum_v", std::span(h.sum_v));
    state.values("mean_v", std::span(h.mean_v));
    return;
  }
  state.array("old_k", h.k, 0, encoded * uint64_t(kv_row_bytes(h.middle.k_type, h.middle.dim_k)));
  state.array("old_v", h.v, 0, encoded * uint64_t(kv_row_bytes(h.middle.v_type, h.middle.dim_v)));
}

int64_t RegionStore::rows_encoded() const {
  int64_t rows = 0;
  for (const Head& head : heads_) rows += head.middle.end - head.middle.begin;
  return rows;
}

int64_t RegionStore::bytes_used() const {
  int64_t bytes = 0;
  for (size_t i = 0; i < heads_.size(); ++i) {
    const KvMiddle& m = heads_[i].middle;
    bytes += head_bytes(int(i / size_t(kv_heads_)), int(i % size_t(kv_heads_)), m.end - m.begin);
  }
  return bytes;
}

}  // namespace longkv
