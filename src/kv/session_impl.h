// State of a KvSession that its users need not see.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kv/attend.h"
#include "kv/keep/collect.h"
#include "kv/keep/keep.h"
#include "kv/mask/think.h"
#include "kv/region_store.h"
#include "kv/select/layer_plan.h"
#include "kv/select/row_set.h"
#include "kv/select/selector.h"
#include "kv/session.h"
#include "prefill/attention.h"
#include "prefill/sparse.h"

namespace longkv {

// The regions of region_spec(). Errors: also channels that a type cannot hold.
Result<std::optional<RegionStore>> make_regions(const KvShape& shape, const Recipe& recipe, RowCapacity capacity,
                                                const std::string& model, bool capped);

struct KvSession::Impl {
  Impl(const KvShape& shape, const Recipe& recipe, const AttendParams& attend_params, ThreadPool& thread_pool);

  std::span<std::vector<RowRange>> layer_ranges(int layer) {
    return std::span(ranges).subspan(size_t(layer) * units.size(), units.size());
  }

  AttendParams params;
  ThreadPool& pool;
  PrefillAttention prefill_attention;
  std::unique_ptr<SparsePrefill> sparse_prefill;
  std::vector<int64_t> prompt_start;  // [layers], first row of the prompt that is being read; -1 between prompts
  std::vector<LayerPlan> plans;       // [layers]
  std::unique_ptr<Selector> selector;
  std::unique_ptr<Keeper> keeper;  // nullptr: every row stays
  KeepNeeds keep_needs;
  std::unique_ptr<KeepCollector> collector;
  std::vector<KeepScore> scores;  // [layers], of the next chunk; empty: none
  bool probed = false;            // the first layer holds the row of a probe
  KvRotate rotate;
  std::unique_ptr<ThinkObserver> think;  // nullptr: the recipe does not choose channels per prompt
  struct Rotation {
    void enter(const StoreSpec& spec, const KvShape& shape, int64_t n, const float*& q, const float*& k,
               const float*& v);
    void enter_rows(const StoreSpec& spec, const KvShape& shape, int64_t n, const float*& k, const float*& v);
    void leave(const StoreSpec& spec, const KvShape& shape, int64_t n, float* out);
    // One token's output as a copy; empty where `out` needs none.
    void leave(const StoreSpec& spec, const KvShape& shape, const float* out, std::vector<float>& copy);
    // The queries last entered, before they were rotated.
    const float* came(const float* q) const { return q_came != nullptr ? q_came : q; }
    const float* q_came = nullptr;
    std::vector<float> q_rows, k_rows, v_rows;
  };
  Rotation rotation;  // Hadamard, of the store stage
  struct Repeat {
    int64_t prompt_begin = -1;  // position; -1: nothing is being repeated
    RowRange piece;             // positions
    int64_t from = 0;           // position of the repeating input's first token
  } repeat;
  std::vector<SelectionUnit> units;                // of a layer: KV heads, or query heads for selection per query head
  std::vector<std::vector<RowRange>> ranges;       // [layers][units], of the last decode step
  std::vector<std::vector<RowRange>> head_ranges;  // [layers][kv_heads], the same per KV head

  std::vector<KvSession*> followers;
  const KvSession* reference = nullptr;
  std::vector<KvHeadView> reference_views;  // [kv_heads]
  std::vector<float> observed_out;          // scratch of observe()

  int64_t step = -1;         // decode steps since the last prompt
  int64_t total_steps = -1;  // decode steps since the cache was created, for the checks
  bool checking = false;     // this step also attends fully

  // Reused between calls: decoding allocates nothing once these are warm.
  AttendScratch attend_scratch;
  std::vector<KvHeadView> views;         // [kv_heads]
  std::vector<AttendUnit> attend_units;  // [units]
  std::vector<AttendUnit> check_units;   // [kv_heads]
  std::vector<RowRange> check_ranges;    // [kv_heads]
  std::vector<int64_t> first_rows;       // [kv_heads], of a prompt chunk
  std::vector<int64_t> evicted;          // [kv_heads]
  std::vector<RowRange> union_scratch;
  std::vector<float> lse;        // [query heads]
  std::vector<float> check_lse;  // [query heads]
  std::vector<float> check_own;  // [query heads][dim_v], the session's own output where a reference is compared with
  std::vector<float> check_out;  // [query heads][dim_v]
};

}  // namespace longkv
