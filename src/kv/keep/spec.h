// The keep stage of a recipe: method and parameters.
#pragma once

#include <cstdint>
#include <string>

namespace longkv {

enum class KeepKind {
  kAll,
  kStreaming,
  kKnorm,
  kKeydiff,
  kRandom,
  kSnapkv,
  kTova,
  kH2o,
  kPyramidkv,
  kExpectedAttention,
  kAdakv,
  kDuo,
  kFastgen,
  kKvzip,
  kNormmass,
  kKvslimmer,
  kAsymkv,
};

enum class KeepPool { kMax, kAvg };
enum class KeepReduce { kMean, kMax, kSum };                 // over the query heads of a KV head
enum class KeepNormalise { kNone, kVisible };                // h2o: mass, or mass per query that could see the row
enum class KeepScorer { kSnapkv, kExpected };                // adakv
enum class KeepSafeguard { kMix, kMin };                     // adakv: blend with equal budgets, or a guaranteed minimum
enum class KeepKeyWeight { kNorm, kMass, kMean, kSlimmer };  // merging: share of a merged key
enum class KeepBias { kEntropy, kCount, kFit };              // merging: log-bias of a merged row
enum class KeepLinkScore { kMass, kCost };                   // merging: which links go first
enum class KeepLinks { kDisjoint, kChained };                // merging: may links share a row, which loses tokens
enum class KeepScope { kHead, kLayer };                      // merging: links per KV head, or one choice for a layer
enum class KeepNorms { kQuery, kPooled, kRelease };          // kvslimmer: where |v - o| comes from

struct KeepSpec {
  KeepKind kind = KeepKind::kAll;
  // Rows per KV head, forced ones included; 0: by keep_ratio.
  int64_t budget = 0;
  double keep_ratio = 0;  // share of the tokens seen; 0: by budget
  int64_t sink = 0;       // first tokens that always stay
  int64_t window = 0;     // newest tokens that always stay; also the queries that score, where queries do
  bool cache_positions = false;

  int64_t kernel = 7;  // pooling width over rows
  KeepPool pool = KeepPool::kMax;
  KeepReduce reduce = KeepReduce::kMean;
  int64_t seed = 1;
  double recent = 0.5;  // h2o: share of the budget that is the newest rows
  KeepNormalise normalise = KeepNormalise::kNone;
  double beta = 20;  // pyramidkv: the last layer selects 1/beta of the mean
  bool window_inside = false;

  int64_t future = 512;  // expected_attention: positions averaged over
  bool covariance = true;
  bool value_norm = true;
  double epsilon = 0;

  KeepScorer scorer = KeepScorer::kSnapkv;
  double safeguard = 0.2;
  KeepSafeguard safeguard_mode = KeepSafeguard::kMix;
  bool normalise_heads = true;

  std::string gates;             // duo: file
  double streaming_share = 0.5;  // duo: share of heads that stream
  double recovery = 0.95;        // fastgen
  double heavy = 0.3;
  double local = 0.3;

  int64_t block = 0;  // keydiff: rows are dropped after every so many tokens; 0: once, over all

  int64_t chunk = 2048;  // kvzip: tokens read again at a time
  bool layerwise = false;

  // Merging (kv/keep/merge.h).
  double gamma = 0;       // newer links are merged more readily by exp(-place / gamma); 0: off
  int64_t max_count = 8;  // links above so many tokens are left out; 0: none
  KeepKeyWeight key_weight = KeepKeyWeight::kNorm;
  KeepBias merge_bias = KeepBias::kEntropy;
  KeepLinkScore link_score = KeepLinkScore::kMass;
  KeepLinks links = KeepLinks::kDisjoint;
  KeepScope scope = KeepScope::kHead;
  KeepNorms norms = KeepNorms::kQuery;
  int64_t clip = 0;              // counts end here, values and masses do not; 0: no end
  bool count_factor = true;      // a link's score is multiplied by its tokens
  bool running = false;          // weights are means over the chunks that a row has met
  bool before_rope = false;      // keys are merged before RoPE and turned to the position of the last token
  bool count_positions = false;  // rows lie as far back as the counts of those after them say
  bool reread = false;           // a chunk is passed twice: for scores, then over the merged rows

  bool evicts() const { return kind != KeepKind::kAll; }
  bool operator==(const KeepSpec&) const = default;
};

const char* keep_kind_name(KeepKind kind);
// The published values of a method.
KeepSpec default_keep(KeepKind kind);
// Rows per KV head that a budget or ratio allows for n tokens; at least the forced ones.
int64_t keep_budget(const KeepSpec& spec, int64_t tokens);

}  // namespace longkv
