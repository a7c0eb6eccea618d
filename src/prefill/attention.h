// Causal attention of a chunk of prompt tokens over the cache, in tiles, with a running maximum.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>

#include "base/threads.h"
#include "kv/attend.h"
#include "kv/types.h"

namespace longkv {

struct PrefillAttendArgs {
  const float* q = nullptr;  // [tokens][kv_heads * group_size][dim_k], RoPE applied
  int64_t tokens = 0;
  int64_t first_position = 0;         // of q's first token; row index = position during prefill
  int64_t window = 0;                 // keys a query sees, its own included; 0 = all
  std::span<const KvHeadView> heads;  // [kv_heads]; already hold the chunk's own rows
  int group_size = 1;
  AttendParams params;
  float* out = nullptr;  // [tokens][kv_heads * group_size][dim_v]

  // Optional: attention mass per key received from the queries at positions >= mass_from, causal softmax, summed over
  // those queries, added to mass[query_head][row]. Row stride mass_stride values.
  float* mass = nullptr;
  int64_t mass_stride = 0;
  int64_t mass_from = 0;

  const std::atomic<bool>* cancel = nullptr;  // polled per tile; the output is unspecified once set
};

// Scratch for packed tiles, one set per worker; create once per engine.
class PrefillAttention {
 public:
  explicit PrefillAttention(ThreadPool& pool);
  ~PrefillAttention();
  void run(const PrefillAttendArgs& args);

 private:
  struct Scratch;
  ThreadPool& pool_;
  std::unique_ptr<Scratch> scratch_;
};

}  // namespace longkv
