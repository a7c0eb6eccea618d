#include "prefill/antidiagonal.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/aligned.h"
#include "base/checked.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "prefill/antidiagonal.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h, once per target:
#include <hwy/highway.h>

#include "ops/fast_exp-inl.h"
#include "prefill/attention_pack-inl.h"
#include "prefill/product-inl.h"

#ifndef LONGKV_PREFILL_ANTIDIAGONAL_ONCE
#define LONGKV_PREFILL_ANTIDIAGONAL_ONCE
namespace longkv {

constexpr int64_t kSquarePanel = 32;  // squares of keys that are packed together; multiple of every target's panel
constexpr int64_t kSquareBlock = 12;  // multiple of every target's block of query squares

struct SquareTask {
  const AntidiagonalArgs* args;
  const float* q;        // [group][padded][stride * dim], scaled to log2 units
  int64_t padded;        // query squares of a head rounded up to kSquareBlock
  int64_t squares;       // query squares of a head
  int64_t first_square;  // of the queries
  int64_t key_square;    // first of the task's kSquarePanel key squares
  int64_t key_blocks;
  float* packed;   // [stride * dim][panel], one panel after the other
  float* decoded;  // [32][dim]
  float* lse;      // [group][squares][key_blocks]
};

}  // namespace longkv
#endif

HWY_BEFORE_NAMESPACE();
namespace longkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

static_assert(kSquareBlock % kBlock == 0 && kSquarePanel % kPanel == 0);

// packed[panel][(s * dim + i) * kPanel + j] = channel i of row (square + j) * stride + s.
void pack_squares(const SquareTask& task) {
  const KvHeadView& kv = task.args->kv;
  const int64_t stride = task.args->stride, dim = kv.dim_k;
  const int64_t end = task.args->row + task.args->queries;
  for (int64_t panel = 0; panel < kSquarePanel; panel += kPanel) {
    float* dst = task.packed + panel * stride * dim;
    for (int64_t s = 0; s < stride; ++s) {
      for (int64_t j = 0; j < kPanel; ++j) {
        const int64_t row = (task.key_square + panel + j) * stride + s;
        float* to = task.decoded + j * dim;
        if (row >= kv.first_row && row < end) {
          decode_key(kv, row, to);
        } else {
          std::fill_n(to, dim, 0.0f);
        }
      }
      interleave_panel<kPanel>(task.decoded, dim, dst + s * dim * kPanel);
    }
  }
}

// lse[b] of each block of keys from the scores x of one query square, of which the first `visible` count.
void reduce_blocks(const SquareTask& task, int64_t visible, float* HWY_RESTRICT x, float* lse) {
  const DF df;
  const int64_t per_block = task.args->block / task.args->stride;
  HWY_ALIGN float tops[kSquarePanel];
  for (int64_t at = 0; at < kSquarePanel; at += per_block) {
    const int64_t n = std::clamp<int64_t>(visible - at, 0, per_block);
    std::fill(x + at + n, x + at + per_block, -std::numeric_limits<float>::infinity());
    std::fill_n(tops + at, per_block, n > 0 ? *std::max_element(x + at, x + at + n) : 0.0f);
  }
  for (int64_t i = 0; i < kSquarePanel; i += kLanes) {
    hn::Store(fast_exp2(df, hn::Sub(hn::Load(df, x + i), hn::Load(df, tops + i))), df, x + i);
  }
  for (int64_t at = 0; at < visible; at += per_block) {
    const int64_t b = (task.key_square + at) / per_block;
    if (b >= task.key_blocks) break;
    float sum = 0;
    for (int64_t i = 0; i < per_block; ++i) sum += x[at + i];
    lse[b] = tops[at] + std::log2(sum);
  }
}

// lse of every query square over the blocks of keys that the panel holds, squares after the query's own left out.
void score_squares(const SquareTask& task) {
  const DF df;
  const AntidiagonalArgs& args = *task.args;
  const int64_t depth = args.stride * args.kv.dim_k;
  pack_squares(task);
  HWY_ALIGN float s[kSquareBlock * kSquarePanel];
  for (int64_t head = 0; head < args.group; ++head) {
    const float* q = task.q + head * task.padded * depth;
    // Squares of queries before the panel's first keys see none of them.
    const int64_t from = std::max<int64_t>(0, task.key_square - task.first_square) / kBlock * kBlock;
    for (int64_t row = from; row < task.squares; row += kBlock) {
      for (int64_t panel = 0; panel < kSquarePanel; panel += kPanel) {
        VF c[kBlock][2];
        product_block(q + row * depth, depth, task.packed + panel * depth, depth, c);
#pragma GCC unroll 16
        for (int i = 0; i < kBlock; ++i) {
          hn::Store(c[i][0], df, s + i * kSquarePanel + panel);
          hn::Store(c[i][1], df, s + i * kSquarePanel + panel + kLanes);
        }
      }
      for (int64_t i = 0; i < kBlock && row + i < task.squares; ++i) {
        const int64_t visible = task.first_square + row + i + 1 - task.key_square;  // squares of the panel
        if (visible <= 0) continue;
        reduce_blocks(task, std::min(visible, kSquarePanel), s + i * kSquarePanel,
                      task.lse + (head * task.squares + row + i) * task.key_blocks);
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace longkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longkv {

HWY_EXPORT(score_squares);

namespace {

// Squares of queries in reverse order, in log2 units, scaled by the queries that they have.
void load_squares(const AntidiagonalArgs& args, int64_t first_square, int64_t squares, int64_t padded, float* dst) {
  const int64_t dim = args.kv.dim_k, stride = args.stride;
  constexpr float kLog2E = 1.44269504088896341f;
  for (int64_t head = 0; head < args.group; ++head) {
    for (int64_t a = 0; a < squares; ++a) {
      const int64_t begin = std::max(args.row, (first_square + a) * stride);
      const int64_t end = std::min(args.row + args.queries, (first_square + a + 1) * stride);
      const float factor = kLog2E * args.scale / float(end - begin);
      for (int64_t row = begin; row < end; ++row) {
        const float* src = args.q + (row - args.row) * args.q_stride + head * dim;
        float* to = dst + (head * padded + a) * stride * dim + (stride - 1 - row % stride) * dim;
        for (int64_t i = 0; i < dim; ++i) to[i] = src[i] * factor;
      }
    }
  }
}

}  // namespace

void antidiagonal_shares(const AntidiagonalArgs& args, ThreadPool& pool, BlockShares& out) {
  const int64_t dim = args.kv.dim_k;
  const int64_t end = args.row + args.queries;
  const int64_t first_square = args.row / args.stride;
  const int64_t squares = ceil_div(end, args.stride) - first_square;
  const int64_t padded = round_up(squares, kSquareBlock);
  const int64_t per_block = args.block / args.stride;
  out.first_block = args.row / args.block;
  out.query_blocks = ceil_div(end, args.block) - out.first_block;
  out.key_blocks = ceil_div(end, args.block);
  const float lowest = -std::numeric_limits<float>::infinity();
  out.lse.assign(size_t(args.group * squares * out.key_blocks), lowest);
  out.queries.assign(size_t(args.group * padded * args.stride * dim), 0.0f);
  load_squares(args, first_square, squares, padded, out.queries.data());

  const int64_t first_panel = args.kv.first_row / args.stride / kSquarePanel;
  const int64_t panels = ceil_div(ceil_div(end, args.stride), kSquarePanel);
  const int64_t packed_size = kSquarePanel * args.stride * dim;
  const int64_t per_worker = packed_size + round_up(32 * dim, 16);
  const AlignedFloats memory = aligned_floats(size_t(per_worker * pool.threads()));
  pool.run(panels - first_panel, [&](int64_t task, int worker) {
    float* base = memory.get() + per_worker * worker;
    HWY_DYNAMIC_DISPATCH(score_squares)
    ({&args, out.queries.data(), padded, squares, first_square, (first_panel + task) * kSquarePanel, out.key_blocks,
      base, base + packed_size, out.lse.data()});
  });

  out.shares.assign(size_t(args.group * out.query_blocks * out.key_blocks), 0.0f);
  pool.run(args.group * out.query_blocks, [&](int64_t task, int) {
    const int64_t head = task / out.query_blocks, block = task % out.query_blocks;
    const int64_t begin = std::max<int64_t>(0, (out.first_block + block) * per_block - first_square);
    const int64_t stop = std::min(squares, (out.first_block + block + 1) * per_block - first_square);
    const int64_t visible = out.first_block + block + 1;  // blocks of keys
    float* shares = out.shares.data() + task * out.key_blocks;
    for (int64_t a = begin; a < stop; ++a) {
      float* weights = out.lse.data() + (head * squares + a) * out.key_blocks;
      const float top = *std::max_element(weights, weights + visible);
      double sum = 0;
      for (int64_t b = 0; b < visible; ++b) {
        weights[b] = std::exp2(weights[b] - top);
        sum += weights[b];
      }
      const auto factor = float(1.0 / (sum * double(stop - begin)));
      for (int64_t b = 0; b < visible; ++b) shares[b] += weights[b] * factor;
    }
  });
}

}  // namespace longkv
#endif  // HWY_ONCE
