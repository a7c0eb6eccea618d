#include "kv/region_store.h"

#include <algorithm>

#include "base/checked.h"
#include "base/error.h"
#include "base/gemm.h"
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
  // Keys in blocks have their scales by channel.
  const int64_t group = kv_type_quantized(type) || (kv_type_blocked(type) && *what == 'V') ? kKvQuantGroup
                        : kv_type_blocked(type)                                            ? kKiviChannels
                                                                                           : 1;
  if (dim % group == 0) return {};
  return fail(Code::kInvalidArgument, "{} type {} needs channels in groups of {}, a head keeps {}; use fp8 or f16",
              what, kv_type_name(type), group, dim);
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
  const HeadMask& mask = head.mask;
  const int64_t n = mask.kept(dim_k_);
  if (mask.directed() && (n > dim_k_ || int64_t(mask.keys.size()) != n * dim_k_ ||
                          mask.queries.size() != mask.keys.size() || !channels.empty())) {
    return fail(Code::kInvalidArgument, "directions of {} and {} numbers for keys of {} channels", mask.keys.size(),
                mask.queries.size(), dim_k_);
  }
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
  if (wants_mean_k(head)) {
    head.sum_k.assign(size_t(dim_k_), 0.0);
    head.mean_k.assign(size_t(dim_k_), 0.0f);
    m.mean_k = head.mean_k.data();
  }
  if (n == 0) {
    head.sum_v.assign(size_t(dim_v_), 0.0);
    head.mean_v.assign(size_t(dim_v_), 0.0f);
    if (mask.removed != RemovedAs::kDrop) m.mean_v = head.mean_v.data();
    if (mask.removed == RemovedAs::kConstant) m.score = mask.score;
    return {};
  }
  m.k_stride = unit_bytes(spec_.k, n);
  m.v_stride = unit_bytes(spec_.v, dim_v_);
  LONGKV_ASSIGN(head.k, VirtualArray::reserve(uint64_t(capacity_) * uint64_t(kv_row_bytes(spec_.k, n))));
  LONGKV_ASSIGN(head.v, VirtualArray::reserve(uint64_t(capacity_) * uint64_t(kv_row_bytes(spec_.v, dim_v_))));
  m.k = head.k.data();
  m.v = head.v.data();
  if (mask.directed()) {
    head.directions.resize(mask.queries.size());
    head.to_kept.resize(mask.keys.size());
    transpose(mask.queries.data(), n, dim_k_, dim_k_, head.directions.data(), n);
    transpose(mask.keys.data(), n, dim_k_, dim_k_, head.to_kept.data(), n);
    m.directions = head.directions.data();
  } else if (n < dim_k_) {
    m.channels = channels.data();
  }
  if (!mask.alpha.empty()) m.alpha = mask.alpha.data();
  return {};
}

bool RegionStore::wants_mean_k(const Head& head) const {
  if (head.mask.kept(dim_k_) == 0) return head.mask.removed == RemovedAs::kMean;
  return spec_.compensate;
}

// Means over the middle from sums over it.
void RegionStore::update_means(Head& head) {
  const KvMiddle& m = head.middle;
  const double n = double(std::max<int64_t>(1, m.end - m.begin));
  for (size_t c = 0; c < head.sum_v.size(); ++c) head.mean_v[c] = float(head.sum_v[c] / n);
  if (head.sum_k.empty()) return;
  const auto dim = size_t(dim_k_);
  std::vector<double> lost(dim);
  for (size_t c = 0; c < dim; ++c) lost[c] = head.sum_k[c] / n;
  const std::vector<double> mean = lost;
  if (m.directions != nullptr) {
    for (size_t i = 0; i < size_t(m.dim_k); ++i) {
      double held = 0;
      for (size_t c = 0; c < dim; ++c) held += mean[c] * head.mask.keys[i * dim + c];
      for (size_t c = 0; c < dim; ++c) lost[c] -= held * m.directions[c * size_t(m.dim_k) + i];
    }
  } else {
    for (size_t i = 0; i < size_t(m.dim_k); ++i) {
      const size_t c = m.channels == nullptr ? i : m.channels[i];
      lost[c] -= mean[c] * (m.alpha == nullptr ? 1.0 : double(m.alpha[i]));
    }
  }
  for (size_t c = 0; c < dim; ++c) head.mean_k[c] = float(lost[c]);
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
    if (m.directions != nullptr) {
      std::fill(kept.begin(), kept.end(), 0.0f);
      gemm_add(kStep, m.dim_k, dim_k_, keys, dim_k_, h.to_kept.data(), m.dim_k, kept.data(), m.dim_k);
      keys = kept.data();
    } else if (m.channels != nullptr) {
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
  const auto add = [&](std::vector<double>& sums, auto decode) {
    if (sums.empty()) return;
    std::vector<float> row(sums.size());
    for (int64_t r = m.end; r < end; ++r) {
      decode(raw, r, r + 1, row.data());
      for (size_t c = 0; c < row.size(); ++c) sums[c] += row[c];
    }
  };
  add(h.sum_v, decode_v_rows);
  add(h.sum_k, decode_k_rows);
  m.end = end;
  update_means(h);
}

void RegionStore::cut(int layer, int kv_head, int64_t end) {
  Head& h = head(layer, kv_head);
  KvMiddle& m = h.middle;
  if (end >= m.end) return;
  // What was summed over the rows that leave is not known any more: the means stay.
  const double left = double(end - m.begin) / double(m.end - m.begin);
  for (double& x : h.sum_v) x *= left;
  for (double& x : h.sum_k) x *= left;
  m.end = end;
  update_means(h);
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
  if (!h.sum_k.empty()) state.values("sum_k", std::span(h.sum_k));
  const auto encoded = uint64_t(end - spec_.sink);
  if (h.middle.dim_k == 0) {
    state.values("sum_v", std::span(h.sum_v));
  } else {
    state.array("old_k", h.k, 0, encoded * uint64_t(kv_row_bytes(h.middle.k_type, h.middle.dim_k)));
    state.array("old_v", h.v, 0, encoded * uint64_t(kv_row_bytes(h.middle.v_type, h.middle.dim_v)));
  }
  if (state.loading()) update_means(h);
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
