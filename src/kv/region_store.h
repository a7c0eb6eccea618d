// Older rows of every head in an encoded form: the middle between first rows ("sinks") and recent ones, which stay in
// the cache's arrays as they came.
//
//   rows of a head   [0, sink) as they came | [sink, end) encoded | [end, rows) as they came
//
// The middle grows in steps of 32 rows as soon as at least `window` rows remain after it, so recent rows number window
// to window + 31, and its steps begin at `sink`: encoding row by row or a whole prompt at once gives the same bytes.
// While a prompt is read nothing is encoded, as its attention is meant to be dense. Channels of K may be dropped per
// head, or keys held as their products with a few directions; the mean over all old keys of what is lost can be added
// back to each. A head without any keeps means alone. Layers with a sliding window are left as they are.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/virtual_array.h"
#include "kv/state.h"
#include "kv/types.h"
#include "longkv/status.h"

namespace longkv {

// What stands for the old rows of a head that keeps nothing of K.
enum class RemovedAs {
  kMean,      // the mean of V, at the score of the mean key
  kConstant,  // the mean of V, at a score that does not depend on the query
  kDrop,      // nothing
};

// What a head keeps of K in its middle: some channels, or products of keys with directions.
struct HeadMask {
  std::vector<uint16_t> channels;            // ascending
  std::vector<float> alpha;                  // [channels], empty: 1
  std::vector<float> keys{};                 // [n][dim_k], directions: a key is held as n products; empty: channels
  std::vector<float> queries{};              // [n][dim_k], what queries meet those products through
  RemovedAs removed = RemovedAs::kConstant;  // of a head that keeps nothing
  float score = 0.0f;                        // kConstant
  bool directed() const { return !keys.empty(); }
  int64_t kept(int64_t dim_k) const { return directed() ? int64_t(keys.size()) / dim_k : int64_t(channels.size()); }
  bool operator==(const HeadMask&) const = default;
};

struct RegionSpec {
  KvType k = KvType::kF16;
  KvType v = KvType::kF16;
  int64_t sink = 0;
  int64_t window = 0;
  std::vector<HeadMask> masks;  // [layers][kv_heads]; empty: all channels
  bool compensate = false;      // the mean of what old keys lost is added back
};

class RegionStore {
 public:
  static constexpr int64_t kStep = 32;

  // Errors: kInvalidArgument (channels that a type cannot hold), kOutOfMemory (address space).
  static Result<RegionStore> create(const KvShape& shape, RegionSpec spec, RowCapacity capacity);

  const RegionSpec& spec() const { return spec_; }
  bool active(int layer) const { return window_.empty() || window_[size_t(layer)] == 0; }
  // Where the middle of a head with `rows` rows ends.
  int64_t wanted_end(int64_t rows) const {
    const int64_t old = rows - spec_.sink - spec_.window;
    return spec_.sink + (old > 0 ? old / kStep * kStep : 0);
  }
  int64_t kept_channels(int layer, int kv_head) const { return head(layer, kv_head).middle.dim_k; }
  int64_t end(int layer, int kv_head) const { return head(layer, kv_head).middle.end; }
  // nullptr while the middle is empty. The pointer stays valid, its content follows the store.
  const KvMiddle* middle(int layer, int kv_head) const;

  // Encodes rows [begin, end) of a head (whole steps at or after the middle's end) from its arrays; heads and steps may
  // be encoded by several threads. commit() then makes [.., end) the middle.
  void encode(int layer, int kv_head, const KvHeadView& head, int64_t begin, int64_t end);
  void commit(int layer, int kv_head, const KvHeadView& head, int64_t end);
  // Cuts the middle to [sink, end), a whole number of steps, and returns the memory behind it.
  void cut(int layer, int kv_head, int64_t end);
  // Replaces a head's mask. Only while its middle is empty.
  Status set_mask(int layer, int kv_head, HeadMask mask);

  // Promises that the middle will reach row `end` soon: huge pages where whole units of them will be filled.
  void expect(int layer, int kv_head, int64_t end);

  int64_t bytes_used() const;
  // Rows held encoded, over all heads.
  int64_t rows_encoded() const;
  // Bytes of the encoded rows of `rows` rows of one head.
  int64_t head_bytes(int layer, int kv_head, int64_t rows) const;
  // Saves or restores a head, of `rows` rows in all.
  void visit(KvState& state, int layer, int kv_head, int64_t rows);

 private:
  struct Head {
    KvMiddle middle;
    HeadMask mask;
    VirtualArray k, v;
    std::vector<float> directions;  // KvMiddle
    std::vector<float> to_kept;     // [dim_k][n], the mask's keys by channel
    std::vector<double> sum_v;      // of heads that keep nothing
    std::vector<float> mean_v;
    std::vector<double> sum_k;  // of heads whose keys' mean is wanted; raw keys
    std::vector<float> mean_k;  // what is lost of it
    int64_t advised = 0;        // rows
  };
  Head& head(int layer, int kv_head) { return heads_[size_t(layer) * size_t(kv_heads_) + size_t(kv_head)]; }
  const Head& head(int layer, int kv_head) const { return heads_[size_t(layer) * size_t(kv_heads_) + size_t(kv_head)]; }
  Status shape_head(Head& head);
  bool wants_mean_k(const Head& head) const;
  void update_means(Head& head);

  RegionSpec spec_;
  int kv_heads_ = 0;
  int dim_k_ = 0;
  int dim_v_ = 0;
  int64_t capacity_ = 0;
  std::vector<int64_t> window_;
  std::vector<Head> heads_;
};

}  // namespace longkv
