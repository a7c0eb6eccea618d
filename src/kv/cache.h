// The KV cache of one sequence: for each layer and KV head one growing array of K rows and one of V rows.
//
// Each array lies in its own reserved address range, so it grows without copying, costs memory only for written pages,
// and a whole head is one long sequential read. Layers advance one after another (layer-major prompts), so every
// layer counts its own tokens; heads may keep different rows, so every head counts its own rows.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/threads.h"
#include "base/virtual_array.h"
#include "kv/region_store.h"
#include "kv/types.h"
#include "longkv/status.h"

namespace longkv {

// Values held per row beside K and V, for recipes that evict or merge.
struct KvRowFields {
  bool pos = false;    // int32: position of the row's RoPE
  bool bias = false;   // fp32: added to the logit
  bool count = false;  // uint16: tokens that the row stands for
  int64_t bytes() const { return (pos ? 4 : 0) + (bias ? 4 : 0) + (count ? 2 : 0); }
};

class KvCache {
 public:
  // Largest dim_k and dim_v that the kernels take.
  static constexpr int kMaxDim = 1024;

  // Errors: kInvalidArgument (shape), kOutOfMemory (address space).
  // disk: where K and V lie; nullptr: in memory. Errors: also kIo.
  static Result<KvCache> create(const KvShape& shape, KvTypes types, RowCapacity capacity, KvRowFields fields = {},
                                std::shared_ptr<DiskSpace> disk = nullptr);

  const KvShape& shape() const { return shape_; }
  KvTypes types() const { return types_; }
  KvRowFields fields() const { return fields_; }
  RowCapacity capacity() const { return capacity_; }
  // Tokens that a layer has seen: the position of the next one.
  TokenCount tokens(int layer) const { return {tokens_[size_t(layer)]}; }
  RowCount rows(int layer, int kv_head) const { return {rows_[slot(layer, kv_head)]}; }
  // Of the layer's fullest head; all heads are equal until heads evict apart.
  RowCount rows(int layer) const;

  // Appends n rows to every KV head of a layer. k: [n][kv_heads][dim_k], v: [n][kv_heads][dim_v], fp32.
  // Heads are written by the pool's threads. Errors: kInvalidArgument when the capacity would be exceeded, kIo when the
  // disk is full; nothing is written then.
  Status append(int layer, const float* k, const float* v, int64_t n, ThreadPool& pool);

  // From now on old rows of an empty cache move to `regions`. Errors: kInternal when rows are held already.
  Status add_regions(RegionStore regions);
  const RegionStore* regions() const { return regions_ ? &*regions_ : nullptr; }
  RegionStore* regions() { return regions_ ? &*regions_ : nullptr; }
  // Encodes what has become old in a layer and returns the memory of its rows. Nothing happens without regions.
  void encode_old(int layer, ThreadPool& pool);
  // The opposite, for rows that must move: rows from `row` on of all heads come back as the cache's own, with the
  // values that decoding gives.
  void decode_old(int layer, int64_t row, ThreadPool& pool);

  // Promises that a layer will reach `rows` rows soon (a prompt of known length), so that huge pages can be asked for
  // before its pages are touched. Without it they come only once memory is known to be filled.
  void expect_rows(int layer, RowCount rows);

  KvHeadView view(int layer, int kv_head) const;
  // Rows that will be read soon, of a cache on disk; a hint.
  void will_read(int layer, int kv_head, std::span<const RowRange> rows) const;
  bool on_disk() const { return on_disk_; }

  // Keeps the rows kept[kv_head] (ascending) of each head and drops the others for ever: rows move down in place, and
  // the memory above them returns to the system. Errors: kInternal for lists that are not ascending rows, or in a
  // sliding-window layer, whose rows are its positions; nothing is moved then.
  Status compact(int layer, std::span<const std::vector<int64_t>> kept, ThreadPool& pool);
  // Drops `row` in O(1): the last row takes its place. The order of rows is then no longer that of positions.
  void replace_with_last(int layer, int kv_head, int64_t row);

  // One row as fp32, and written back (k or v may be nullptr: left alone). For merging and re-rotation.
  void read_row(int layer, int kv_head, int64_t row, float* k, float* v) const;
  void write_row(int layer, int kv_head, int64_t row, const float* k, const float* v);
  // Only the fields that the cache was created with.
  void write_fields(int layer, int kv_head, int64_t row, int32_t pos, float bias, uint16_t count);

  // Drops the tokens at the end (a rejected or edited suffix) in all layers; rows below stay untouched.
  // Errors: kInvalidArgument when a sliding-window layer no longer holds the rows that the new end needs, or when rows
  // were evicted since (the rows that the shorter sequence would have kept are gone). 0 tokens is always possible.
  Status truncate(TokenCount tokens);
  // The shortest sequence above 0 that truncate() can make of what eviction left, and of what windows left too.
  TokenCount shortest() const;
  TokenCount shortest_cut() const;

  // In layers with a sliding window: returns the memory of rows that no later query can see.
  void release_outside_window(int layer);
  // Those layers hold so many tokens more than their window, so that as many can be cut from the end.
  void set_window_slack(int64_t tokens) { window_slack_ = tokens; }

  // Saves or restores everything, when all layers have seen the same tokens. Restoring goes into an empty cache of the
  // same shape, types and fields, and of any capacity that holds the tokens.
  void visit(KvState& state);

  // Bytes of rows now held with their fields, and bytes of K and V that n rows take (both over all layers and heads).
  int64_t bytes_used() const;
  static int64_t bytes_for(const KvShape& shape, KvTypes types, int64_t n);

 private:
  // Row bytes of K and V are the strides: rows are packed.
  int64_t k_stride() const { return kv_row_bytes(types_.k, shape_.dim_k); }
  int64_t v_stride() const { return kv_row_bytes(types_.v, shape_.dim_v); }
  size_t slot(int layer, int kv_head) const { return size_t(layer) * size_t(shape_.kv_heads) + size_t(kv_head); }
  void advise(int layer, int kv_head, int64_t rows_sure);
  void shrink(size_t slot, int64_t rows);
  void append_fields(int layer, int64_t n);
  void decode_old_head(int layer, int kv_head, int64_t row);
  bool counts_valid() const;
  void visit_head(KvState& state, int layer, int kv_head);

  KvShape shape_;
  KvTypes types_;
  KvRowFields fields_;
  RowCapacity capacity_;
  int64_t window_slack_ = 0;
  bool on_disk_ = false;
  std::vector<int64_t> tokens_;     // [layers]
  std::vector<int64_t> fixed_;      // [layers], tokens seen when rows were last evicted; 0: never
  std::vector<int64_t> first_row_;  // [layers], rows below were released
  std::vector<int64_t> rows_;       // [layers][kv_heads]
  std::vector<int64_t> advised_;    // [layers][kv_heads], rows that huge pages were asked for
  std::vector<VirtualArray> k_;     // [layers][kv_heads]
  std::vector<VirtualArray> v_;     // ...
  std::vector<VirtualArray> pos_;   // ..., empty without the field
  std::vector<VirtualArray> bias_;
  std::vector<VirtualArray> counts_;
  std::optional<RegionStore> regions_;
};

}  // namespace longkv
