// Which rows a decode step reads: indexes, votes, chosen blocks and their reuse over steps and layers.
//
// A step attends, per list owner (a KV head, a whole layer or a query head):
//   sink rows [0, sink)  +  chosen blocks  +  tail rows [tail, rows)
//   tail = min(rows - max(local, 1), start of the open block), so a token always sees itself
// Budget: all of it counts, rounded down to whole chosen blocks:
//   chosen = max(1, (budget - sink - (rows - tail) - (token_step - 1)) / block)
// While a choice is reused its tail keeps its beginning and grows by one row a step, so no block is lost between
// choices; the term token_step - 1 pays for that. A block that only partly lies in the sinks or the tail may be chosen;
// its rows are never attended twice.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/threads.h"
#include "base/virtual_array.h"
#include "kv/attend.h"
#include "kv/index/index.h"
#include "kv/select/layer_plan.h"
#include "kv/select/vote.h"
#include "kv/session.h"
#include "longkv/status.h"

namespace longkv {

// One list of rows and the query heads that attend it.
struct SelectionUnit {
  int kv_head = 0;
  int first_query = 0;  // within the layer's query heads
  int n_q = 0;
};

class Selector {
 public:
  // Errors: kInvalidArgument (an index that the shape cannot have), kOutOfMemory.
  static Result<std::unique_ptr<Selector>> create(const KvShape& shape, const Recipe& recipe,
                                                  std::span<const LayerPlan> plans, RowCapacity capacity,
                                                  const AttendParams& params);

  // Rows [begin, end) of a layer are in the cache. views: [kv_heads].
  void append(int layer, std::span<const KvHeadView> views, int64_t begin, int64_t end, ThreadPool& pool);
  void truncate(int layer, std::span<const KvHeadView> views, int64_t rows);
  // A prompt chunk is about to be read: choices made before no longer fit.
  void forget_choice(int layer) { states_[size_t(layer)].valid = false; }

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

  // Fills ranges[unit] with the rows that the layer reads; false when all visible rows fit in the budget (ranges are
  // then left alone). q: [query heads][dim_k]; step counts decode steps since the last prompt.
  bool choose(int layer, const float* q, RowRange visible, int64_t step, ThreadPool& pool,
              std::span<const SelectionUnit> units, std::span<std::vector<RowRange>> ranges, KvStats& stats);

  int64_t index_bytes_held() const;

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
    int mask = 0;                        // which vote applies
    std::vector<RowRange> candidates{};  // block ranges to score
    int64_t n_candidates = 0;
    std::vector<uint64_t> keys{};
    std::vector<int64_t> picked{};
  };
  struct LayerState {
    std::unique_ptr<BlockIndex> fine;
    std::unique_ptr<BlockIndex> coarse;  // null: one level
    std::vector<VoteMask> votes;         // [kv_heads], or one for a shared list
    std::vector<float> mass;             // collected during a prompt
    int64_t mass_stride = 0;
    bool valid = false;                         // the choice below may be reused
    int64_t tail = 0;                           // first tail row when it was made
    std::vector<std::vector<RowRange>> chosen;  // [owners], block ranges
  };
  struct ScoreTask {
    int part = 0;
    int64_t offset = 0;  // in the owner's compact order
    int64_t begin = 0, end = 0;
  };

  Selector(const KvShape& shape, const Recipe& recipe, const AttendParams& params);
  Status build_indexes(std::span<const LayerPlan> plans, RowCapacity capacity);
  int64_t chosen_blocks(int64_t forced_rows) const;
  void select_blocks(LayerState& state, const float* q, RowRange blocks, int64_t k, ThreadPool& pool, KvStats& stats);
  bool refine_coarse(LayerState& state, RowRange blocks, int64_t k, ThreadPool& pool, KvStats& stats);
  void list_candidates(const LayerState& state, RowRange blocks);
  void score(const BlockIndex& index, std::span<const Part> parts, ThreadPool& pool, KvStats& stats);
  void pick(int64_t k, ThreadPool& pool);

  KvShape shape_;
  SelectSpec select_;
  IndexSpec index_;
  std::vector<LayerPlan> plans_;
  float query_scale_ = 1.0f;     // folded into q: softmax scale times sqrt(dim_k)
  float softmax_scale_ = 1.0f;   // of a score against such a q
  int64_t attention_bytes_ = 0;  // K and V of `budget` rows of one KV head
  int64_t coarse_factor_ = 1;
  std::vector<LayerState> states_;  // [layers]
  std::vector<Owner> owners_;
  std::vector<Part> group_parts_;  // one pass per KV head
  std::vector<Part> owner_parts_;  // one pass per list: where lists have candidates of their own
  std::vector<float> query_;       // [query heads][dim_k], scaled
  std::vector<ScoreTask> tasks_;
  VirtualArray scores_;  // [query heads][score_stride_], pages are touched only as far as blocks exist
  int64_t score_stride_ = 0;
  std::vector<std::vector<float>> free_mass_;
};

}  // namespace longkv
