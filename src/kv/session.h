// The KV side of one sequence: cache, indexes and selection state under one recipe. The model graph talks only to this.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/threads.h"
#include "kv/attend.h"
#include "kv/cache.h"
#include "kv/index/index.h"
#include "kv/keep/keep.h"
#include "kv/recipe.h"
#include "longkv/status.h"
#include "prefill/attention.h"

namespace longkv {

struct PrefillAttendArgs;

// What decoding read and, every N-th step, how close it was to full attention over the rows that are kept.
struct KvStats {
  int64_t steps = 0;
  int64_t kv_bytes = 0;       // K and V rows attended, all steps
  int64_t index_bytes = 0;    // summaries read by scoring
  int64_t rows_attended = 0;  // per KV head and layer, summed
  int64_t selections = 0;     // layers x steps that chose anew
  int64_t checked_steps = 0;
  std::vector<double> captured_mass;  // per layer, summed over checked steps: mean over query heads
  std::vector<double> head_mass;      // [layers][kv_heads], the same: mean over the query heads of a KV head
  std::vector<double> output_error;   // per layer, summed: |sparse - dense| / |dense|
  // With rows in memory and blocks in use on a card: of the blocks that were attended, those that lay there already and
  // those that were fetched, per KV head and layer, and what the latter moved.
  int64_t blocks_found = 0;
  int64_t blocks_fetched = 0;
  int64_t bus_bytes = 0;
  double seconds_select = 0;
  double seconds_attend = 0;
};

// What a session may be given beside its recipe.
struct KvSessionExtras {
  KvRotate rotate;                 // the model's RoPE; recipes that turn rows are refused without it
  std::unique_ptr<Keeper> keeper;  // instead of the recipe's keep stage
  std::string model = {};          // what a channel mask must have been learned for; empty: not checked
  int64_t window_slack = 0;        // KvCache::set_window_slack
  // Where K and V lie, for recipes that hold rows in one form; nullptr: in memory.
  std::shared_ptr<DiskSpace> disk = {};
};

// What reading the last prompt computed.
struct PrefillStats {
  std::vector<PrefillPairs> layers;  // (query, key) pairs over all query heads
  double seconds_attend = 0;         // estimates included

  // Pairs computed of those that causality and windows allow, over all layers; 1 for a dense prompt.
  double density() const;
};

class KvSession {
 public:
  // Errors: kInvalidArgument (recipe against shape), kOutOfMemory.
  static Result<std::unique_ptr<KvSession>> create(const KvShape& shape, const Recipe& recipe, RowCapacity capacity,
                                                   const AttendParams& params, ThreadPool& pool,
                                                   KvSessionExtras extras = {});
  ~KvSession();

  // For recipes that look at what tokens are: classes of the next tokens, before their rows are appended.
  bool wants_classes() const;
  void note_classes(std::span<const TokenClass> classes);

  // Prompt: appends the chunk and attends causally, dense. q: [n][query heads][dim_k], k: [n][kv heads][dim_k],
  // v: [n][kv heads][dim_v], out: [n][query heads][dim_v]. `prompt_end` is the position after the prompt's last token:
  // the last queries before it give importance and votes.
  Status prefill(int layer, const float* q, const float* k, const float* v, int64_t n, int64_t prompt_end, float* out,
                 const std::atomic<bool>* cancel);
  // Prompt whose attention is computed elsewhere: appends the chunk and computes only the mass that the recipe wants of
  // it, over the queries that give it. q may hold anything where wants_queries() is false. `out` is the attention's
  // output, for keep stages that look at it.
  Status observe(int layer, const float* q, const float* k, const float* v, int64_t n, int64_t prompt_end, float* out,
                 const std::atomic<bool>* cancel);
  bool wants_queries(int layer) const;
  // Until clear_followers(), followers take in every chunk that prefill() or observe() reads and finish with it, so
  // that recipes can be compared on keys and values computed once. They have the same shape and tokens, and dense
  // prompts. Errors of a follower end the prompt.
  void add_follower(KvSession* follower);
  void clear_followers();
  // What a prompt's chunk attends depends on the recipe, or the recipe wants more than chunks (a second reading,
  // classes of tokens), so only reading the prompt itself shows what the recipe gives.
  bool changes_prompt() const;
  // After a layer's last prompt chunk: rows that the recipe does not keep are dropped, then importance, preselection.
  Status finish_prefill(int layer);

  // Recipes to whose keep stage a pass of each chunk through the whole model says what rows matter to it
  // (KeepNeeds::scoring): what they want for a prompt that ends at `prompt_end`. Then, before each chunk of the prompt,
  // which is read chunk-major, prepare_scores(), the pass over the rows held, and take_scores() of its results, a layer
  // each.
  KeepScoring scoring() const;
  KeepScoring scoring(int64_t prompt_end) const;
  void prepare_scores();
  Status take_scores(std::vector<KeepScore> scores);

  // Recipes that score rows while the prompt is read again: tokens of a piece, 0 for other recipes. After a prompt, for
  // every piece [begin, end) of positions: begin_repeat, prefill() of the repeating input in all layers without
  // finish_prefill, end_repeat, which forgets that input; then finish_repeats, which drops rows.
  int64_t repeat_chunk() const;
  void begin_repeat(int64_t prompt_begin, RowRange piece);
  Status end_repeat();
  Status finish_repeats();

  // One token: append, select, attend. Layers are called in ascending order; layer 0 starts a new step.
  Status decode(int layer, const float* q, const float* k, const float* v, float* out);

  // Rows of n tokens that were decoded elsewhere, as append: k and v as in prefill(). All layers must follow.
  Status append_decoded(int layer, const float* k, const float* v, int64_t n);

  TokenCount tokens() const;  // seen; of the last layer: a token counts once all layers have it
  // Forgets the tokens at the end. Errors: kInvalidArgument when rows were evicted since; see KvCache::truncate.
  Status truncate(TokenCount tokens);
  // Positions of the tokens whose rows a head holds, in the order of the rows.
  std::vector<int64_t> kept_positions(int layer, int kv_head) const;

  const Recipe& recipe() const { return recipe_; }
  const KvCache& cache() const { return cache_; }
  const KvStats& stats() const { return stats_; }
  int64_t index_bytes_held() const;
  int64_t coarse_factor() const;  // fine blocks per coarse block of its indexes
  const PrefillStats& prefill_stats() const { return prefill_stats_; }
  // Called after each prompt chunk of a layer with the arguments of its attention; their memory is valid during the
  // call.
  using PrefillObserver = std::function<void(int layer, const PrefillAttendArgs& chunk, int64_t prompt_end)>;
  void set_prefill_observer(PrefillObserver observer) { prefill_observer_ = std::move(observer); }
  void reset_stats();
  // Every n-th decode step also attends fully and fills the check fields of the statistics; 0 = never.
  void set_check_every(int n) { check_every_ = n; }
  // Checks compare with attention over all rows of `full`, which holds at least as many tokens, instead of over the
  // session's own rows: what was evicted or rounded then counts as lost.
  void set_reference(const KvSession* full);
  // A token attended fully that leaves no trace: decode() between begin_probe() and end_probe() neither chooses rows
  // nor counts, and end_probe() drops the token's rows again. At most one token per probe.
  void begin_probe() { probing_ = true; }
  Status end_probe();
  // Row ranges that the last decode step attended in a layer and KV head (for reports and tests).
  const std::vector<RowRange>& last_ranges(int layer, int kv_head) const;
  // Saves or restores everything that later tokens depend on, between two tokens or prompts; statistics are not part of
  // it. Restoring goes into a fresh session of the same recipe, shape and model, whose context holds the tokens.
  // rows_only: restores the cache alone, as if its tokens were the beginning of a prompt that is not yet read to its
  // end; index_rows() completes that once the cache was cut to what is wanted.
  void visit(KvState& state, bool rows_only = false);
  void index_rows();
  // Marks rows [0, n) as filled with seeded random keys and values, for speed measurements at depth.
  Status fill_random(int64_t n, uint64_t seed);

 private:
  KvSession(KvCache cache, const Recipe& recipe, const AttendParams& params, ThreadPool& pool,
            std::unique_ptr<Keeper> keeper, KvRotate rotate);
  Status begin_chunk(int layer, const float* q, const float* k, const float* v, int64_t n, int64_t prompt_end,
                     PrefillAttendArgs& args);
  Status end_chunk(int layer, int64_t prompt_end, const PrefillAttendArgs& args);
  RowRange load_reference(int layer, int kv_head);
  Status decode_rows(int layer, const float* q, const float* k, const float* v, float* out);
  Status store_prompt(int layer);
  void note_queries(int layer, const float* q, int64_t n, int64_t prompt_end);
  int64_t bytes_of(int layer, int kv_head, std::span<const RowRange> ranges) const;
  void load_views(int layer);
  bool evicts(int layer) const;
  void score_repeat(int layer, const float* q, int64_t n);
  void ask_attention(int layer, int64_t prompt_end, PrefillAttendArgs& args);
  int64_t keep_end(int layer, int64_t prompt_end) const;
  Status evict(int layer, bool last);
  void merge_rows(int layer, const KeepChoice& choice);
  void place_rows(int layer, const KeepChoice& choice);
  void evict_one(int layer, const float* q, KeepStep when);
  bool choose_rows(int layer, const float* q);
  Status decode_probe(int layer, const float* q, const float* k, const float* v, float* out);
  RowRange visible(int layer, int kv_head) const;
  std::vector<AttendUnit>& full_attention(int layer, const float* q, float* out, float* lse, bool from_reference);
  void count_rows(int layer);
  void check(int layer, bool sparse, const float* q, const float* out);

  // Notes where a layer's prompt begins.
  void begin_prompt(int layer, int64_t first, int64_t prompt_end);
  void attend_prompt(int layer, const PrefillAttendArgs& args, int64_t prompt_end);

  struct Impl;
  KvCache cache_;
  Recipe recipe_;
  KvStats stats_;
  PrefillStats prefill_stats_;
  PrefillObserver prefill_observer_;
  int check_every_ = 0;
  bool probing_ = false;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longkv
