// Causal attention of a chunk of prompt tokens over the cache, in tiles, with a running maximum.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>

#include "base/threads.h"
#include "kv/attend.h"
#include "kv/types.h"
#include "prefill/row_lists.h"

namespace longkv {

struct PrefillAttendArgs {
  const float* q = nullptr;  // [tokens][kv_heads * group_size][dim_k], RoPE applied
  int64_t tokens = 0;
  int64_t first_position = 0;         // of q's first token
  int64_t window = 0;                 // keys a query sees, its own included; 0 = all
  std::span<const KvHeadView> heads;  // [kv_heads]; already hold the chunk's own rows
  // Row of q's first token in each head, the chunk's rows following; all rows before them are visible. Empty: rows are
  // positions. Only without a window.
  std::span<const int64_t> first_rows;
  int group_size = 1;
  AttendParams params;
  float* out = nullptr;  // [tokens][kv_heads * group_size][dim_v]

  // Optional: attention mass per key received from the queries at positions >= mass_from, causal softmax, summed over
  // those queries, added to mass[query_head][row]. Row stride mass_stride values.
  float* mass = nullptr;
  int64_t mass_stride = 0;
  int64_t mass_from = 0;

  const std::atomic<bool>* cancel = nullptr;  // polled per tile; the output is unspecified once set

  // Row of the first query in a KV head.
  int64_t first_row(int64_t head) const { return first_rows.empty() ? first_position : first_rows[size_t(head)]; }
};

// (query, key) pairs of query heads: computed, and those that causality and a window allow.
struct PrefillPairs {
  int64_t attended = 0;
  int64_t causal = 0;
};

// Pairs of run() for these arguments.
int64_t dense_pairs(const PrefillAttendArgs& args);

// Scratch for packed tiles, one set per worker; create once per engine.
class PrefillAttention {
 public:
  explicit PrefillAttention(ThreadPool& pool);
  ~PrefillAttention();
  void run(const PrefillAttendArgs& args);
  // Each block of queries attends its list of rows only; no window, no mass. The bits of a query depend on its list
  // alone, and a list of all rows gives the bits of run(). Returns how much was computed.
  PrefillPairs run_listed(const PrefillAttendArgs& args, const RowLists& lists);

 private:
  struct Scratch;
  ThreadPool& pool_;
  std::unique_ptr<Scratch> scratch_;
};

}  // namespace longkv
