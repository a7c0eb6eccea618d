// MInference's patterns (arXiv 2407.02490), one for each query head, over blocks of 64 queries.
#include <algorithm>
#include <limits>
#include <utility>

#include "base/checked.h"
#include "kv/select/topk.h"
#include "prefill/choose.h"
#include "prefill/pattern.h"
#include "prefill/pooled.h"
#include "prefill/sample.h"
#include "prefill/sizes.h"

namespace longkv {

namespace {

constexpr int64_t kBlock = kPooledBlock;

class AssignedPattern final : public PrefillPattern {
 public:
  explicit AssignedPattern(PatternAssignment assignment) : assignment_(std::move(assignment)) {}

  int64_t block_rows() const override { return kBlock; }
  int heads_per_list() const override { return 1; }

  void estimate(const PrefillAttendArgs& chunk, int layer, ThreadPool& pool) override {
    heads_ = assignment_[size_t(layer)];
    columns_.resize(heads_.size());
    distances_.resize(heads_.size());
    blocks_.resize(heads_.size());
    scratch_.resize(size_t(pool.threads()));
    for (size_t h = 0; h < chunk.heads.size(); ++h) {
      const auto group = std::span(heads_).subspan(h * size_t(chunk.group_size), size_t(chunk.group_size));
      const auto has = [&](PrefillKind kind) {
        return std::any_of(group.begin(), group.end(), [&](const HeadPattern& p) { return p.kind == kind; });
      };
      if (has(PrefillKind::kVerticalSlash)) choose_lines(chunk, int64_t(h), pool);
      if (has(PrefillKind::kBlockSparse)) choose_blocks(chunk, int64_t(h), pool);
    }
  }

  void rows(int head, RowRange queries, std::vector<RowRange>& out) const override {
    const HeadPattern& p = heads_[size_t(head)];
    switch (p.kind) {
      case PrefillKind::kAShape: return a_shape_rows(p.first, p.second, queries, out);
      case PrefillKind::kVerticalSlash:
        return vertical_slash_rows(columns_[size_t(head)], distances_[size_t(head)], queries, out);
      case PrefillKind::kBlockSparse:
        return block_list_rows(blocks_[size_t(head)][size_t(queries.begin / kBlock - first_block_[size_t(head)])],
                               kBlock, queries, out);
      default: out.assign(1, RowRange{0, queries.end});
    }
  }

 private:
  struct Scratch {
    std::vector<uint64_t> keys;
    std::vector<int64_t> picked;
    std::vector<float> mean, shares;
  };

  // The columns and diagonals that the chunk's last queries give most mass.
  void choose_lines(const PrefillAttendArgs& chunk, int64_t kv_head, ThreadPool& pool) {
    const int64_t group = chunk.group_size;
    const SampleArgs args = sample_of_chunk(chunk, kv_head, kSlashQueries);
    sample_attention(args, pool, sample_);
    pool.run(2 * group, [&](int64_t task, int worker) {
      const int64_t head = kv_head * group + task / 2;
      const HeadPattern& p = heads_[size_t(head)];
      if (p.kind != PrefillKind::kVerticalSlash) return;
      const bool vertical = task % 2 == 0;
      std::vector<float>& all = vertical ? sample_.columns : sample_.distances;
      const auto scores = std::span(all).subspan(size_t(task / 2 * sample_.rows), size_t(sample_.rows));
      const int64_t forced = std::min(vertical ? kForcedColumns : kForcedDistances, sample_.rows);
      std::fill_n(scores.begin(), forced, std::numeric_limits<float>::infinity());
      const int64_t k = vertical ? std::max(p.first, kMinColumns) : std::max(p.second, kMinDistances);
      Scratch& scratch = scratch_[size_t(worker)];
      top_k(scores.data(), sample_.rows, std::min(k, sample_.rows), scratch.keys, scratch.picked);
      ranges_of(scratch.picked, (vertical ? columns_ : distances_)[size_t(head)]);
    });
  }

  // For each block of queries the blocks of keys whose mean its own mean query scores best; its own block always.
  void choose_blocks(const PrefillAttendArgs& chunk, int64_t kv_head, ThreadPool& pool) {
    const int64_t group = chunk.group_size, dim = chunk.heads[0].dim_k;
    const int64_t stride = int64_t(chunk.heads.size()) * group * dim;
    const int64_t begin = chunk.first_row(kv_head), end = begin + chunk.tokens;
    const int64_t first = begin / kBlock, count = ceil_div(end, kBlock) - first;
    pool_keys(chunk.heads[size_t(kv_head)], end, kBlock, pool, means_);
    first_block_.resize(heads_.size());
    for (int64_t j = 0; j < group; ++j) {
      first_block_[size_t(kv_head * group + j)] = first;
      blocks_[size_t(kv_head * group + j)].resize(size_t(count));
    }
    pool.run(group * count, [&](int64_t task, int worker) {
      const int64_t head = kv_head * group + task / count, block = first + task % count;
      const HeadPattern& p = heads_[size_t(head)];
      if (p.kind != PrefillKind::kBlockSparse) return;
      Scratch& scratch = scratch_[size_t(worker)];
      scratch.mean.resize(size_t(dim));
      scratch.shares.resize(size_t(block + 1));
      const int64_t from = std::max(begin, block * kBlock), to = std::min(end, (block + 1) * kBlock);
      pool_queries(chunk.q + (from - begin) * stride + head * dim, stride, to - from, dim, scratch.mean.data());
      mean_shares(scratch.mean.data(), means_.data(), block + 1, dim, chunk.params.scale, scratch.shares.data());
      scratch.shares[size_t(block)] = std::numeric_limits<float>::infinity();
      top_k(scratch.shares.data(), block + 1, std::clamp<int64_t>(p.first, 1, block + 1), scratch.keys,
            blocks_[size_t(head)][size_t(task % count)]);
    });
  }

  PatternAssignment assignment_;
  std::vector<HeadPattern> heads_;                          // of the layer
  std::vector<std::vector<RowRange>> columns_, distances_;  // [query heads]
  std::vector<std::vector<std::vector<int64_t>>> blocks_;   // [query heads][blocks of the chunk]
  std::vector<int64_t> first_block_;                        // [query heads], of the chunk
  AttentionSample sample_;
  std::vector<float> means_;
  std::vector<Scratch> scratch_;  // [workers]
};

}  // namespace

PatternAssignment uniform_assignment(const PrefillSpec& spec, int layers, int heads) {
  HeadPattern p;
  p.kind = spec.kind == PrefillKind::kMInference ? PrefillKind::kVerticalSlash : spec.kind;
  switch (p.kind) {
    case PrefillKind::kAShape: p.first = spec.sink, p.second = spec.window; break;
    case PrefillKind::kVerticalSlash: p.first = spec.columns, p.second = spec.diagonals; break;
    case PrefillKind::kBlockSparse: p.first = spec.blocks; break;
    default: break;
  }
  return PatternAssignment(size_t(layers), std::vector<HeadPattern>(size_t(heads), p));
}

std::unique_ptr<PrefillPattern> make_assigned_pattern(PatternAssignment assignment) {
  return std::make_unique<AssignedPattern>(std::move(assignment));
}

}  // namespace longkv
