#include "kv/cache.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "base/error.h"
#include "kv/codec/codec.h"
#include "kv/layout.h"

namespace longkv {

namespace {

// Rows that one task encodes; a decoded token stays below it and is encoded by the caller, for a wake-up of the pool
// costs more.
constexpr int64_t kRowsPerTask = 64;
// Share of an array that huge pages may take beyond its rows: one part in kAheadShare.
constexpr int64_t kAheadShare = 20;

Status check_dim(const char* what, KvType type, int dim) {
  if (dim < 1 || dim > KvCache::kMaxDim) {
    return fail(Code::kInvalidArgument, "{} rows have {} channels; longkv handles 1 to {}", what, dim,
                KvCache::kMaxDim);
  }
  if (kv_type_quantized(type) && dim % kKvQuantGroup != 0) {
    return fail(Code::kInvalidArgument, "{} type {} needs channels in groups of {}, the model has {}; use f16", what,
                kv_type_name(type), kKvQuantGroup, dim);
  }
  return {};
}

}  // namespace

Result<KvCache> KvCache::create(const KvShape& shape, KvTypes types, RowCapacity capacity, KvRowFields fields,
                                std::shared_ptr<DiskSpace> disk) {
  if (shape.layers < 1 || shape.kv_heads < 1 || shape.group_size < 1) {
    return fail(Code::kInvalidArgument,
                "KV cache of {} layers, {} KV heads, {} query heads per KV head: all must be > 0", shape.layers,
                shape.kv_heads, shape.group_size);
  }
  if (!shape.window.empty() && shape.window.size() != size_t(shape.layers)) {
    return fail(Code::kInvalidArgument, "KV cache has {} window sizes for {} layers", shape.window.size(),
                shape.layers);
  }
  LONGKV_TRY(check_dim("K", types.k, shape.dim_k));
  LONGKV_TRY(check_dim("V", types.v, shape.dim_v));
  if (capacity.v < 0) return fail(Code::kInvalidArgument, "KV cache capacity is {} rows; it must be >= 0", capacity.v);

  KvCache cache;
  cache.shape_ = shape;
  cache.types_ = types;
  cache.fields_ = fields;
  cache.capacity_ = capacity;
  cache.on_disk_ = disk != nullptr;
  const auto k_bytes = checked_mul(uint64_t(capacity.v), uint64_t(cache.k_stride()));
  const auto v_bytes = checked_mul(uint64_t(capacity.v), uint64_t(cache.v_stride()));
  if (!k_bytes || !v_bytes || *k_bytes > uint64_t(INT64_MAX) || *v_bytes > uint64_t(INT64_MAX)) {
    return fail(Code::kOutOfMemory, "KV cache of {} rows exceeds the address space; lower the context size",
                capacity.v);
  }
  const size_t slots = size_t(shape.layers) * size_t(shape.kv_heads);
  for (size_t i = 0; i < slots; ++i) {
    LONGKV_ASSIGN(VirtualArray k, disk ? VirtualArray::reserve_in(disk, *k_bytes) : VirtualArray::reserve(*k_bytes));
    // Not moved: every array shares it.
    LONGKV_ASSIGN(VirtualArray v, disk ? VirtualArray::reserve_in(disk, *v_bytes) : VirtualArray::reserve(*v_bytes));
    cache.k_.push_back(std::move(k));
    cache.v_.push_back(std::move(v));
    const auto reserve_field = [&](bool wanted, uint64_t bytes, std::vector<VirtualArray>& arrays) -> Status {
      if (!wanted) return {};
      LONGKV_ASSIGN(VirtualArray array, VirtualArray::reserve(uint64_t(capacity.v) * bytes));
      arrays.push_back(std::move(array));
      return {};
    };
    LONGKV_TRY(reserve_field(fields.pos, sizeof(int32_t), cache.pos_));
    LONGKV_TRY(reserve_field(fields.bias, sizeof(float), cache.bias_));
    LONGKV_TRY(reserve_field(fields.count, sizeof(uint16_t), cache.counts_));
  }
  cache.tokens_.assign(size_t(shape.layers), 0);
  cache.fixed_.assign(size_t(shape.layers), 0);
  cache.first_row_.assign(size_t(shape.layers), 0);
  cache.rows_.assign(slots, 0);
  cache.advised_.assign(slots, 0);
  return cache;
}

RowCount KvCache::rows(int layer) const {
  const auto first = rows_.begin() + ptrdiff_t(slot(layer, 0));
  return {*std::max_element(first, first + shape_.kv_heads)};
}

Status KvCache::append(int layer, const float* k, const float* v, int64_t n, ThreadPool& pool) {
  const int64_t most = rows(layer).v;
  if (n < 0 || n > capacity_.v - most) {
    return fail(Code::kInvalidArgument, "layer {} holds {} of {} KV rows and was given {} more; raise the context size",
                layer, most, capacity_.v, n);
  }
  for (int h = 0; h < shape_.kv_heads; ++h) {
    const int64_t end = rows_[slot(layer, h)] + n;
    LONGKV_TRY(k_[slot(layer, h)].grow(uint64_t(row_offset(end, k_stride()))));
    LONGKV_TRY(v_[slot(layer, h)].grow(uint64_t(row_offset(end, v_stride()))));
    advise(layer, h, end + end / kAheadShare);
  }

  const int64_t heads = shape_.kv_heads;
  const int64_t pieces = ceil_div(n, kRowsPerTask);
  const auto encode = [&](int64_t task, int) {
    const int64_t head = task / 2 % heads;
    const int64_t first = task / (2 * heads) * kRowsPerTask;
    const int64_t count = std::min(kRowsPerTask, n - first);
    const bool is_k = task % 2 == 0;
    const int64_t dim = is_k ? shape_.dim_k : shape_.dim_v;
    const int64_t stride = is_k ? k_stride() : v_stride();
    VirtualArray& array = (is_k ? k_ : v_)[slot(layer, int(head))];
    encode_rows(is_k ? types_.k : types_.v, (is_k ? k : v) + (first * heads + head) * dim, heads * dim, count, dim,
                array.data() + row_offset(rows_[slot(layer, int(head))] + first, stride), stride);
  };
  const int64_t tasks = pieces * heads * 2;
  if (pieces <= 1) {
    for (int64_t t = 0; t < tasks; ++t) encode(t, 0);
  } else {
    pool.run(tasks, encode);
  }
  append_fields(layer, n);
  for (int h = 0; h < shape_.kv_heads; ++h) rows_[slot(layer, h)] += n;
  tokens_[size_t(layer)] += n;
  return {};
}

void KvCache::append_fields(int layer, int64_t n) {
  const int64_t token = tokens_[size_t(layer)];
  for (int h = 0; h < shape_.kv_heads; ++h) {
    for (int64_t i = 0; i < n && fields_.bytes() > 0; ++i) {
      write_fields(layer, h, rows_[slot(layer, h)] + i, int32_t(token + i), 0.0f, 1);
    }
  }
}

void KvCache::write_fields(int layer, int kv_head, int64_t row, int32_t pos, float bias, uint16_t count) {
  const size_t s = slot(layer, kv_head);
  if (fields_.pos) reinterpret_cast<int32_t*>(pos_[s].data())[row] = pos;
  if (fields_.bias) reinterpret_cast<float*>(bias_[s].data())[row] = bias;
  if (fields_.count) reinterpret_cast<uint16_t*>(counts_[s].data())[row] = count;
}

void KvCache::expect_rows(int layer, RowCount rows) {
  for (int h = 0; h < shape_.kv_heads; ++h) advise(layer, h, rows.v);
}

// Huge pages only where whole units of them will be filled, so that capacity stays free: memory paid is at most the
// rows' bytes + 5% + one small page per array.
void KvCache::advise(int layer, int kv_head, int64_t rows_sure) {
  const size_t s = slot(layer, kv_head);
  const int64_t rows = std::min(rows_sure, capacity_.v);
  // A step of 1/32 between requests keeps a decoded token from paying for system calls.
  if (rows <= advised_[s] + advised_[s] / 32) return;
  // Rows that will be encoded leave piece by piece, which pages of 2 MiB would not.
  if (regions_ && regions_->active(layer)) return;
  advised_[s] = rows;
  k_[s].advise_huge(uint64_t(row_offset(rows, k_stride())));
  v_[s].advise_huge(uint64_t(row_offset(rows, v_stride())));
}

// Cuts a head to its first `rows` rows and returns the memory above them. What was to be huge there no longer is: a row
// written later must not pay for 2 MiB.
void KvCache::shrink(size_t s, int64_t rows) {
  rows_[s] = rows;
  const bool advised = advised_[s] > rows;
  advised_[s] = std::min(advised_[s], rows);
  const auto cut = [&](std::vector<VirtualArray>& arrays, int64_t stride, bool huge) {
    if (arrays.empty()) return;
    VirtualArray& array = arrays[s];
    if (huge) array.advise_small(uint64_t(row_offset(rows, stride)));
    array.release(uint64_t(row_offset(rows, stride)), array.size());
  };
  cut(k_, k_stride(), advised);
  cut(v_, v_stride(), advised);
  cut(pos_, int64_t(sizeof(int32_t)), false);
  cut(bias_, int64_t(sizeof(float)), false);
  cut(counts_, int64_t(sizeof(uint16_t)), false);
}

void KvCache::will_read(int layer, int kv_head, std::span<const RowRange> rows) const {
  if (!on_disk_) return;
  const size_t s = slot(layer, kv_head);
  for (const RowRange& r : rows) {
    k_[s].will_read(uint64_t(row_offset(r.begin, k_stride())), uint64_t(row_offset(r.end, k_stride())));
    v_[s].will_read(uint64_t(row_offset(r.begin, v_stride())), uint64_t(row_offset(r.end, v_stride())));
  }
}

KvHeadView KvCache::view(int layer, int kv_head) const {
  KvHeadView head;
  head.k_type = types_.k;
  head.v_type = types_.v;
  head.dim_k = shape_.dim_k;
  head.dim_v = shape_.dim_v;
  head.k = k_[slot(layer, kv_head)].data();
  head.v = v_[slot(layer, kv_head)].data();
  head.k_stride = k_stride();
  head.v_stride = v_stride();
  head.first_row = first_row_[size_t(layer)];
  const size_t s = slot(layer, kv_head);
  head.rows = rows_[s];
  if (regions_) head.middle = regions_->middle(layer, kv_head);
  if (fields_.pos) head.pos = reinterpret_cast<const int32_t*>(pos_[s].data());
  if (fields_.bias) head.bias = reinterpret_cast<const float*>(bias_[s].data());
  if (fields_.count) head.count = reinterpret_cast<const uint16_t*>(counts_[s].data());
  return head;
}

TokenCount KvCache::shortest() const { return {*std::max_element(fixed_.begin(), fixed_.end())}; }

TokenCount KvCache::shortest_cut() const {
  int64_t tokens = shortest().v;
  for (int layer = 0; layer < shape_.layers; ++layer) {
    const int64_t first = first_row_[size_t(layer)];
    // first_visible_row(n) = n + 1 - window must not lie below.
    if (first > 0) tokens = std::max(tokens, first + shape_.window_of(layer) - 1);
  }
  return {std::max<int64_t>(1, tokens)};
}

Status KvCache::truncate(TokenCount tokens) {
  if (tokens.v < 0) return fail(Code::kInvalidArgument, "KV cache cannot be cut to {} tokens", tokens.v);
  for (int layer = 0; layer < shape_.layers; ++layer) {
    if (tokens.v == 0 || tokens.v >= tokens_[size_t(layer)]) continue;  // an empty sequence needs no row
    if (tokens.v < fixed_[size_t(layer)]) {
      return fail(Code::kInvalidArgument,
                  "cannot cut the KV cache to {} tokens: layer {} evicted rows when it held {} tokens, and what it "
                  "would have kept of a shorter sequence is gone; cut to {} or more, or start from the whole prompt",
                  tokens.v, layer, fixed_[size_t(layer)], fixed_[size_t(layer)]);
    }
    const int64_t needed = first_visible_row(tokens.v, shape_.window_of(layer));
    if (first_row_[size_t(layer)] > needed) {
      return fail(
          Code::kInvalidArgument,
          "cannot cut the KV cache to {} tokens: layer {} has a window of {} tokens and no longer holds rows {} to "
          "{}; start from the whole prompt",
          tokens.v, layer, shape_.window_of(layer), needed, first_row_[size_t(layer)] - 1);
    }
  }
  for (int layer = 0; layer < shape_.layers; ++layer) {
    int64_t& held = tokens_[size_t(layer)];
    if (tokens.v >= held) continue;
    const int64_t dropped = held - tokens.v;
    held = tokens.v;
    for (int h = 0; h < shape_.kv_heads; ++h) {
      const size_t s = slot(layer, h);
      const int64_t rows = tokens.v == 0 ? 0 : rows_[s] - dropped;
      // Of a cut into encoded rows, those that are recent again come back.
      if (regions_ && regions_->end(layer, h) > rows) decode_old_head(layer, h, regions_->wanted_end(rows));
      shrink(s, rows);
    }
    if (tokens.v == 0) first_row_[size_t(layer)] = fixed_[size_t(layer)] = 0;
  }
  return {};
}

void KvCache::release_outside_window(int layer) {
  const int64_t window = shape_.window_of(layer);
  const int64_t first = first_visible_row(std::max<int64_t>(0, tokens_[size_t(layer)] - window_slack_), window);
  const int64_t old = first_row_[size_t(layer)];
  if (window == 0 || first <= old) return;
  first_row_[size_t(layer)] = first;
  for (int h = 0; h < shape_.kv_heads; ++h) {
    // From the array's start: a page that straddles the old boundary can be returned now.
    k_[slot(layer, h)].release(0, uint64_t(row_offset(first, k_stride())));
    v_[slot(layer, h)].release(0, uint64_t(row_offset(first, v_stride())));
  }
}

int64_t KvCache::bytes_used() const {
  int64_t rows = 0;
  for (int layer = 0; layer < shape_.layers; ++layer) {
    for (int h = 0; h < shape_.kv_heads; ++h) rows += rows_[slot(layer, h)] - first_row_[size_t(layer)];
  }
  int64_t bytes = rows * (k_stride() + v_stride() + fields_.bytes());
  if (regions_) {
    bytes += regions_->bytes_used() - regions_->rows_encoded() * (k_stride() + v_stride());
  }
  return bytes;
}

int64_t KvCache::bytes_for(const KvShape& shape, KvTypes types, int64_t n) {
  const int64_t row = kv_row_bytes(types.k, shape.dim_k) + kv_row_bytes(types.v, shape.dim_v);
  return n * row * shape.layers * shape.kv_heads;
}

}  // namespace longkv
