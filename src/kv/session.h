// The KV side of one sequence: cache, indexes and selection state under one recipe. The model graph talks only to this.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/threads.h"
#include "kv/attend.h"
#include "kv/cache.h"
#include "kv/index/index.h"
#include "kv/recipe.h"
#include "longkv/status.h"

namespace longkv {

// What decoding read and, every N-th step, how close it was to full attention.
struct KvStats {
  int64_t steps = 0;
  int64_t kv_bytes = 0;       // K and V rows attended, all steps
  int64_t index_bytes = 0;    // summaries read by scoring
  int64_t rows_attended = 0;  // per KV head and layer, summed
  int64_t selections = 0;     // layers x steps that chose anew
  int64_t checked_steps = 0;
  std::vector<double> captured_mass;  // per layer, summed over checked steps: mean over query heads
  std::vector<double> output_error;   // per layer, summed: |sparse - dense| / |dense|
  double seconds_select = 0;
  double seconds_attend = 0;
};

class KvSession {
 public:
  // Errors: kInvalidArgument (recipe against shape), kOutOfMemory.
  static Result<std::unique_ptr<KvSession>> create(const KvShape& shape, const Recipe& recipe, RowCapacity capacity,
                                                   const AttendParams& params, ThreadPool& pool);
  ~KvSession();

  // Prompt: appends the chunk and attends causally, dense. q: [n][query heads][dim_k], k: [n][kv heads][dim_k],
  // v: [n][kv heads][dim_v], out: [n][query heads][dim_v]. `prompt_end` is the position after the prompt's last token:
  // the last queries before it give importance and votes.
  Status prefill(int layer, const float* q, const float* k, const float* v, int64_t n, int64_t prompt_end, float* out,
                 const std::atomic<bool>* cancel);
  // After a layer's last prompt chunk: importance, preselection.
  Status finish_prefill(int layer);

  // One token: append, select, attend. Layers are called in ascending order; layer 0 starts a new step.
  Status decode(int layer, const float* q, const float* k, const float* v, float* out);

  TokenCount tokens() const;  // of the last layer: a token counts once all layers have it
  Status truncate(TokenCount tokens);

  const Recipe& recipe() const { return recipe_; }
  const KvCache& cache() const { return cache_; }
  const KvStats& stats() const { return stats_; }
  void reset_stats();
  // Every n-th decode step also attends fully and fills the check fields of the statistics; 0 = never.
  void set_check_every(int n) { check_every_ = n; }
  // A token attended fully that leaves no trace: decode() between begin_probe() and end_probe() neither chooses rows
  // nor counts, and end_probe() drops the token's rows again. At most one token per probe.
  void begin_probe() { probing_ = true; }
  Status end_probe();
  // Row ranges that the last decode step attended in a layer and KV head (for reports and tests).
  const std::vector<RowRange>& last_ranges(int layer, int kv_head) const;
  // Marks rows [0, n) as filled with seeded random keys and values, for speed measurements at depth.
  Status fill_random(int64_t n, uint64_t seed);

 private:
  KvSession(KvCache cache, const Recipe& recipe, const AttendParams& params, ThreadPool& pool);
  bool choose_rows(int layer, const float* q, int64_t rows);
  Status decode_probe(int layer, const float* q, const float* k, const float* v, float* out);
  std::vector<AttendUnit>& full_attention(int layer, const float* q, int64_t rows, float* out, float* lse,
                                          RowRange& visible);
  void count_rows(int layer);
  void check(int layer, bool sparse, const float* q, int64_t rows, const float* out);

  struct Impl;
  KvCache cache_;
  Recipe recipe_;
  KvStats stats_;
  int check_every_ = 0;
  bool probing_ = false;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longkv
