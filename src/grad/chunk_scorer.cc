#include "grad/chunk_scorer.h"

#include <cmath>
#include <utility>

#include "base/checked.h"
#include "base/error.h"
#include "base/log.h"
#include "grad/chunk_model.h"

namespace longkv {

namespace {

constexpr int64_t kSampledQueries = 32;

// Every so many queries, the last one among them.
void take_queries(const LayerTape& tape, int64_t first, int64_t tokens, KeepQueries& queries) {
  const int64_t step = ceil_div(tokens, kSampledQueries);
  const size_t q = tape.q.size() / size_t(tokens), out = tape.attended.size() / size_t(tokens);
  for (int64_t t = (tokens - 1) % step; t < tokens; t += step) {
    queries.positions.push_back(first + t);
    const auto at = [&](const std::vector<float>& x, size_t width) { return x.begin() + t * int64_t(width); };
    queries.q.insert(queries.q.end(), at(tape.q, q), at(tape.q, q) + int64_t(q));
    queries.out.insert(queries.out.end(), at(tape.attended, out), at(tape.attended, out) + int64_t(out));
  }
}

}  // namespace

struct ChunkScorer::Tapes {
  ChunkTape tape;
  std::vector<float> dfinal;
};

ChunkScorer::ChunkScorer(std::unique_ptr<ChunkModel> model, ThreadPool& pool)
    : model_(std::move(model)), pool_(pool), tapes_(std::make_unique<Tapes>()) {}

ChunkScorer::~ChunkScorer() = default;

Result<std::unique_ptr<ChunkScorer>> ChunkScorer::create(std::shared_ptr<const LoadedModel> model, int64_t context,
                                                         ProductType products, ThreadPool& pool) {
  LONGKV_ASSIGN(auto chunk_model,
                ChunkModel::create(std::move(model), context, pool, make_cpu_chunk_ops(pool, products)));
  return std::unique_ptr<ChunkScorer>(new ChunkScorer(std::move(chunk_model), pool));
}

int64_t ChunkScorer::bytes_per_token(const ModelConfig& c) {
  const int64_t q = int64_t(c.heads) * c.head_dim_k, k = int64_t(c.kv_heads) * c.head_dim_k;
  const int64_t v = int64_t(c.kv_heads) * c.head_dim_v, out = int64_t(c.heads) * c.head_dim_v;
  // Inputs of norms are kept too, where a model has them.
  const int64_t layer = 4 * c.dim + 2 * (q + k) + v + out + c.heads + 2 * c.ff_dim;
  const int64_t backward = 8 * c.dim + 2 * c.ff_dim + out + q + k + v;
  return (c.layers * layer + backward) * int64_t(sizeof(float));
}

Status ChunkScorer::run(const KvCache& cache, std::span<const int32_t> ids, KeepScoring scoring,
                        std::vector<KeepScore>& scores) {
  const int layers = model_->config().layers, heads = model_->config().heads;
  const int64_t tokens = int64_t(ids.size()), first = cache.tokens(0).v;
  const ChunkPrompt prompt{cache, first, {}};
  ChunkTape& tape = tapes_->tape;
  LONGKV_TRY(model_->forward(prompt, ids, {}, tape));
  std::vector<std::vector<float>> gradients;
  if (scoring != KeepScoring::kMass) {
    tapes_->dfinal.resize(tape.final.size());
    LONGKV_ASSIGN(const double loss, model_->next_token_loss(tape, ids, tapes_->dfinal.data()));
    if (std::isfinite(loss)) {
      LONGKV_TRY(model_->backward(prompt, {}, tape, tapes_->dfinal.data(), nullptr, &gradients));
    } else if (tokens > 1) {
      LONGKV_TRY(
          notice(fmt::format("the loss of the {} tokens from {} on is not a finite number, so merged keys are "
                             "plain means there",
                             tokens, first)));
    }
  }
  scores.assign(size_t(layers), KeepScore{});
  for (int layer = 0; layer < layers; ++layer) {
    if (!model_->learns(layer)) continue;
    KeepScore& score = scores[size_t(layer)];
    const LayerTape& y = tape.layers[size_t(layer)];
    score.rows = cache.rows(layer).v + tokens;
    if (!gradients.empty()) score.gradient = std::move(gradients[size_t(layer)]);
    if (scoring == KeepScoring::kGradient) continue;
    score.mass.resize(size_t(heads * score.rows));
    chunk_mass(model_->attention_of(layer, prompt, {}, y, tokens), y.lse.data(), score.mass.data(), pool_);
    take_queries(y, first, tokens, score.queries);
  }
  return {};
}

}  // namespace longkv
