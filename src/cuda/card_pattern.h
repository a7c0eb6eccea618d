// Sparse patterns of prompt attention on a card: each looks at a chunk and attends what it chose, on the stream that it
// is given and without waiting for it. Counterpart of prefill/pattern.h. Only for sources built with CUDA.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/gemm.h"
#include "cuda/kv.h"
#include "cuda/runtime.h"
#include "model/config.h"
#include "prefill/spec.h"

namespace longkv {

// Queries [first, first + n) of a chunk, whose rows are in attend.kv (f16); the first `sparse` of them, at least one,
// are to be attended.
struct CardPatternChunk {
  card::AttendArgs attend;
  int64_t first = 0, n = 0, sparse = 0;
  card::half_t* out = nullptr;
  unsigned long long* pairs = nullptr;  // on the card: computed (query, key) pairs
};

class CardPattern {
 public:
  virtual ~CardPattern() = default;
  // Rows [0, start) of kv (f16) are there before the first chunk.
  virtual Status begin_layer(int layer, const card::CardKv& kv, int64_t start, cudaStream_t stream) = 0;
  virtual Status attend(int layer, const CardPatternChunk& chunk, CardGemm& gemm, cudaStream_t stream) = 0;
};

// For prompts of `context` tokens that are read `chunk` at a time.
struct CardPatternShape {
  const ModelConfig* config = nullptr;
  PrefillSpec spec;
  int64_t context = 0, chunk = 0;
};
// MInference's patterns, and XAttention. Errors: kOutOfMemory; of the former also those of load_assignment.
Result<std::unique_ptr<CardPattern>> make_card_assigned(CardMemory& memory, const CardPatternShape& shape);
Result<std::unique_ptr<CardPattern>> make_card_xattention(CardMemory& memory, const CardPatternShape& shape);
int64_t card_assigned_bytes(const CardPatternShape& shape);
int64_t card_xattention_bytes(const CardPatternShape& shape);

// Bytes of the products of queries and keys that are held at once, where more than one KV head's are.
constexpr int64_t kPatternScoreBytes = int64_t(256) << 20;

// scores = queries . keys of `batch` matrices: rows of `depth` halves, scores_stride floats from row to row.
struct PatternProduct {
  int64_t queries = 0, keys = 0, depth = 0;
  int64_t batch = 1, query_step = 0, key_step = 0;
  int64_t scores_stride = 0;
};
inline Status pattern_product(CardGemm& gemm, const PatternProduct& p, const card::half_t* queries,
                              const card::half_t* keys, float* scores, cudaStream_t stream) {
  CardProduct product{p.queries, p.keys,          p.depth, false,        true,       p.depth,
                      p.depth,   p.scores_stride, p.batch, p.query_step, p.key_step, p.queries * p.scores_stride};
  product.halves = true;
  return gemm.run(product, queries, keys, scores, stream);
}

}  // namespace longkv
