#include "prefill/sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/aligned.h"
#include "base/checked.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "prefill/sample.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h, once per target:
#include <hwy/highway.h>

#include "ops/fast_exp-inl.h"
#include "ops/tail-inl.h"
#include "prefill/attention_pack-inl.h"
#include "prefill/product-inl.h"

#ifndef LONGKV_PREFILL_SAMPLE_ONCE
#define LONGKV_PREFILL_SAMPLE_ONCE
namespace longkv {

constexpr int64_t kSampleTile = 128;            // rows that are packed together
constexpr int64_t kSampleSegment = 16 * 128;    // rows of a task
constexpr int64_t kSampleBlock = 12;            // multiple of every target's block of queries
constexpr int64_t kSampleStride = kSampleTile;  // of a row of scores

// Buffers of one worker, 64-byte aligned.
struct SampleScratch {
  float* packed;   // [kSampleTile][dim_k]
  float* decoded;  // [32][dim_k]
  float* scores;   // [query rows][kSampleStride]
};

// A segment's share of the work; q holds the scaled queries, [group][queries] rounded up to kSampleBlock, [dim_k].
struct SampleSegment {
  const SampleArgs* args;
  const float* q;
  int64_t begin;
  int64_t end;
  SampleScratch scratch;
};

}  // namespace longkv
#endif

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

static_assert(kSampleBlock % kBlock == 0 && kSampleTile % kPanel == 0);

HWY_INLINE hn::Mask<DF> first_lanes(const DF df, int64_t n) { return hn::FirstN(df, size_t(std::max<int64_t>(0, n))); }

// Scores of all query rows against rows [begin, end) in log2 units, at most kSampleTile of them; columns beyond are
// undefined.
void sample_scores(const SampleSegment& segment, int64_t begin, int64_t end) {
  const DF df;
  const SampleArgs& args = *segment.args;
  const int64_t dim = args.kv.dim_k;
  const int64_t rows = args.group * args.queries;
  pack_keys<kPanel>(args.kv, begin, begin, end, segment.scratch.decoded, segment.scratch.packed);
  for (int64_t key = 0; key < end - begin; key += kPanel) {
    for (int64_t row = 0; row < rows; row += kBlock) {
      VF c[kBlock][2];
      product_block(segment.q + row * dim, dim, segment.scratch.packed + key * dim, dim, c);
#pragma GCC unroll 16
      for (int i = 0; i < kBlock; ++i) {
        if (args.params.softcap > 0) {
          const VF cap = hn::Set(df, args.params.softcap * kLog2E);
          c[i][0] = hn::Mul(cap, fast_tanh_of_log2(df, c[i][0]));
          c[i][1] = hn::Mul(cap, fast_tanh_of_log2(df, c[i][1]));
        }
        float* to = segment.scratch.scores + (row + i) * kSampleStride + key;
        hn::Store(c[i][0], df, to);
        hn::Store(c[i][1], df, to + kLanes);
      }
    }
  }
}

// Rows of [begin, end) that the query of a row sees; query rows are ordered (head, query).
int64_t sample_visible(const SampleArgs& args, int64_t query_row, int64_t begin, int64_t end) {
  return std::clamp<int64_t>(args.row + query_row % args.queries + 1 - begin, 0, end - begin);
}

// sums[2 * row], sums[2 * row + 1]: maximum and sum of 2^(s - maximum) over the segment.
void sample_sums(const SampleSegment& segment, float* sums) {
  const DF df;
  const SampleArgs& args = *segment.args;
  const int64_t rows = args.group * args.queries;
  const VF lowest = hn::Set(df, -std::numeric_limits<float>::infinity());
  for (int64_t row = 0; row < rows; ++row) {
    sums[2 * row] = -std::numeric_limits<float>::infinity();
    sums[2 * row + 1] = 0;
  }
  for (int64_t begin = segment.begin; begin < segment.end; begin += kSampleTile) {
    const int64_t end = std::min(begin + kSampleTile, segment.end);
    sample_scores(segment, begin, end);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t n = sample_visible(args, row, begin, end);
      if (n == 0) continue;
      const float* s = segment.scratch.scores + row * kSampleStride;
      VF top = lowest;
      for (int64_t i = 0; i < n; i += kLanes) {
        top = hn::Max(top, hn::IfThenElse(first_lanes(df, n - i), hn::Load(df, s + i), lowest));
      }
      const float old_max = sums[2 * row];
      const float new_max = std::max(old_max, hn::GetLane(hn::MaxOfLanes(df, top)));
      const VF shift = hn::Set(df, new_max);
      VF sum = hn::Zero(df);
      for (int64_t i = 0; i < n; i += kLanes) {
        const VF p = fast_exp2(df, hn::Sub(hn::Load(df, s + i), shift));
        sum = hn::Add(sum, hn::IfThenElseZero(first_lanes(df, n - i), p));
      }
      sums[2 * row] = new_max;
      const float factor = old_max == new_max ? 1.0f : hn::GetLane(fast_exp2(df, hn::Set(df, old_max - new_max)));
      sums[2 * row + 1] = sums[2 * row + 1] * factor + hn::GetLane(hn::SumOfLanes(df, sum));
    }
  }
}

// Adds the mass of the segment: columns[head * rows + row], and skews[head][row - segment begin + queries - 1 - query],
// which is one diagonal per index. `sums` are the final ones.
void sample_masses(const SampleSegment& segment, const float* sums, float* columns, int64_t column_stride, float* skews,
                   int64_t skew_stride) {
  const DF df;
  const SampleArgs& args = *segment.args;
  for (int64_t begin = segment.begin; begin < segment.end; begin += kSampleTile) {
    const int64_t end = std::min(begin + kSampleTile, segment.end);
    sample_scores(segment, begin, end);
    for (int64_t row = 0; row < args.group * args.queries; ++row) {
      const int64_t n = sample_visible(args, row, begin, end);
      const int64_t head = row / args.queries, query = row % args.queries;
      const float* s = segment.scratch.scores + row * kSampleStride;
      float* column = columns + head * column_stride + begin;
      float* skew = skews + head * skew_stride + (begin - segment.begin) + args.queries - 1 - query;
      const VF shift = hn::Set(df, sums[2 * row]);
      const VF inverse = hn::Set(df, 1.0f / sums[2 * row + 1]);
      for (int64_t i = 0; i < n; i += kLanes) {
        const VF p = hn::Mul(fast_exp2(df, hn::Sub(hn::Load(df, s + i), shift)), inverse);
        if (i + kLanes <= n) {
          hn::StoreU(hn::Add(hn::LoadU(df, column + i), p), df, column + i);
          hn::StoreU(hn::Add(hn::LoadU(df, skew + i), p), df, skew + i);
        } else {
          const auto left = size_t(n - i);
          store_first(hn::Add(load_first(df, column + i, left), p), df, column + i, left);
          store_first(hn::Add(load_first(df, skew + i, left), p), df, skew + i, left);
        }
      }
    }
  }
}

void load_sample_queries(const SampleArgs& args, float* dst) {
  const AttendParams& p = args.params;
  const float factor = p.softcap > 0 ? 2.0f * kLog2E * (p.scale / p.softcap) : kLog2E * p.scale;
  for (int64_t row = 0; row < args.group * args.queries; ++row) {
    const float* src = args.q + row % args.queries * args.q_stride + row / args.queries * args.kv.dim_k;
    for (int64_t i = 0; i < args.kv.dim_k; ++i) dst[row * args.kv.dim_k + i] = src[i] * factor;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(sample_sums);
HWY_EXPORT(sample_masses);
HWY_EXPORT(load_sample_queries);

SampleArgs sample_of_chunk(const PrefillAttendArgs& chunk, int64_t kv_head, int64_t queries) {
  const int64_t group = chunk.group_size, dim = chunk.heads[0].dim_k;
  SampleArgs args;
  args.queries = std::min(queries, chunk.tokens);
  args.q_stride = int64_t(chunk.heads.size()) * group * dim;
  args.q = chunk.q + (chunk.tokens - args.queries) * args.q_stride + kv_head * group * dim;
  args.row = chunk.first_row(kv_head) + chunk.tokens - args.queries;
  args.group = int(group);
  args.kv = chunk.heads[size_t(kv_head)];
  args.params = chunk.params;
  return args;
}

void sample_attention(const SampleArgs& args, ThreadPool& pool, AttentionSample& out) {
  const int64_t dim = args.kv.dim_k;
  const int64_t group = args.group;
  const int64_t query_rows = group * args.queries;
  const int64_t padded = round_up(query_rows, kSampleBlock);
  const int64_t first = args.kv.first_row / kSampleTile * kSampleTile;
  const int64_t segments = ceil_div(args.row + args.queries - first, kSampleSegment);
  out.rows = args.row + args.queries;
  out.columns.assign(size_t(group * out.rows), 0.0f);
  out.distances.assign(size_t(group * out.rows), 0.0f);

  const int64_t per_worker =
      round_up(kSampleTile * dim, 16) + round_up(32 * dim, 16) + round_up(padded * kSampleStride, 16);
  const int64_t q_size = round_up(padded * dim, 16);
  const AlignedFloats memory = aligned_floats(size_t(q_size + per_worker * pool.threads()));
  float* q = memory.get();
  std::memset(q, 0, size_t(q_size) * sizeof(float));
  HWY_DYNAMIC_DISPATCH(load_sample_queries)(args, q);
  const auto segment_of = [&](int64_t task, int worker) {
    float* base = memory.get() + q_size + per_worker * worker;
    float* decoded = base + round_up(kSampleTile * dim, 16);
    const int64_t begin = std::max(args.kv.first_row, first + task * kSampleSegment);
    const int64_t end = std::min(first + (task + 1) * kSampleSegment, out.rows);
    return SampleSegment{&args, q, begin, end, {base, decoded, decoded + round_up(32 * dim, 16)}};
  };

  out.sums.resize(size_t((segments + 1) * 2 * query_rows));
  pool.run(segments, [&](int64_t task, int worker) {
    HWY_DYNAMIC_DISPATCH(sample_sums)(segment_of(task, worker), out.sums.data() + (task + 1) * 2 * query_rows);
  });
  for (int64_t row = 0; row < query_rows; ++row) {
    float top = -std::numeric_limits<float>::infinity();
    for (int64_t s = 1; s <= segments; ++s) top = std::max(top, out.sums[size_t((s * query_rows + row) * 2)]);
    float sum = 0;
    for (int64_t s = 1; s <= segments; ++s) {
      const float* part = out.sums.data() + (s * query_rows + row) * 2;
      if (part[1] != 0) sum += part[1] * std::exp2(part[0] - top);
    }
    out.sums[size_t(2 * row)] = top;
    out.sums[size_t(2 * row + 1)] = sum;
  }

  const int64_t skew_stride = kSampleSegment + args.queries;
  out.skews.assign(size_t(segments * group * skew_stride), 0.0f);
  pool.run(segments, [&](int64_t task, int worker) {
    HWY_DYNAMIC_DISPATCH(sample_masses)
    (segment_of(task, worker), out.sums.data(), out.columns.data(), out.rows,
     out.skews.data() + task * group * skew_stride, skew_stride);
  });
  pool.run(group, [&](int64_t head, int) {
    float* distances = out.distances.data() + head * out.rows;
    for (int64_t s = 0; s < segments; ++s) {
      const float* skew = out.skews.data() + (s * group + head) * skew_stride;
      // Index i of a segment that begins at row b lies at distance row + queries - 1 - (b + i).
      const int64_t farthest = out.rows - 1 - std::max(args.kv.first_row, first + s * kSampleSegment);
      for (int64_t i = 0; i < skew_stride && i <= farthest; ++i) distances[farthest - i] += skew[i];
    }
  });
}

}  // namespace longkv
#endif  // HWY_ONCE
