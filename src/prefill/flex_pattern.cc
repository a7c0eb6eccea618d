// FlexPrefill (ICLR 2025): each query head and chunk is read either by pooled blocks, where those predict the mass of
// the last queries well, or by columns and diagonals; as many of them as reach a share of the mass.
#include <algorithm>
#include <cmath>

#include "base/checked.h"
#include "kv/select/topk.h"
#include "prefill/choose.h"
#include "prefill/pattern.h"
#include "prefill/pooled.h"
#include "prefill/sample.h"

namespace longkv {

namespace {

constexpr int64_t kBlock = 128;
constexpr int64_t kSampleQueries = 128;

// Square root of the Jensen-Shannon divergence, in nats.
double distribution_distance(std::span<const float> p, std::span<const float> q) {
  double divergence = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    const double mean = 0.5 * (double(p[i]) + q[i]);
    if (p[i] > 0) divergence += 0.5 * p[i] * std::log(p[i] / mean);
    if (q[i] > 0) divergence += 0.5 * q[i] * std::log(q[i] / mean);
  }
  return std::sqrt(std::max(0.0, divergence));
}

class FlexPattern final : public PrefillPattern {
 public:
  explicit FlexPattern(const PrefillSpec& spec) : spec_(spec) {}

  int64_t block_rows() const override { return kBlock; }
  int heads_per_list() const override { return 1; }

  void estimate(const PrefillAttendArgs& chunk, int, ThreadPool& pool) override {
    heads_.resize(chunk.heads.size() * size_t(chunk.group_size));
    for (int64_t h = 0; h < int64_t(chunk.heads.size()); ++h) {
      const SampleArgs args = sample_of_chunk(chunk, h, kSampleQueries);
      sample_attention(args, pool, sample_);
      pool_keys(args.kv, sample_.rows, kBlock, pool, means_);
      pool.run(chunk.group_size, [&](int64_t j, int) { estimate_head(chunk, args, h, j); });
    }
  }

  void rows(int head, RowRange queries, std::vector<RowRange>& out) const override {
    const Head& h = heads_[size_t(head)];
    if (h.pooled)
      return block_list_rows(h.blocks[size_t(queries.begin / kBlock - h.first_block)], kBlock, queries, out);
    vertical_slash_rows(h.columns, h.distances, queries, out);
  }

 private:
  struct Head {
    bool pooled = false;
    int64_t first_block = 0;                   // of the chunk
    std::vector<std::vector<int64_t>> blocks;  // [blocks of the chunk], when pooled
    std::vector<RowRange> columns, distances;  // otherwise

    std::vector<float> truth, predicted, mean, pairs;
    std::vector<uint64_t> keys;
    std::vector<int64_t> picked;
  };

  void estimate_head(const PrefillAttendArgs& chunk, const SampleArgs& args, int64_t kv_head, int64_t j) {
    Head& head = heads_[size_t(kv_head * args.group + j)];
    const int64_t dim = args.kv.dim_k;
    const int64_t blocks = ceil_div(sample_.rows, kBlock);
    const auto columns = std::span(sample_.columns).subspan(size_t(j * sample_.rows), size_t(sample_.rows));
    head.truth.assign(size_t(blocks), 0.0f);
    for (int64_t row = 0; row < sample_.rows; ++row) head.truth[size_t(row / kBlock)] += columns[size_t(row)];
    for (float& share : head.truth) share /= float(args.queries);
    head.mean.resize(size_t(dim));
    head.predicted.resize(size_t(blocks));
    pool_queries(args.q + j * dim, args.q_stride, args.queries, dim, head.mean.data());
    mean_shares(head.mean.data(), means_.data(), blocks, dim, chunk.params.scale, head.predicted.data());
    head.pooled = distribution_distance(head.truth, head.predicted) < spec_.trust;
    if (head.pooled) {
      choose_pairs(chunk, kv_head, j, head);
    } else {
      choose_lines(j, columns, head);
    }
  }

  // Pairs of blocks by their pooled shares, over all block rows of the chunk at once, until `share` of the mass is
  // reached; then each row's best up to the minimum, its first block and its own.
  void choose_pairs(const PrefillAttendArgs& chunk, int64_t kv_head, int64_t j, Head& head) {
    const int64_t group = chunk.group_size, dim = chunk.heads[0].dim_k;
    const int64_t stride = int64_t(chunk.heads.size()) * group * dim;
    const int64_t begin = chunk.first_row(kv_head), end = begin + chunk.tokens;
    const int64_t first = begin / kBlock, count = ceil_div(end, kBlock) - first, width = ceil_div(end, kBlock);
    head.first_block = first;
    head.pairs.assign(size_t(count * width), 0.0f);
    for (int64_t b = 0; b < count; ++b) {
      const int64_t from = std::max(begin, (first + b) * kBlock), to = std::min(end, (first + b + 1) * kBlock);
      pool_queries(chunk.q + (from - begin) * stride + (kv_head * group + j) * dim, stride, to - from, dim,
                   head.mean.data());
      mean_shares(head.mean.data(), means_.data(), first + b + 1, dim, chunk.params.scale,
                  head.pairs.data() + b * width);
    }
    cover(head.pairs, spec_.share, head.keys, head.picked);
    head.blocks.assign(size_t(count), {});
    for (const int64_t pair : head.picked) head.blocks[size_t(pair / width)].push_back(pair % width);
    for (int64_t b = 0; b < count; ++b) {
      std::vector<int64_t>& own = head.blocks[size_t(b)];
      const int64_t visible = first + b + 1;
      if (const int64_t wanted = std::min(ceil_div(spec_.min_budget, kBlock), visible); int64_t(own.size()) < wanted) {
        top_k(head.pairs.data() + b * width, visible, wanted, head.keys, own);
      }
      if (own.empty() || own.front() != 0) own.insert(own.begin(), 0);
      if (own.back() != first + b) own.push_back(first + b);
    }
  }

  // Single columns, and diagonals in blocks of 128 distances: the fewest that reach `share` of the sample's mass each.
  void choose_lines(int64_t j, std::span<const float> columns, Head& head) {
    const int64_t rows = sample_.rows;
    cover(columns, spec_.share, head.keys, head.picked);
    if (const int64_t wanted = std::min(spec_.min_budget, rows); int64_t(head.picked.size()) < wanted) {
      top_k(columns.data(), rows, wanted, head.keys, head.picked);
    }
    // The first block always.
    head.columns.assign(1, RowRange{0, std::min(kBlock, rows)});
    for (const int64_t c : head.picked) {
      if (c >= kBlock) append_range(head.columns, {c, c + 1});
    }

    const float* distances = sample_.distances.data() + j * rows;
    head.truth.assign(size_t(ceil_div(rows, kBlock)), 0.0f);
    for (int64_t d = 0; d < rows; ++d) head.truth[size_t(d / kBlock)] += distances[d];
    cover(head.truth, spec_.share, head.keys, head.picked);
    const int64_t wanted = std::min(ceil_div(spec_.min_budget, kBlock), int64_t(head.truth.size()));
    if (int64_t(head.picked.size()) < wanted) {
      top_k(head.truth.data(), int64_t(head.truth.size()), wanted, head.keys, head.picked);
    }
    head.distances.assign(1, RowRange{0, kBlock});
    for (const int64_t b : head.picked) append_range(head.distances, {b * kBlock, (b + 1) * kBlock});
  }

  PrefillSpec spec_;
  std::vector<Head> heads_;  // [query heads]
  AttentionSample sample_;
  std::vector<float> means_;
};

}  // namespace

std::unique_ptr<PrefillPattern> make_flex_pattern(const PrefillSpec& spec) {
  return std::make_unique<FlexPattern>(spec);
}

}  // namespace longkv
