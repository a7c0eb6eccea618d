#include "prefill/search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

namespace longkv {

namespace {

// Published candidates; the size left at 0 is the one that the budget decides.
constexpr HeadPattern kCandidates[] = {
    {PrefillKind::kAShape, 100, 0},         {PrefillKind::kVerticalSlash, 30, 0},
    {PrefillKind::kVerticalSlash, 100, 0},  {PrefillKind::kVerticalSlash, 500, 0},
    {PrefillKind::kVerticalSlash, 1000, 0}, {PrefillKind::kVerticalSlash, 3500, 0},
    {PrefillKind::kBlockSparse, 0, 0},
};

int64_t& free_size(HeadPattern& p) { return p.kind == PrefillKind::kBlockSparse ? p.first : p.second; }

}  // namespace

AssignmentSearch::AssignmentSearch(const KvShape& shape, int64_t budget, ThreadPool& pool)
    : shape_(shape), budget_(budget), pool_(pool), attention_(pool) {
  const size_t layers = size_t(shape.layers), heads = size_t(shape.kv_heads) * size_t(shape.group_size);
  assignment_.assign(layers, std::vector<HeadPattern>(heads));
  errors_.assign(layers, std::vector<double>(heads, 0.0));
  pairs_.assign(layers, std::vector<PrefillPairs>(heads));
}

std::vector<PrefillPairs> AssignmentSearch::cost(const std::vector<HeadPattern>& heads,
                                                 const PrefillAttendArgs& chunk) {
  const auto pattern = make_assigned_pattern({heads});
  pattern->estimate(chunk, 0, pool_);
  std::vector<PrefillPairs> pairs(heads.size());
  pool_.run(int64_t(heads.size()), [&](int64_t head, int) {
    std::vector<RowRange> rows;
    const int64_t block = pattern->block_rows();
    const int64_t first = chunk.first_row(head / shape_.group_size), end = first + chunk.tokens;
    for (int64_t at = first; at < end; at = (at / block + 1) * block) {
      const RowRange queries{at, std::min((at / block + 1) * block, end)};
      pattern->rows(int(head), queries, rows);
      pairs[size_t(head)].attended += causal_pairs(rows, queries);
      pairs[size_t(head)].causal += causal_pairs(0, queries);
    }
  });
  return pairs;
}

std::vector<HeadPattern> AssignmentSearch::fit(const HeadPattern& candidate, const PrefillAttendArgs& chunk) {
  const size_t n = size_t(shape_.kv_heads) * size_t(shape_.group_size);
  std::vector<int64_t> fits(n, 0), over(n), budget(n);
  for (size_t head = 0; head < n; ++head) {
    const int64_t first = chunk.first_row(int64_t(head) / shape_.group_size);
    over[head] = first + chunk.tokens + 1;
    for (int64_t row = first; row < first + chunk.tokens; ++row) budget[head] += std::min(budget_, row + 1);
  }
  std::vector<HeadPattern> heads(n, candidate);
  // Bisection of all heads at once, to within a 64th of the size.
  for (bool open = true; open;) {
    open = false;
    for (size_t head = 0; head < n; ++head) free_size(heads[head]) = fits[head] + (over[head] - fits[head]) / 2;
    const auto pairs = cost(heads, chunk);
    for (size_t head = 0; head < n; ++head) {
      (pairs[head].attended <= budget[head] ? fits : over)[head] = free_size(heads[head]);
      open |= over[head] - fits[head] > std::max<int64_t>(1, fits[head] / 64);
    }
  }
  for (size_t head = 0; head < n; ++head) {
    heads[head] = candidate;
    free_size(heads[head]) = fits[head];
    if (fits[head] == 0) heads[head] = HeadPattern{};
  }
  return heads;
}

std::vector<double> AssignmentSearch::errors_of(const std::vector<HeadPattern>& heads, const PrefillAttendArgs& chunk) {
  const int64_t n = int64_t(heads.size()), dim = shape_.dim_v;
  const auto pattern = make_assigned_pattern({heads});
  pattern->estimate(chunk, 0, pool_);
  out_.resize(size_t(chunk.tokens * n * dim));
  PrefillAttendArgs args = chunk;
  args.out = out_.data();
  args.mass = nullptr;
  attention_.run_listed(args, *pattern);
  std::vector<double> errors(heads.size());
  pool_.run(n, [&](int64_t head, int) {
    double difference = 0, norm = 0;
    for (int64_t t = 0; t < chunk.tokens; ++t) {
      const float* dense = chunk.out + (t * n + head) * dim;
      const float* sparse = out_.data() + (t * n + head) * dim;
      for (int64_t i = 0; i < dim; ++i) {
        const double d = double(sparse[i]) - dense[i];
        difference += d * d;
        norm += double(dense[i]) * dense[i];
      }
    }
    errors[size_t(head)] = difference == 0 ? 0.0 : std::sqrt(difference / norm);
  });
  return errors;
}

void AssignmentSearch::choose(int layer, const PrefillAttendArgs& chunk) {
  std::vector<HeadPattern>& best = assignment_[size_t(layer)];
  std::vector<double>& least = errors_[size_t(layer)];
  std::fill(best.begin(), best.end(), HeadPattern{});
  std::fill(least.begin(), least.end(), std::numeric_limits<double>::infinity());
  for (const HeadPattern& candidate : kCandidates) {
    const std::vector<HeadPattern> heads = fit(candidate, chunk);
    const std::vector<double> errors = errors_of(heads, chunk);
    for (size_t head = 0; head < best.size(); ++head) {
      if (heads[head].kind == PrefillKind::kDense || !(errors[head] < least[head])) continue;
      best[head] = heads[head];
      least[head] = errors[head];
    }
  }
  for (size_t head = 0; head < best.size(); ++head) {
    if (best[head].kind == PrefillKind::kDense) least[head] = 0;
  }
  pairs_[size_t(layer)] = cost(best, chunk);
}

}  // namespace longkv
