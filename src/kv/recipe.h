// A KV recipe: which rows are kept, how they are stored, indexed and selected. Parsed from a short string or YAML;
// results always record the canonical string.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kv/cache.h"
#include "kv/keep/spec.h"
#include "kv/store_spec.h"
#include "longkv/status.h"
#include "prefill/spec.h"

namespace longkv {

enum class IndexKind {
  kNone,
  kMean,      // mean of the block's keys
  kMax,       // per-channel maximum
  kMinMax,    // Quest's box: per-channel minimum and maximum; the score is an upper bound of q.k
  kFixed,     // `reps` evenly spaced keys of the block, kept apart
  kDynamic,   // `reps` keys that received most attention mass from the last queries of the prompt
  kBits,      // `width` bits per channel and token with a magnitude per 8 nibbles
  kMeanDev,   // mean and standard deviation: q.mean + deviation * |q|.dev
  kCuboid,    // middle of the box and mean distance from it
  kRepr,      // InfLLM: per query head the mean of the `reps` keys with most attention mass
  kChannels,  // SparQ: keys by channel, of which the `channels` with the largest |q| are read
  kLabels,    // Double Sparsity: 4-bit copy of `channels` channels chosen once
  kLsh,       // MagicPIG: hash tables of tokens; for select=sampled
  kClusters,  // RetroInfer: clusters of similar keys
};
const char* index_kind_name(IndexKind kind);
std::optional<IndexKind> parse_index_kind(std::string_view name);

enum class SelectMode {
  kTopK,
  kTopP,     // the smallest set with mass `p` of the estimated softmax
  kSampled,  // what the index draws, weighted by one over the chance of being drawn
};
enum class SelectHeads { kPerKvHead, kShared, kPerQueryHead };
enum class Aggregate { kSum, kMax, kSoftmaxSum };  // over the query heads that share a selection
// What scores the tokens of the blocks that the index found best.
enum class Refine { kNone, kExact, kInt4 };

struct IndexSpec {
  IndexKind kind = IndexKind::kNone;
  int64_t block = 16;      // rows per block
  int reps = 1;            // representatives per block (fixed, dynamic, repr)
  bool rotate = true;      // bits: Hadamard rotation of keys and queries before rounding
  int width = 0;           // bits: log2 of the bits per channel: 0, 1, 2
  bool unbiased = true;    // bits: magnitudes that make the estimated products unbiased, not the closest ones
  bool pool_max = false;   // bits: a block scores as its best token, not as the log of its tokens' mass
  bool eight = false;      // minmax, meandev, cuboid: 8-bit summaries
  double deviation = 1.0;  // meandev: weight of the deviation
  int channels = 32;       // channels, labels
  std::string file{};      // labels: channels per layer and KV head; empty: chosen from the prompt
  int hash_bits = 10;      // lsh: K, bits of a code
  int tables = 150;        // lsh: L
  int cluster = 16;        // clusters: tokens per cluster, on average
  int64_t segment = 8192;  // clusters: tokens that are clustered together
  int64_t coarse = 0;      // two-level: fine blocks per coarse block; 0 = chosen from the length, 1 = never
  // Not part of a recipe; the selector says where an index stands.
  int layer = 0;
  int64_t skip_rows = 0;  // clusters: first rows that are attended anyway
  int64_t keep_rows = 1;  // clusters: last rows
  bool operator==(const IndexSpec&) const = default;
};

struct SelectSpec {
  bool all = true;  // full attention (within keep's rows)
  SelectMode mode = SelectMode::kTopK;
  int64_t budget = 2048;  // rows attended per KV head and step: sinks, local window and open block included
  double share = 0.0;     // ... at least this share of the context
  std::string budgets{};  // ... or for each layer, and KV head: "2048,1024,512/256"; the last ones repeat
  int64_t sink = 16;      // first rows, always attended
  int64_t local = 64;     // last rows, always attended
  SelectHeads heads = SelectHeads::kPerKvHead;
  Aggregate aggregate = Aggregate::kSum;
  Refine refine = Refine::kNone;
  int over = 4;                     // refine: candidates, as a multiple of the rows that are chosen (top-k)
  int64_t candidates = 8192;        // top-p: rows that the index hands on
  double p = 0.85;                  // top-p: mass
  int dense_layers = 0;             // the first layers attend everything
  std::string dense{};              // ... and these: "0,16,32"
  int layer_step = 1;               // select anew in every layer_step-th layer, reuse in between
  int token_step = 1;               // select anew every token_step-th decoded token
  double drift = 0.0;               // ... or when the cosine of a query with the one chosen for falls below; 0 = off
  int64_t preselect = 0;            // SnapKV vote: candidate blocks kept as a mask, never an eviction; 0 = off
  int64_t preselect_queries = 128;  // observation window of the vote
  int64_t preselect_kernel = 7;     // pooling width over tokens
  bool operator==(const SelectSpec&) const = default;
};

// What stands in for rows that are not read.
enum class TailKind {
  kNone,
  kMean,      // SparQ: the mean value, with the mass that the approximate scores leave it
  kSample,    // vAttention: a uniform sample of the other rows, weighted by one over its rate
  kClusters,  // RetroInfer: the next clusters by their centroids and sums of values
};

struct TailSpec {
  TailKind kind = TailKind::kNone;
  double rate = 0.02;     // sample: share of the other rows, at least
  double epsilon = 0.05;  // sample: wanted relative error of numerator and denominator; 0: `rate` alone
  double delta = 0.05;    // sample: allowed chance of a larger error
  int64_t seed = 1;       // sample, and lsh
  double share = 0.232;   // clusters: share of all clusters that is estimated
  bool operator==(const TailSpec&) const = default;
};

struct Recipe {
  std::string name = "custom";  // preset, name in a file, or "custom": a label
  PrefillSpec prefill;
  KeepSpec keep;
  IndexSpec index;
  SelectSpec select;
  TailSpec tail;
  MaskSpec mask;
  StoreSpec store;
  // What a documented rule decided where the text left it open (a local window scaled to a small budget). To be
  // printed.
  std::vector<std::string> notes;

  std::string canonical() const;  // parses back to an equal recipe
};
// Equal settings; name and notes are not compared.
bool operator==(const Recipe& a, const Recipe& b);

// A long-context configuration of KTransformers: the recipe and what is not part of one.
struct KTransformersConfig {
  Recipe recipe;
  int64_t max_seq_len = 0;  // tokens that the sequence may reach
  int64_t chunk_size = 0;   // prompt tokens that pass a layer together
  int threads = 0;          // 0: not given
};

// `text`: "quest", "quest:block=16,budget=1024", "index=minmax(block=16) + select=topk(budget=1024) + store=q8_0", ...
// Errors: kInvalidArgument with the position and what is allowed there; illegal combinations name the nearest legal
// one.
Result<Recipe> parse_recipe(std::string_view text);
// A recipe in YAML (recipes/*.yaml). Errors give line and column.
Result<Recipe> parse_recipe_yaml(std::string_view yaml);
// A recipe string, or the path of a YAML file (it contains '/' or ends in .yaml or .yml). Errors: also kIo.
Result<Recipe> load_recipe(const std::string& text_or_path);
// The section long_context of KTransformers' config.yaml. Every key counts: an unknown one is an error.
Result<KTransformersConfig> parse_ktransformers_yaml(std::string_view yaml);
Result<KTransformersConfig> load_ktransformers_yaml(const std::string& path);

// Errors: kInvalidArgument; names the nearest legal recipe. Parsed recipes have passed.
Status validate_recipe(const Recipe& recipe);
const std::vector<std::string>& recipe_presets();

}  // namespace longkv
