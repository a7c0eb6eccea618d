// Rows of prompts that chunks attend on a card, in fp32 copies that stay there while memory lasts. Only for sources
// built with CUDA.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/threads.h"
#include "cuda/runtime.h"
#include "grad/chunk_attention.h"
#include "longkv/status.h"

namespace longkv {

class CardPromptRows {
 public:
  struct Rows {
    const float *k = nullptr, *v = nullptr;  // [kv_heads][end - begin][dim_k], [..][dim_v]
    int64_t begin = 0, end = 0;
  };
  CardPromptRows(CardMemory& memory, cudaStream_t stream, ThreadPool& pool)
      : memory_(memory), stream_(stream), pool_(pool) {}

  // Valid until the next call. Errors: kOutOfMemory, kUnsupported (heads that hold different rows).
  Result<Rows> get(const ChunkAttention& a);
  void forget(uint64_t prompt_id);
  // Makes a buffer at least so large; its content is lost. Rows used longest ago make room.
  Status grow(CardBuffer& buffer, int64_t bytes, const std::string& name);
  int64_t uploads() const { return uploads_; }

 private:
  struct Entry {
    uint64_t id;
    int layer;
    int64_t begin, end;
    int64_t used;
    CardBuffer memory;
  };
  Result<CardBuffer> take(int64_t bytes, const std::string& name);
  Status copy(const ChunkAttention& a, bool values, int64_t begin, int64_t end, float* to);

  CardMemory& memory_;
  cudaStream_t stream_;
  ThreadPool& pool_;
  PinnedBuffer staging_;
  std::vector<Entry> entries_;
  int64_t clock_ = 0, uploads_ = 0;
};

}  // namespace longkv
