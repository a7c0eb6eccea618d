// Exact causal attention of a few sampled queries over all rows, summed by column and by diagonal: what vertical-slash
// patterns are chosen from.
#pragma once

#include <cstdint>
#include <vector>

#include "base/threads.h"
#include "kv/attend.h"
#include "kv/types.h"
#include "prefill/attention.h"

namespace longkv {

struct SampleArgs {
  const float* q = nullptr;  // first sampled query, the group's first head; heads of a token are adjacent
  int64_t q_stride = 0;      // values from token to token
  int64_t queries = 0;       // consecutive tokens
  int64_t row = 0;           // of the first sampled query
  int group = 1;
  KvHeadView kv;
  AttendParams params;
};

// The last `queries` queries of a prompt's chunk (all, when it has fewer), of one KV head's group.
SampleArgs sample_of_chunk(const PrefillAttendArgs& chunk, int64_t kv_head, int64_t queries);

// Softmax mass summed over the sampled queries; rows = args.row + args.queries.
struct AttentionSample {
  int64_t rows = 0;
  std::vector<float> columns;    // [group][rows]
  std::vector<float> distances;  // [group][rows], by query row - row

  std::vector<float> sums;   // scratch: [segments][group * queries], maximum and sum of each
  std::vector<float> skews;  // scratch: [segments][group][rows of a segment + queries]
};

// The scores are computed twice instead of being kept: memory is two floats per row and query head. Work is split by
// fixed segments of rows and merged in order, so the bits do not depend on the threads.
void sample_attention(const SampleArgs& args, ThreadPool& pool, AttentionSample& out);

}  // namespace longkv
