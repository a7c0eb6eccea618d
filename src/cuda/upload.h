// Weights from memory to a card. Only for sources built with CUDA.
#pragma once

#include <memory>

#include "base/threads.h"
#include "cuda/runtime.h"
#include "cuda/stack.h"

namespace longkv {

// Copies matrices over in pieces of two pinned buffers: while one travels, the next is filled from the mapped file (or
// from the packed form of a matrix, whose file's pages may be gone).
class WeightUpload {
 public:
  static constexpr int64_t kPiece = int64_t(32) << 20;  // bytes; of VRAM, two of them

  // Work is queued on `stream`, which must outlive this. threads: that fill a piece.
  static Result<std::unique_ptr<WeightUpload>> create(CardMemory& memory, cudaStream_t stream, int threads);
  ~WeightUpload();

  // The stack's sources to its parts, which have been placed.
  Status stack(const CardStack& to);

 private:
  WeightUpload(cudaStream_t stream, int threads) : stream_(stream), pool_(threads) {}
  Status rows_of(const CardMatrix& m, const Weight& w, int64_t first);

  cudaStream_t stream_;
  ThreadPool pool_;
  PinnedBuffer host_[2];
  CardBuffer raw_[2];
  cudaEvent_t done_[2] = {};
  int next_ = 0;
};

}  // namespace longkv
