// Sparse reading of prompts on a card: which chunks a pattern attends, and which everything. Counterpart of
// prefill/sparse.h. Only for sources built with CUDA.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/card_pattern.h"
#include "cuda/gemm.h"
#include "cuda/runtime.h"
#include "model/config.h"
#include "prefill/attention.h"
#include "prefill/spec.h"

namespace longkv {

class CardSparse {
 public:
  // Patterns that a card has.
  static bool supports(PrefillKind kind);
  static Result<std::unique_ptr<CardSparse>> create(CardMemory& memory, const ModelConfig& config,
                                                    const PrefillSpec& spec, int64_t context, int64_t chunk);
  static int64_t bytes(const ModelConfig& config, const PrefillSpec& spec, int64_t context, int64_t chunk);

  // Whether this layer reads a prompt so that ends before `prompt_end`.
  bool applies(int layer, int64_t prompt_end) const;
  // Rows [0, start) of kv (f16) are there before the first chunk.
  Status begin_layer(int layer, const card::CardKv& kv, int64_t start, cudaStream_t stream) {
    return pattern_->begin_layer(layer, kv, start, stream);
  }
  // Attention of queries [first, first + n), whose rows are in a.kv: the prompt's last ones attend everything.
  Status attend(int layer, const card::AttendArgs& a, int64_t first, int64_t n, int64_t prompt_end, CardGemm& gemm,
                card::half_t* out, cudaStream_t stream);

  // Pairs of query and key that a prompt computed, over all layers.
  Status begin_prompt(cudaStream_t stream);
  void count_dense(int64_t window, int64_t first, int64_t n);
  Result<PrefillPairs> pairs(cudaStream_t stream);  // waits

 private:
  CardSparse(const ModelConfig& config, const PrefillSpec& spec) : config_(config), spec_(spec) {}

  const ModelConfig& config_;
  PrefillSpec spec_;
  std::unique_ptr<CardPattern> pattern_;
  CardBuffer counted_;  // by the pattern
  PrefillPairs pairs_;  // others
};

}  // namespace longkv
