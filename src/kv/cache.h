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
};

class KvCache {
 public:
  // Errors: kInvalidArgument (shape), kOutOfMemory (address space).
  static Result<KvCache> create(const KvShape& shape, KvTypes types, RowCapacity capacity);

  const KvShape& shape() const { return shape_; }
  KvTypes types() const { return types_; }
  RowCapacity capacity() const { return capacity_; }
  RowCount rows(int layer) const { return {rows_[size_t(layer)]}; }

  // Appends n rows to every KV head of a layer. k: [n][kv_heads][dim_k], v: [n][kv_heads][dim_v], fp32.
  // Heads are written by the pool's threads. Errors: kInvalidArgument when the capacity would be exceeded.
  Status append(int layer, const float* k, const float* v, int64_t n, ThreadPool& pool);

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
  KvShape shape_;
  KvTypes types_;
  RowCapacity capacity_;
  std::vector<int64_t> rows_;       // [layers]
  std::vector<int64_t> first_row_;  // [layers], rows below were released
  std::vector<VirtualArray> k_;     // [layers][kv_heads]
  std::vector<VirtualArray> v_;
};

}  // namespace longkv
