#include "kv/cache.h"

#include <algorithm>

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

Result<KvCache> KvCache::create(const KvShape& shape, KvTypes types, RowCapacity capacity) {
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
  cache.capacity_ = capacity;
  const auto k_bytes = checked_mul(uint64_t(capacity.v), uint64_t(cache.k_stride()));
  const auto v_bytes = checked_mul(uint64_t(capacity.v), uint64_t(cache.v_stride()));
  if (!k_bytes || !v_bytes || *k_bytes > uint64_t(INT64_MAX) || *v_bytes > uint64_t(INT64_MAX)) {
    return fail(Code::kOutOfMemory, "KV cache of {} rows exceeds the address space; lower the context size",
                capacity.v);
  }
  const size_t slots = size_t(shape.layers) * size_t(shape.kv_heads);
  for (size_t i = 0; i < slots; ++i) {
    LONGKV_ASSIGN(VirtualArray k, VirtualArray::reserve(*k_bytes));
    LONGKV_ASSIGN(VirtualArray v, VirtualArray::reserve(*v_bytes));
    cache.k_.push_back(std::move(k));
    cache.v_.push_back(std::move(v));
  }
  cache.rows_.assign(size_t(shape.layers), 0);
  cache.first_row_.assign(size_t(shape.layers), 0);
  cache.advised_.assign(size_t(shape.layers), 0);
  return cache;
}

Status KvCache::append(int layer, const float* k, const float* v, int64_t n, ThreadPool& pool) {
  const int64_t begin = rows_[size_t(layer)];
  if (n < 0 || n > capacity_.v - begin) {
    return fail(Code::kInvalidArgument, "layer {} holds {} of {} KV rows and was given {} more; raise the context size",
                layer, begin, capacity_.v, n);
  }
  advise(layer, begin + n + (begin + n) / kAheadShare);

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
                array.data() + row_offset(begin + first, stride), stride);
  };
  const int64_t tasks = pieces * heads * 2;
  if (pieces <= 1) {
    for (int64_t t = 0; t < tasks; ++t) encode(t, 0);
  } else {
    pool.run(tasks, encode);
  }
  rows_[size_t(layer)] = begin + n;
  return {};
}

void KvCache::expect_rows(int layer, RowCount rows) { advise(layer, rows.v); }

// Huge pages only where whole units of them will be filled, so that capacity stays free: memory paid is at most the
// rows' bytes + 5% + one small page per array.
void KvCache::advise(int layer, int64_t rows_sure) {
  const int64_t rows = std::min(rows_sure, capacity_.v);
  int64_t& advised = advised_[size_t(layer)];
  // A step of 1/32 between requests keeps a decoded token from paying for system calls.
  if (rows <= advised + advised / 32) return;
  advised = rows;
  for (int h = 0; h < shape_.kv_heads; ++h) {
    k_[slot(layer, h)].advise_huge(uint64_t(row_offset(rows, k_stride())));
    v_[slot(layer, h)].advise_huge(uint64_t(row_offset(rows, v_stride())));
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
  head.rows = rows_[size_t(layer)];
  return head;
}

Status KvCache::truncate(RowCount rows) {
  if (rows.v < 0) return fail(Code::kInvalidArgument, "KV cache cannot be cut to {} rows", rows.v);
  for (int layer = 0; layer < shape_.layers; ++layer) {
    if (rows.v == 0 || rows.v >= rows_[size_t(layer)]) continue;  // an empty sequence needs no row
    const int64_t needed = first_visible_row(rows.v, shape_.window_of(layer));
    if (first_row_[size_t(layer)] > needed) {
      return fail(
          Code::kInvalidArgument,
          "cannot cut the KV cache to {} rows: layer {} has a window of {} tokens and no longer holds rows {} to "
          "{}; start from the whole prompt",
          rows.v, layer, shape_.window_of(layer), needed, first_row_[size_t(layer)] - 1);
    }
  }
  for (int layer = 0; layer < shape_.layers; ++layer) {
    const int64_t old = rows_[size_t(layer)];
    if (rows.v >= old) continue;
    rows_[size_t(layer)] = rows.v;
    if (rows.v == 0) first_row_[size_t(layer)] = 0;
    advised_[size_t(layer)] = std::min(advised_[size_t(layer)], rows.v);
    for (int h = 0; h < shape_.kv_heads; ++h) {
      VirtualArray& k = k_[slot(layer, h)];
      VirtualArray& v = v_[slot(layer, h)];
      k.release(uint64_t(row_offset(rows.v, k_stride())), k.size());
      v.release(uint64_t(row_offset(rows.v, v_stride())), v.size());
    }
  }
  return {};
}

void KvCache::release_outside_window(int layer) {
  const int64_t window = shape_.window_of(layer);
  const int64_t first = first_visible_row(rows_[size_t(layer)], window);
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
  for (int layer = 0; layer < shape_.layers; ++layer) rows += rows_[size_t(layer)] - first_row_[size_t(layer)];
  return rows * shape_.kv_heads * (k_stride() + v_stride());
}

int64_t KvCache::bytes_for(const KvShape& shape, KvTypes types, int64_t n) {
  const int64_t row = kv_row_bytes(types.k, shape.dim_k) + kv_row_bytes(types.v, shape.dim_v);
  return n * row * shape.layers * shape.kv_heads;
}

}  // namespace longkv
