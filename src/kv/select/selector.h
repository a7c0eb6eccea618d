// Which rows a decode step reads: indexes, votes, chosen rows, their reuse over steps and layers, and what stands in
// for the others.
//
// A step attends, per list owner (a KV head, a whole layer or a query head):
//   sink rows [0, sink)  +  chosen rows  +  tail rows [tail, rows)
//   tail = min(rows - max(local, 1), start of the open block), so a token always sees itself
// Budget (top-k): all of it counts, rounded down to whole chosen blocks:
//   chosen = max(1, (budget - sink - (rows - tail) - (token_step - 1)) / block)
// While a choice is reused its tail keeps its beginning and grows by one row a step, so no block is lost between
// choices; the term token_step - 1 pays for that. A block that only partly lies in the sinks or the tail may be chosen;
// its rows are never attended twice.
//
// A choice is made in up to three passes: coarse blocks, blocks, and (refine) the tokens of the best blocks by exact or
// 4-bit keys. Where less than the budget is visible, everything is attended and the output is that of full attention,
// bit for bit.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/threads.h"
#include "base/virtual_array.h"
#include "kv/attend.h"
#include "kv/index/index.h"
#include "kv/select/budgets.h"
#include "kv/select/layer_plan.h"
#include "kv/select/vote.h"
#include "kv/session.h"
#include "kv/tail/value_means.h"
#include "longkv/status.h"

namespace longkv {

class ClusterIndex;
class LshIndex;

// Rows that one task of a token scan takes.
constexpr int64_t kRefineRows = 1024;

// One list of rows and the query heads that attend it.
struct SelectionUnit {
  int kv_head = 0;
  int first_query = 0;  // within the layer's query heads
  int n_q = 0;
};

class Selector {
 public:
  // Errors: kInvalidArgument (an index that the shape cannot have, a file that does not fit), kIo, kOutOfMemory.
  static Result<std::unique_ptr<Selector>> create(const KvShape& shape, const Recipe& recipe,
                                                  std::span<const LayerPlan> plans, RowCapacity capacity,
                                                  const AttendParams& params);
  ~Selector();

  // Rows [begin, end) of a layer are in the cache. views: [kv_heads].
  void append(int layer, std::span<const KvHeadView> views, int64_t begin, int64_t end, ThreadPool& pool);
  void truncate(int layer, std::span<const KvHeadView> views, int64_t rows);
  // A prompt chunk is about to be read: choices made before no longer fit.
  void forget_choice(int layer) { states_[size_t(layer)].valid = false; }
  // Queries of prompt positions [first, first + n): [n][query heads][dim_k]. Kinds that choose channels look at the
  // last ones before prompt_end.
  void observe_queries(int layer, const float* q, int64_t n, int64_t first, int64_t prompt_end);

  // Whether the layer needs the attention mass of the prompt's last queries, and where it is collected:
  // [query heads][stride], zero at first.
  bool wants_mass(int layer) const;
  float* mass(int layer, int64_t stride);
  // The rows of a layer were replaced by a part of them (kept[kv_head], ascending in the rows before): indexes are
  // built anew and the mass follows its rows. `given`: mass collected for someone else, if this layer has none of its
  // own.
  void rebuild(int layer, std::span<const KvHeadView> views, std::span<const std::vector<int64_t>> kept,
               const float* given, int64_t given_stride, ThreadPool& pool);
  // After the prompt's last chunk: gives the mass to the indexes, votes, and drops it.
  void finish_prompt(int layer, std::span<const KvHeadView> views, ThreadPool& pool);

  // Fills ranges[unit] with the rows that the layer reads; false when all visible rows are attended (ranges are then
  // left alone). q: [query heads][dim_k]; step counts decode steps since the last prompt. The views given to append
  // last are those of the cache.
  bool choose(int layer, const float* q, RowRange visible, int64_t step, ThreadPool& pool,
              std::span<const SelectionUnit> units, std::span<std::vector<RowRange>> ranges, KvStats& stats);

  // After a choice was attended: merges what stands in for the other rows into out, [query heads][dim_v]. lse: of the
  // attended rows, [query heads]; it stays as it is.
  void merge_tail(int layer, const float* q, RowRange visible, ThreadPool& pool, std::span<const SelectionUnit> units,
                  std::span<const std::vector<RowRange>> ranges, const float* lse, float* out, KvStats& stats);

  int64_t index_bytes_held() const;
  // Fine blocks per coarse block; 1: one level. Chosen from the capacity where the recipe leaves it open.
  int64_t coarse_factor() const { return coarse_factor_; }
  // Saves or restores what the capacity decided, before the layers: a session goes on with what it began with.
  void visit_levels(KvState& state);
  // Saves or restores a layer between two steps, choices that a later step may reuse included.
  void visit(KvState& state, int layer, std::span<const KvHeadView> views);

 private:
  // Query heads whose scores of one KV head's blocks are taken in one pass, and the list they serve.
  struct Part {
    int kv_head = 0;
    int first_query = 0;
    int n_q = 0;
    int owner = 0;
  };
  struct Owner {
    int first_query = 0;
    int n_q = 0;
    int mask = 0;                        // which vote applies, and whose budget
    int64_t rows = 0;                    // that may be chosen
    int64_t wanted = 0;                  // blocks to pick in this pass
    std::vector<RowRange> candidates{};  // block ranges to score
    int64_t n_candidates = 0;
    std::vector<uint64_t> keys{};
    std::vector<int64_t> picked{};
    std::vector<RowRange> tokens{};  // refine: rows to score
    std::vector<float> weights{};    // refine: [n_q + 1][tokens]
    std::vector<uint8_t> marked{};
    bool saw_nan = false;
  };
  struct LayerState {
    std::unique_ptr<BlockIndex> fine;
    std::unique_ptr<BlockIndex> coarse;  // null: one level
    std::unique_ptr<BlockIndex> four;    // refine=int4: 4-bit keys
    std::unique_ptr<ValueMeans> means;   // tail=mean
    std::vector<VoteMask> votes;         // [kv_heads], or one for a shared list
    std::vector<float> mass;             // collected during a prompt
    int64_t mass_stride = 0;
    std::vector<KvHeadView> views;                // of the last append
    bool valid = false;                           // the choice below may be reused
    int64_t tail = 0;                             // first tail row when it was made
    std::vector<float> query;                     // that it was made for, unscaled
    std::vector<std::vector<RowRange>> chosen;    // [owners], row ranges
    std::vector<std::vector<int64_t>> estimated;  // [owners], clusters for the tail
    std::vector<float> log_rest;                  // [query heads], tail=mean: ln((1 - alpha) / alpha)
  };
  struct ScoreTask {
    int part = 0;
    int64_t offset = 0;  // in the owner's compact order
    int64_t begin = 0, end = 0;
  };

  Selector(const KvShape& shape, const Recipe& recipe, const AttendParams& params);
  Status build_indexes(std::span<const LayerPlan> plans, RowCapacity capacity);
  const ClusterIndex* clusters(const LayerState& state) const;
  void visit_choice(KvState& state, LayerState& layer);
  bool attends_all(int layer, RowRange visible) const;
  bool drifted(const LayerState& state, const float* q) const;
  void make_choice(int layer, LayerState& state, const float* q, RowRange visible, RowRange sink, ThreadPool& pool,
                   KvStats& stats);
  void choose_clusters(LayerState& state, ThreadPool& pool, KvStats& stats);
  void choose_blocks(LayerState& state, const float* q, RowRange blocks, RowRange visible, RowRange sink,
                     ThreadPool& pool, KvStats& stats);
  bool refine_coarse(LayerState& state, RowRange blocks, ThreadPool& pool, KvStats& stats);
  void list_candidates(const LayerState& state, RowRange blocks);
  void score(const BlockIndex& index, std::span<const Part> parts, ThreadPool& pool, KvStats& stats);
  void pick(int64_t count, ThreadPool& pool);
  void rows_of_picked(std::vector<std::vector<RowRange>>& rows) const;
  void refine_tokens(LayerState& state, const float* q, RowRange visible, RowRange sink, ThreadPool& pool,
                     KvStats& stats);
  void score_tokens(LayerState& state, const float* q, Owner& owner, ThreadPool& pool, KvStats& stats);
  void pick_tokens(const LayerState& state, Owner& owner, RowRange sink, std::vector<RowRange>& chosen) const;
  void note_rest(LayerState& state, RowRange visible, RowRange sink, KvStats& stats);

  void merge_mean(LayerState& state, std::span<const SelectionUnit> units, const float* lse, float* out);
  void merge_sample(int layer, LayerState& state, const float* q, RowRange visible, ThreadPool& pool,
                    std::span<const SelectionUnit> units, std::span<const std::vector<RowRange>> ranges,
                    const float* lse, float* out, KvStats& stats);
  void merge_clusters(LayerState& state, const float* q, ThreadPool& pool, std::span<const SelectionUnit> units,
                      const float* lse, float* out, KvStats& stats);
  void merge_drawn(LayerState& state, const float* q, RowRange visible, ThreadPool& pool, const float* lse, float* out,
                   KvStats& stats);

  KvShape shape_;
  SelectSpec select_;
  IndexSpec index_;
  TailSpec tail_;
  KvTypes types_;
  AttendParams params_;
  Budgets budgets_;
  std::vector<LayerPlan> plans_;
  float query_scale_ = 1.0f;    // folded into q: softmax scale times sqrt(dim_k)
  float softmax_scale_ = 1.0f;  // of a score against such a q
  int64_t index_limit_ = 0;     // bytes that scoring one KV head may read (coarse.h)
  int64_t row_bytes_ = 0;
  int64_t coarse_factor_ = 1;
  int64_t capacity_ = 0;            // rows
  std::vector<LayerState> states_;  // [layers]
  std::vector<Owner> owners_;
  std::vector<Part> group_parts_;  // one pass per KV head
  std::vector<Part> owner_parts_;  // one pass per list: where lists have candidates of their own
  std::vector<float> query_;       // [query heads][dim_k], scaled
  std::vector<float> folded_;      // [parts][2][dim_k], where heads are scored as one
  bool summed_ = false;            // the last scores are sums over the heads of a part
  std::vector<ScoreTask> tasks_;
  VirtualArray scores_;  // [query heads][score_stride_], pages are touched only as far as blocks exist
  int64_t score_stride_ = 0;
  bool told_nan_ = false;  // once a session
  std::vector<std::vector<float>> free_mass_;
  std::vector<std::vector<RowRange>> picked_rows_;  // [owners]
  std::vector<ScoreTask> refine_tasks_;
  std::vector<float> forced_scores_;

  // Of merge_tail.
  AttendScratch tail_scratch_;
  std::vector<AttendUnit> tail_units_;
  std::vector<std::vector<RowRange>> tail_ranges_;
  std::vector<float> tail_out_, tail_lse_;
};

}  // namespace longkv
