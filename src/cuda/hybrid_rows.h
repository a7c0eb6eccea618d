// The rows of all layers that choose blocks, in memory; on the card one layer's rows while a prompt is read, and
// between prompts, in the same bytes, the blocks that decoding attended lately. Only for sources built with CUDA.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/hot.h"
#include "cuda/runtime.h"

namespace longkv {

class HybridRows {
 public:
  struct Shape {
    KvType type = KvType::kF16;  // not bf16
    int kv_heads = 0;
    int dim = 0;
    int block = 16;
    int64_t context = 0;
    int64_t chunk = 0;           // prompt tokens that a layer takes at a time
    int64_t list_blocks = 0;     // most blocks that one step attends
    std::vector<bool> layers{};  // those whose rows lie here

    int64_t count() const;
    int64_t blocks() const;
    // Bytes of VRAM: the least that does, and what staging and tables take beside it.
    int64_t least_bytes() const;
    int64_t fixed_bytes() const;
    int64_t host_bytes() const;
  };
  // Takes all of the VRAM that is left, as far as it is of use. Errors: kOutOfMemory.
  static Result<std::unique_ptr<HybridRows>> create(CardMemory& memory, const Shape& shape, ThreadPool& pool);
  ~HybridRows();

  bool holds(int layer) const { return index_[size_t(layer)] >= 0; }
  int64_t slots() const { return slots_; }  // blocks of a layer and KV head that fit on the card
  int64_t hot_bytes() const { return slots_ * shape_.count() * shape_.kv_heads * store_.record; }

  // --- prompts. work(): the present layer's rows in f16
  const card::CardKv& work() const { return work_; }
  // Rows [0, start) come to work().
  Status begin_layer(int layer, int64_t start, cudaStream_t stream);
  // Where rows of a chunk from position `first` on are to be written; spill() sends them to memory while the stream
  // goes on.
  Result<card::CardKv> stage(int64_t first, cudaStream_t stream);
  Status spill(int layer, int64_t first, int64_t n, cudaStream_t stream);
  // The stream goes on when all rows have arrived.
  Status finish(cudaStream_t stream);

  // --- decoding
  // Before a step: nothing is on the card if a prompt was read since the last.
  Status prepare(cudaStream_t stream);
  card::BlockStore store(int layer) const;
  card::HotBlocks hot(int layer) const;
  const unsigned long long* totals() const { return totals_; }  // on the card: blocks found, blocks fetched
  int64_t record_bytes() const { return store_.record; }
  int64_t crossed_bytes() const { return crossed_; }  // over the bus for prompts, both ways

 private:
  HybridRows() = default;
  Status allocate(CardMemory& memory, ThreadPool& pool);

  struct Staging {
    card::CardKv kv;
    cudaEvent_t ready = nullptr, gone = nullptr;
  };

  Shape shape_;
  std::vector<int> index_;  // of a layer among those held here, or -1
  std::vector<SharedRows> rows_;
  card::BlockStore store_;  // without data
  CardBuffer staging_memory_, tables_, hot_memory_;
  Staging staging_[2];
  int next_ = 0;
  CardStream bus_;
  card::CardKv work_;
  int64_t slots_ = 0;
  int32_t *slot_of_ = nullptr, *block_of_ = nullptr, *used_ = nullptr, *missing_ = nullptr, *count_ = nullptr;
  int64_t table_bytes_ = 0;
  unsigned long long* totals_ = nullptr;
  bool empty_ = false;  // the tables say truly what is on the card
  int64_t crossed_ = 0;
};

}  // namespace longkv
