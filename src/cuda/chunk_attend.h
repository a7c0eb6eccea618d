// Attention of a chunk behind a prompt, and its gradient, on a card: fp32 products around the kernels of cuda/chunk.h.
// Only for sources built with CUDA.
#pragma once

#include <cstdint>

#include "base/threads.h"
#include "cuda/gemm.h"
#include "cuda/prompt_rows.h"
#include "grad/chunk_attention.h"

namespace longkv {

class CardChunkAttention {
 public:
  static constexpr int64_t kScoreBytes = int64_t(256) << 20;  // of the scores that are held at once

  // score_bytes: fewer are for tests, which see what several pieces of few rows give.
  CardChunkAttention(CardPromptRows& rows, CardGemm& gemm, cudaStream_t stream, ThreadPool& pool,
                     int64_t score_bytes = kScoreBytes)
      : rows_(rows), gemm_(gemm), stream_(stream), pool_(pool), score_bytes_(score_bytes) {}

  // As attend_chunk and attend_chunk_backward (grad/chunk_attention.h).
  Status attend(const ChunkAttention& a, float* out, float* lse);
  Status backward(const ChunkAttention& a, const float* out, const float* lse, const float* dout,
                  const ChunkAttentionGradient& gradient);

 private:
  struct Call;
  Status open(const ChunkAttention& a, bool backward, int64_t dprompt_bytes, Call& call);
  Status send(const ChunkAttention& a, const float* out, const float* lse, const float* dout, Call& call);
  Status prepare(const ChunkAttention& a, Call& call);
  Status scores_of(const Call& call, size_t piece);
  Status fetch(void* to, const void* from, int64_t bytes);

  CardPromptRows& rows_;
  CardGemm& gemm_;
  cudaStream_t stream_;
  ThreadPool& pool_;
  int64_t score_bytes_;
  CardBuffer memory_, dprompt_;
  PinnedBuffer host_;
};

}  // namespace longkv
