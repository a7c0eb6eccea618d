// The KV cache of one sequence: for each layer and KV head one growing array of K rows and one of V rows.
//
// Each array lies in its own reserved address range, so it grows without copying, costs memory only for written pages,
// and a whole head is one long sequential read. Layers advance one after another (layer-major prompts), so every
// layer counts its own rows.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/threads.h"
#include "base/virtual_array.h"
#include "kv/types.h"
#include "longkv/status.h"

namespace longkv {

struct KvTypes {
  KvType k = KvType::kF16;
  KvType v = KvType::kF16;
  bool operator==(const KvTypes&) const = default;
};

class KvCache {
 public:
  // Largest dim_k and dim_v that the kernels take.
  static constexpr int kMaxDim = 1024;

  // Errors: kInvalidArgument (shape), kOutOfMemory (address space).
  static Result<KvCache> create(const KvShape& shape, KvTypes types, RowCapacity capacity);

  const KvShape& shape() const { return shape_; }
  KvTypes types() const { return types_; }
  RowCapacity capacity() const { return capacity_; }
  RowCount rows(int layer) const { return {rows_[size_t(layer)]}; }

  // Appends n rows to every KV head of a layer. k: [n][kv_heads][dim_k], v: [n][kv_heads][dim_v], fp32.
  // Heads are written by the pool's threads. Errors: kInvalidArgument when the capacity would be exceeded; nothing is
  // written then.
  Status append(int layer, const float* k, const float* v, int64_t n, ThreadPool& pool);

  // Promises that a layer will reach `rows` rows soon (a prompt of known length), so that huge pages can be asked for
  // before its pages are touched. Without it they come only once memory is known to be filled.
  void expect_rows(int layer, RowCount rows);

  KvHeadView view(int layer, int kv_head) const;

  // Drops rows at the end (a rejected or edited suffix) in all layers; rows below stay untouched.
  // Errors: kInvalidArgument when a sliding-window layer no longer holds the rows that the new end needs.
  Status truncate(RowCount rows);

  // In layers with a sliding window: returns the memory of rows that no later query can see.
  void release_outside_window(int layer);

  // Bytes of rows now held, and bytes that n rows take (both over all layers and heads, K and V).
  int64_t bytes_used() const;
  static int64_t bytes_for(const KvShape& shape, KvTypes types, int64_t n);

 private:
  // Row bytes of K and V are the strides: rows are packed.
  int64_t k_stride() const { return kv_row_bytes(types_.k, shape_.dim_k); }
  int64_t v_stride() const { return kv_row_bytes(types_.v, shape_.dim_v); }
  size_t slot(int layer, int kv_head) const { return size_t(layer) * size_t(shape_.kv_heads) + size_t(kv_head); }
  void advise(int layer, int64_t rows_sure);

  KvShape shape_;
  KvTypes types_;
  RowCapacity capacity_;
  std::vector<int64_t> rows_;       // [layers]
  std::vector<int64_t> first_row_;  // [layers], rows below were released
  std::vector<int64_t> advised_;    // [layers], rows that huge pages were asked for
  std::vector<VirtualArray> k_;     // [layers][kv_heads]
  std::vector<VirtualArray> v_;
};

}  // namespace longkv
