// channel_grams() of grad/channel_gram.h on a card. Only for sources built with CUDA.
#pragma once

#include <cstdint>
#include <functional>

#include "base/threads.h"
#include "cuda/gemm.h"
#include "cuda/prompt_rows.h"
#include "grad/channel_gram.h"

namespace longkv {

class CardChannelGrams {
 public:
  static constexpr int64_t kWeightedBytes = int64_t(64) << 20;  // of values times probabilities that are held at once

  CardChannelGrams(CardPromptRows& rows, CardGemm& gemm, cudaStream_t stream, ThreadPool& pool,
                   int64_t weighted_bytes = kWeightedBytes)
      : rows_(rows), gemm_(gemm), stream_(stream), pool_(pool), weighted_bytes_(weighted_bytes) {}

  // wo: writes the output matrix in fp32, [dim][query heads * dim_v], to the card.
  Status run(const ChunkAttention& a, const ChannelGramInputs& in, const std::function<Status(float*)>& wo,
             double* grams);

 private:
  struct Call;
  Status open(const ChunkAttention& a, const ChannelGramInputs& in, Call& call);
  Status send(const ChunkAttention& a, const ChannelGramInputs& in, const Call& call);
  Status piece(const ChunkAttention& a, const Call& call, int64_t begin, int64_t end);

  CardPromptRows& rows_;
  CardGemm& gemm_;
  cudaStream_t stream_;
  ThreadPool& pool_;
  int64_t weighted_bytes_;
  CardBuffer memory_;
  PinnedBuffer host_;
};

}  // namespace longkv
