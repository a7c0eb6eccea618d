// Which rows stay in the cache for ever: eviction and merging, one method per file.
//
// A keeper acts on one layer at a time, when its part of a prompt is complete, so that the peak of a layer-major prompt
// is the budget of all layers and the rows of one. The prompt's own attention reads every row, and what is dropped is
// dropped after; methods that act after every chunk are the exception. Methods that also bound the growth while
// decoding evict one row per head and token.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "base/threads.h"
#include "kv/attend.h"
#include "kv/cache.h"
#include "kv/recipe.h"
#include "kv/state.h"
#include "longkv/status.h"

namespace longkv {

// Turns n rows of dim_k channels, `stride` values apart, by `delta` positions of a layer's RoPE: a pure rotation,
// without the magnitude that some RoPE scalings have. Given by the model; the KV side knows nothing of frequencies.
using KvRotate = std::function<void(int layer, double delta, float* rows, int64_t n, int64_t stride)>;

// When a keeper wants to evict while decoding.
enum class KeepStep {
  kNone,
  kBeforeAttention,  // by position: the new token's row is in the cache, its attention is not yet computed
  kAfterAttention,   // by attention: the step's log-sum-exps are known
};

// What a token is, as far as keepers care.
enum class TokenClass : uint8_t { kOther, kSpecial, kPunctuation };

enum class KeepScoring {
  kNone,
  kMass,      // masses and queries
  kGradient,  // the gradient of the chunk's loss by the keys
  kBoth,
};

// What a keeper wants to know of a prompt; nothing else is collected.
struct KeepNeeds {
  static constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
  int64_t mass_queries = 0;      // attention mass of each row from the last n queries of the prompt; kAll: from all
  int64_t last_queries = 0;      // the last n queries themselves and their attention outputs
  int64_t sampled_queries = 0;   // about n queries, evenly spaced over the prompt, and their outputs
  int64_t statistics_from = -1;  // mean and covariance of un-rotated queries at positions >= this; -1: no
  bool rotate = false;           // KvRotate
  KvRowFields fields;
  KeepStep step = KeepStep::kNone;
  bool every_chunk = false;  // act after every chunk of a prompt, on its queries; later chunks read what is left
  // A pass of the next chunk through the whole model says how much the rows held matter to it (KeepScore), once a
  // prompt is longer than `scored_above`.
  KeepScoring scoring = KeepScoring::kNone;
  bool before_chunk = false;  // with `scoring` and every_chunk: act before the chunk's rows come, on its scores
  int64_t scored_above = 0;
  // Nothing is dropped until the prompt was read again in pieces of so many tokens; 0: it is not. See repeated().
  int64_t repeat_chunk = 0;
  bool token_classes = false;  // note_classes()
  bool ragged = false;         // heads of a layer may keep different numbers of rows
};

// Queries handed over, RoPE applied, and what attention gave them.
struct KeepQueries {
  std::vector<int64_t> positions;  // ascending
  std::vector<float> q;            // [n][query heads][dim_k]
  std::vector<float> out;          // [n][query heads][dim_v]
};

// Sums over un-rotated queries, per query head.
struct KeepStatistics {
  int64_t n = 0;
  std::vector<double> sum;      // [query heads][dim_k]
  std::vector<double> product;  // [query heads][dim_k][dim_k], symmetric
};

// What a chunk's pass through the whole model says of one layer, over the rows held before it and then its own.
struct KeepScore {
  int64_t rows = 0;             // of each head, the chunk's own included
  std::vector<float> mass;      // [query heads][rows]
  KeepQueries queries;          // about 32, evenly spaced over the chunk
  std::vector<float> gradient;  // [kv_heads][rows][dim_k], of the next tokens' mean loss; empty: there is none
};

// One layer when its prompt is complete, before anything is dropped.
struct KeepInput {
  int layer = 0;
  int layers = 0;
  std::span<const KvHeadView> heads;  // [kv_heads], every row still there
  int64_t tokens = 0;                 // seen by the sequence
  int64_t prompt_tokens = 0;          // of those, read since the last choice
  int group_size = 1;
  AttendParams params;
  // [query heads][mass_stride], by row, as KeepNeeds::mass_queries asks; causal softmax over all rows.
  const float* mass = nullptr;
  int64_t mass_stride = 0;
  int64_t mass_queries = 0;  // queries that were there to give mass
  const KeepQueries* queries = nullptr;
  const KeepStatistics* statistics = nullptr;
  const KeepScore* score = nullptr;  // of the last chunk, where KeepNeeds::scoring asks for it
  bool last = false;                 // nothing of the prompt follows
  const KvRotate* rotate = nullptr;
  ThreadPool* pool = nullptr;
};

// Folds row `from`, which is dropped, into the kept row `into`. Merges of a head are done in order.
struct RowMerge {
  int64_t into = 0;
  int64_t from = 0;
  float k_share = 0.5f;         // k = k_share * k[into] + (1 - k_share) * k[from]
  std::vector<float> k_shares;  // [dim_k], one share a channel instead; empty: k_share for all
  float v_into = 0.5f;          // v = v_into * v[into] + v_from * v[from]
  float v_from = 0.5f;
  float bias = 0.0f;
  uint16_t count = 2;
  int32_t pos = 0;
};

struct KeepChoice {
  std::vector<std::vector<int64_t>> rows;     // [kv_heads], ascending
  std::vector<std::vector<RowMerge>> merges;  // [kv_heads], or empty
  bool before_rope = false;                   // merges turn keys back, mix them, and turn the result to its position
  // [kv_heads], or empty: positions to which the kept rows are turned after the merges.
  std::vector<std::vector<int32_t>> positions;
};

// One decoded token in one layer.
struct KeepStepInput {
  int layer = 0;
  KvCache* cache = nullptr;    // the token's row is the last one of every head
  const float* q = nullptr;    // [query heads][dim_k]
  std::span<const float> lse;  // [query heads], of the attention over all rows of each head; empty before attention
  AttendParams params;
  const KvRotate* rotate = nullptr;
  ThreadPool* pool = nullptr;
};

// A chunk of tokens that repeat a piece of the prompt, in one layer, after its attention. Per KV head.
struct KeepRepeat {
  int layer = 0;
  std::span<const KvHeadView> heads;   // the chunk's rows are the last `tokens` of each
  std::span<const int64_t> first_row;  // of the prompt that is being read again
  std::span<const RowRange> context;   // the piece that is repeated
  std::span<const RowRange> input;     // the repeated input so far, the chunk included
  const float* q = nullptr;            // [tokens][query heads][dim_k]
  int64_t tokens = 0;
  AttendParams params;
  ThreadPool* pool = nullptr;
};

class Keeper {
 public:
  virtual ~Keeper() = default;
  virtual KeepNeeds needs() const = 0;

  // Classes of the tokens from position `first` on, before their rows come.
  virtual void note_classes(int64_t /*first*/, std::span<const TokenClass> /*classes*/) {}
  // Rows that each head keeps. Errors end the prompt.
  virtual Status choose(const KeepInput& input, KeepChoice& choice) = 0;
  // After the choice was carried out: for what depends on where the rows now lie.
  virtual void moved(const KeepInput& /*before*/, const KeepChoice& /*choice*/, KvCache& /*cache*/) {}
  // Methods that read the prompt again: a chunk of the second reading, and the choice in all layers after it.
  virtual void repeated(const KeepRepeat& /*repeat*/) {}
  virtual Status choose_all(const KvCache& /*cache*/, std::vector<KeepChoice>& /*by_layer*/) { return {}; }
  // Row that each head drops now, or -1. The last row takes the place of a dropped one, in state kept here too.
  virtual void step(const KeepStepInput& /*input*/, std::span<int64_t> /*evict*/) {}
  // Tokens at the end were cut (all of them: cache.tokens() is 0): so is state kept for their rows.
  virtual void truncated(const KvCache& /*cache*/) {}
  // Saves or restores what is kept here between two prompts; the cache holds its rows.
  virtual void visit(KvState& /*state*/, const KvCache& /*cache*/) {}
  // Rows per KV head of a layer that stay of a prompt of n tokens (mean over heads), for the plan.
  virtual int64_t planned_rows(int layer, int layers, int64_t tokens) const = 0;
};

// nullptr: the recipe keeps every row. model: identity that learned gates must be for; empty: not checked.
Result<std::unique_ptr<Keeper>> make_keeper(const KeepSpec& spec, const KvShape& shape, const std::string& model = "");

}  // namespace longkv
