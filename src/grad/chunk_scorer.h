// Says how much the rows of a cache matter to the next chunk of a prompt, by passing the chunk through the whole model:
// the mass that it gives them, and the gradient of its loss by their keys.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/threads.h"
#include "kv/keep/keep.h"
#include "longkv/status.h"
#include "model/model.h"
#include "ops/matmul.h"

namespace longkv {

class ChunkModel;

class ChunkScorer {
 public:
  // `products` are those of the pass. Errors: kUnsupported for models whose attention caps its scores.
  static Result<std::unique_ptr<ChunkScorer>> create(std::shared_ptr<const LoadedModel> model, int64_t context,
                                                     ProductType products, ThreadPool& pool);
  ~ChunkScorer();

  // Held while a prompt is read, at most, per token of a chunk: what a forward pass leaves for the backward one.
  static int64_t bytes_per_token(const ModelConfig& config);

  // `cache` holds the tokens before the chunk. scores: [layers]; those of layers with a sliding window stay empty. The
  // gradient is left out, with a notice, where the chunk has no finite loss.
  Status run(const KvCache& cache, std::span<const int32_t> ids, KeepScoring scoring, std::vector<KeepScore>& scores);

 private:
  struct Tapes;
  ChunkScorer(std::unique_ptr<ChunkModel> model, ThreadPool& pool);
  std::unique_ptr<ChunkModel> model_;
  ThreadPool& pool_;
  std::unique_ptr<Tapes> tapes_;  // reused between chunks
};

}  // namespace longkv
