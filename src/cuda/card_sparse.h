// Block-sparse reading of prompts on a card: estimates, lists and attention of one chunk after another. Counterpart of
// prefill/sparse.h for prefill=block_sparse. Only for sources built with CUDA.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/gemm.h"
#include "cuda/prompt_blocks.h"
#include "cuda/runtime.h"
#include "model/config.h"
#include "prefill/spec.h"

namespace longkv {

class CardSparse {
 public:
  static Result<std::unique_ptr<CardSparse>> create(CardMemory& memory, const ModelConfig& config,
                                                    const PrefillSpec& spec, int64_t context, int64_t chunk);
  static int64_t bytes(const ModelConfig& config, const PrefillSpec& spec, int64_t context, int64_t chunk);

  // Whether this layer reads a prompt so that ends before `prompt_end`.
  bool applies(int layer, int64_t prompt_end) const;
  // Rows [0, start) of kv (f16) are there before the first chunk.
  Status begin_layer(const card::CardKv& kv, int64_t start, cudaStream_t stream);
  // Attention of queries [first, first + n), whose rows are in a.kv: the prompt's last ones attend everything.
  Status attend(const card::AttendArgs& a, int64_t first, int64_t n, int64_t prompt_end, CardGemm& gemm,
                card::half_t* out, cudaStream_t stream);

 private:
  CardSparse(const ModelConfig& config, const PrefillSpec& spec) : config_(config), spec_(spec) {}

  const ModelConfig& config_;
  PrefillSpec spec_;
  int64_t capacity_ = 0;  // blocks of a head
  CardBuffer memory_;
  card::half_t *key_means_ = nullptr, *query_means_ = nullptr;
  float* scores_ = nullptr;
  card::PromptLists lists_;
};

}  // namespace longkv
