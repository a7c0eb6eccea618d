// XAttention: for each block of 128 queries the fewest blocks of keys that reach a share of the estimated mass.
#include <algorithm>

#include "base/checked.h"
#include "kv/select/topk.h"
#include "prefill/antidiagonal.h"
#include "prefill/choose.h"
#include "prefill/pattern.h"
#include "prefill/sizes.h"

namespace longkv {

namespace {

constexpr int64_t kBlock = kShareBlock;

class XAttentionPattern final : public PrefillPattern {
 public:
  explicit XAttentionPattern(const PrefillSpec& spec) : spec_(spec) {}

  int64_t block_rows() const override { return kBlock; }
  int heads_per_list() const override { return spec_.shared ? group_ : 1; }

  void estimate(const PrefillAttendArgs& chunk, int, ThreadPool& pool) override {
    group_ = chunk.group_size;
    const int64_t group = group_, dim = chunk.heads[0].dim_k, kv_heads = int64_t(chunk.heads.size());
    blocks_.resize(size_t(kv_heads * group));
    first_block_.resize(size_t(kv_heads));
    scratch_.resize(size_t(pool.threads()));
    for (int64_t h = 0; h < kv_heads; ++h) {
      AntidiagonalArgs args;
      args.q = chunk.q + h * group * dim;
      args.q_stride = kv_heads * group * dim;
      args.queries = chunk.tokens;
      args.row = chunk.first_row(h);
      args.group = group_;
      args.kv = chunk.heads[size_t(h)];
      args.scale = chunk.params.scale;
      args.stride = spec_.stride;
      args.block = kBlock;
      antidiagonal_shares(args, pool, shares_);
      first_block_[size_t(h)] = shares_.first_block;
      const int64_t count = shares_.query_blocks;
      for (int64_t j = 0; j < group; ++j) blocks_[size_t(h * group + j)].resize(size_t(count));
      pool.run(group * count, [&](int64_t task, int worker) {
        const int64_t block = task % count;
        const auto row = std::span(shares_.shares).subspan(size_t(task * shares_.key_blocks));
        choose(row.first(size_t(shares_.first_block + block + 1)), scratch_[size_t(worker)],
               blocks_[size_t(h * group + task / count)][size_t(block)]);
      });
      if (spec_.shared) {
        for (int64_t block = 0; block < count; ++block) unite(h * group, block);
      }
    }
  }

  void rows(int head, RowRange queries, std::vector<RowRange>& out) const override {
    const int64_t first = first_block_[size_t(head / group_)];
    block_list_rows(blocks_[size_t(head)][size_t(queries.begin / kBlock - first)], kBlock, queries, out);
  }

 private:
  struct Scratch {
    std::vector<uint64_t> keys;
    std::vector<int64_t> picked;
  };

  // Sinks and the diagonal block come first and count in the share and in the minimum.
  void choose(std::span<const float> shares, Scratch& scratch, std::vector<int64_t>& out) const {
    const int64_t n = int64_t(shares.size());
    const int64_t sinks = std::min(ceil_div(spec_.sink, kBlock), n);
    double forced = 0, rest = 0;
    for (int64_t b = 0; b < n; ++b) (b < sinks || b == n - 1 ? forced : rest) += shares[size_t(b)];
    out.clear();
    for (int64_t b = 0; b < sinks; ++b) out.push_back(b);
    if (sinks < n) out.push_back(n - 1);
    const auto middle = shares.subspan(size_t(sinks), size_t(std::max<int64_t>(0, n - 1 - sinks)));
    if (middle.empty()) return;
    const double missing = spec_.share * (forced + rest) - forced;
    scratch.picked.clear();
    if (missing > 0 || missing != missing) cover(middle, missing / rest, scratch.keys, scratch.picked);
    const int64_t wanted = std::min(spec_.min_blocks - int64_t(out.size()), int64_t(middle.size()));
    if (int64_t(scratch.picked.size()) < wanted) {
      top_k(middle.data(), int64_t(middle.size()), wanted, scratch.keys, scratch.picked);
    }
    for (const int64_t b : scratch.picked) out.push_back(b + sinks);
    std::sort(out.begin(), out.end());
  }

  // Every query head of the group gets the blocks of all.
  void unite(int64_t first_head, int64_t block) {
    std::vector<int64_t>& all = blocks_[size_t(first_head)][size_t(block)];
    for (int64_t j = 1; j < group_; ++j) {
      const std::vector<int64_t>& own = blocks_[size_t(first_head + j)][size_t(block)];
      all.insert(all.end(), own.begin(), own.end());
    }
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
  }

  PrefillSpec spec_;
  int group_ = 1;
  std::vector<std::vector<std::vector<int64_t>>> blocks_;  // [query heads][blocks of the chunk]
  std::vector<int64_t> first_block_;                       // [KV heads], of the chunk
  BlockShares shares_;
  std::vector<Scratch> scratch_;  // [workers]
};

}  // namespace

std::unique_ptr<PrefillPattern> make_xattention_pattern(const PrefillSpec& spec) {
  return std::make_unique<XAttentionPattern>(spec);
}

}  // namespace longkv
