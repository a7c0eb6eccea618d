#include "kv/index/clusters.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/checked.h"
#include "base/error.h"
#include "kv/codec/codec.h"
#include "kv/index/columns.h"
#include "kv/index/kinds.h"

namespace longkv {

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// Columns [n][dim] as tiles; missing ones are zero.
void to_tiles(const float* columns, int64_t n, int64_t dim, std::vector<float>& tiles) {
  tiles.assign(size_t(round_up(n, kColumnTile) * dim), 0.0f);
  for (int64_t i = 0; i < n; ++i) {
    float* tile = tiles.data() + i / kColumnTile * dim * kColumnTile + i % kColumnTile;
    for (int64_t c = 0; c < dim; ++c) tile[c * kColumnTile] = columns[i * dim + c];
  }
}

void normalise(float* x, int64_t dim) {
  double square = 0;
  for (int64_t c = 0; c < dim; ++c) square += double(x[c]) * x[c];
  const float inverse = square > 0 ? float(1.0 / std::sqrt(square)) : 0.0f;
  for (int64_t c = 0; c < dim; ++c) x[c] *= inverse;
}

// Spherical k-means of n centred keys: each row's group.
std::vector<int32_t> group_rows(const std::vector<float>& keys, int64_t n, int64_t dim, int64_t groups) {
  std::vector<float> centres(static_cast<size_t>(groups * dim)), tiles;
  std::vector<int64_t> sizes(static_cast<size_t>(groups));
  std::vector<int32_t> group(static_cast<size_t>(n));
  for (int64_t g = 0; g < groups; ++g) std::copy_n(keys.data() + g * n / groups * dim, dim, centres.data() + g * dim);
  for (int round = 0; round < ClusterIndex::kRounds; ++round) {
    for (int64_t g = 0; g < groups; ++g) normalise(centres.data() + g * dim, dim);
    to_tiles(centres.data(), groups, dim, tiles);
    // Columns beyond the groups are zero and could win where all products are negative: they are no choice.
    const int64_t n_tiles = ceil_div(groups, kColumnTile);
    for (int64_t g = groups; g < n_tiles * kColumnTile; ++g) {
      for (int64_t c = 0; c < dim; ++c) {
        tiles[size_t((g / kColumnTile * dim + c) * kColumnTile + g % kColumnTile)] =
            centres[size_t(c)];  // as good as the first, and behind it
      }
    }
    best_columns(keys.data(), n, dim, tiles.data(), n_tiles, group.data());
    std::fill(sizes.begin(), sizes.end(), 0);
    std::vector<float> sums(centres.size(), 0.0f);
    for (int64_t i = 0; i < n; ++i) {
      int32_t& g = group[size_t(i)];
      if (g >= groups) g = 0;  // only reachable for keys that are not finite
      ++sizes[size_t(g)];
      for (int64_t c = 0; c < dim; ++c) sums[size_t(g * dim + c)] += keys[size_t(i * dim + c)];
    }
    for (int64_t g = 0; g < groups; ++g) {
      if (sizes[size_t(g)] == 0) continue;  // keeps its centre
      std::copy_n(sums.data() + g * dim, dim, centres.data() + g * dim);
    }
  }
  return group;
}

}  // namespace

ClusterIndex::ClusterIndex(const IndexSpec& spec, const KvShape& shape)
    : dim_(shape.dim_k),
      dim_v_(shape.dim_v),
      cluster_(spec.cluster),
      segment_(spec.segment),
      skip_rows_(spec.skip_rows),
      keep_rows_(spec.keep_rows),
      heads_(size_t(shape.kv_heads)) {
  for (Head& head : heads_) head.end = skip_rows_;
}

void ClusterIndex::append(int kv_head, const KvHeadView& keys, int64_t begin, int64_t end) {
  Head& head = heads_[size_t(kv_head)];
  head.rows = end;
  // Prompts, which come many rows at a time, are clustered at their end.
  if (end - begin == 1 && end - head.end >= kGather + keep_rows_) {
    cluster_rows(head, keys, head.end, head.end + kGather);
  }
}

void ClusterIndex::finish_prompt(int kv_head, const KvHeadView& keys) {
  Head& head = heads_[size_t(kv_head)];
  const int64_t stop = head.rows - keep_rows_;
  while (head.end + cluster_ <= stop) cluster_rows(head, keys, head.end, std::min(stop, head.end + segment_));
}

void ClusterIndex::cluster_rows(Head& head, const KvHeadView& keys, int64_t begin, int64_t end) {
  const int64_t n = end - begin, groups = std::max<int64_t>(1, n / cluster_);
  std::vector<float> rows(static_cast<size_t>(n * dim_)), value(static_cast<size_t>(dim_v_));
  decode_k_rows(keys, begin, end, rows.data());
  std::vector<double> mean(size_t(dim_), 0.0);
  for (int64_t i = 0; i < n * dim_; ++i) mean[size_t(i % dim_)] += double(rows[size_t(i)]) / double(n);
  for (int64_t i = 0; i < n * dim_; ++i) rows[size_t(i)] -= float(mean[size_t(i % dim_)]);
  const std::vector<int32_t> group = group_rows(rows, n, dim_, groups);

  std::vector<std::vector<int32_t>> members(static_cast<size_t>(groups));
  for (int64_t i = 0; i < n; ++i) members[size_t(group[size_t(i)])].push_back(int32_t(i));
  const int64_t first = int64_t(head.starts.size()) - 1;
  head.segments.push_back({begin, end, first});
  head.values.resize(size_t((first + groups) * dim_v_), 0.0f);
  std::vector<float> centroid(static_cast<size_t>(dim_));
  std::vector<double> sum(static_cast<size_t>(std::max(dim_, dim_v_)));
  for (int64_t g = 0; g < groups; ++g) {
    std::fill(sum.begin(), sum.end(), 0.0);
    for (const int32_t i : members[size_t(g)]) {
      for (int64_t c = 0; c < dim_; ++c) sum[size_t(c)] += double(rows[size_t(i * dim_ + c)]);
      head.members.push_back(int32_t(begin + i));
    }
    const double size = double(std::max<size_t>(1, members[size_t(g)].size()));
    for (int64_t c = 0; c < dim_; ++c) centroid[size_t(c)] = float(sum[size_t(c)] / size + mean[size_t(c)]);
    put_centroid(head, first + g, centroid.data());
    std::fill(sum.begin(), sum.end(), 0.0);
    for (const int32_t i : members[size_t(g)]) {
      decode_v_rows(keys, begin + i, begin + i + 1, value.data());
      for (int64_t c = 0; c < dim_v_; ++c) sum[size_t(c)] += double(value[size_t(c)]);
    }
    for (int64_t c = 0; c < dim_v_; ++c) head.values[size_t((first + g) * dim_v_ + c)] = float(sum[size_t(c)]);
    head.starts.push_back(int64_t(head.members.size()));
  }
  head.end = end;
}

void ClusterIndex::put_centroid(Head& head, int64_t cluster, const float* centroid) {
  head.centroids.resize(size_t(round_up(cluster + 1, kColumnTile) * dim_), 0.0f);
  float* tile = head.centroids.data() + cluster / kColumnTile * dim_ * kColumnTile + cluster % kColumnTile;
  for (int64_t c = 0; c < dim_; ++c) tile[c * kColumnTile] = centroid[c];
}

void ClusterIndex::truncate(int kv_head, const KvHeadView&, int64_t rows) {
  Head& head = heads_[size_t(kv_head)];
  if (rows >= head.rows) return;
  head.rows = rows;
  while (!head.segments.empty() && head.segments.back().end > rows) {
    const Segment& last = head.segments.back();
    head.end = last.begin;
    head.starts.resize(size_t(last.first) + 1);
    head.members.resize(size_t(head.starts.back()));
    head.values.resize(size_t(last.first * dim_v_));
    head.centroids.resize(size_t(round_up(last.first, kColumnTile) * dim_));
    head.segments.pop_back();
  }
}

void ClusterIndex::score(int kv_head, const float* q, int n_q, int64_t block_begin, int64_t block_end, float* scores,
                         int64_t stride) const {
  const Head& head = heads_[size_t(kv_head)];
  float products[kColumnTile];
  for (int64_t b = block_begin; b < block_end;) {
    const int64_t tile = b / kColumnTile, stop = std::min(block_end, (tile + 1) * kColumnTile);
    for (int j = 0; j < n_q; ++j) {
      column_products(q + j * dim_, 1, dim_, head.centroids.data() + tile * dim_ * kColumnTile, products, kColumnTile);
      for (int64_t i = b; i < stop; ++i) {
        const bool empty = head.starts[size_t(i)] == head.starts[size_t(i) + 1];
        scores[j * stride + i - block_begin] = empty ? kNone : products[i % kColumnTile];
      }
    }
    b = stop;
  }
}

void ClusterIndex::estimate(int kv_head, const float* q, float scale, std::span<const int64_t> clusters, float* out,
                            float* lse) const {
  const Head& head = heads_[size_t(kv_head)];
  std::vector<double> logits(clusters.size());
  std::vector<double> sum(size_t(dim_v_), 0.0);
  double peak = -std::numeric_limits<double>::infinity(), total = 0;
  float products[kColumnTile];
  int64_t tile = -1;
  for (size_t i = 0; i < clusters.size(); ++i) {
    const int64_t k = clusters[i];
    if (k / kColumnTile != tile) {
      tile = k / kColumnTile;
      column_products(q, 1, dim_, head.centroids.data() + tile * dim_ * kColumnTile, products, kColumnTile);
    }
    logits[i] = double(scale) * double(products[k % kColumnTile]);
    peak = std::max(peak, logits[i]);
  }
  std::fill(out, out + dim_v_, 0.0f);
  *lse = kNone;
  for (size_t i = 0; i < clusters.size(); ++i) {
    const int64_t k = clusters[i];
    const double w = std::exp(logits[i] - peak);
    total += w * double(head.starts[size_t(k) + 1] - head.starts[size_t(k)]);
    const float* values = head.values.data() + k * dim_v_;
    for (int64_t c = 0; c < dim_v_; ++c) sum[size_t(c)] += w * double(values[c]);
  }
  if (!(total > 0)) return;
  for (int64_t c = 0; c < dim_v_; ++c) out[c] = float(sum[size_t(c)] / total);
  *lse = float(peak + std::log(total));
}

int64_t ClusterIndex::bytes_held() const {
  int64_t bytes = 0;
  for (const Head& head : heads_) {
    bytes +=
        int64_t(head.centroids.size() + head.values.size() + head.members.size()) * 4 + int64_t(head.starts.size()) * 8;
  }
  return bytes;
}

bool ClusterIndex::valid(const Head& head) const {
  if (head.starts.empty() || head.starts.front() != 0 || head.starts.back() != int64_t(head.members.size())) {
    return false;
  }
  if (!std::is_sorted(head.starts.begin(), head.starts.end())) return false;
  const int64_t clusters = int64_t(head.starts.size()) - 1;
  if (int64_t(head.centroids.size()) != round_up(clusters, kColumnTile) * dim_) return false;
  if (int64_t(head.values.size()) != clusters * dim_v_) return false;
  int64_t row = skip_rows_, first = 0;  // of the next segment
  for (const Segment& s : head.segments) {
    if (s.begin != row || s.end <= s.begin || s.end > head.rows || s.first != first) return false;
    row = s.end;
    first += std::max<int64_t>(1, (s.end - s.begin) / cluster_);
  }
  if (head.end != row || clusters != first) return false;
  return std::all_of(head.members.begin(), head.members.end(),
                     [&](int32_t r) { return r >= skip_rows_ && int64_t(r) < head.end; });
}

void ClusterIndex::visit(KvState& state, std::span<const KvHeadView> heads) {
  for (size_t h = 0; h < heads_.size() && state.ok(); ++h) {
    const KvState::Level level(state, "h", int64_t(h));
    Head& head = heads_[h];
    head.rows = heads[h].rows;
    // Every cluster but empty ones has a row, and a segment of n rows has at most n clusters.
    const auto most = uint64_t(head.rows + 1);
    state.value("end", head.end);
    state.list("segments", head.segments, most);
    state.list("centroids", head.centroids, uint64_t(round_up(head.rows + 1, kColumnTile) * dim_));
    state.list("values", head.values, most * uint64_t(dim_v_));
    state.list("starts", head.starts, most + 1);
    state.list("members", head.members, most);
    if (state.loading() && state.ok() && !state.expect(valid(head), "the clusters")) return;
  }
}

Result<std::unique_ptr<BlockIndex>> make_cluster_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity) {
  if (capacity > std::numeric_limits<int32_t>::max()) {
    return fail(Code::kInvalidArgument, "index=clusters holds up to {} rows, {} are wanted",
                std::numeric_limits<int32_t>::max(), capacity);
  }
  return std::unique_ptr<BlockIndex>(std::make_unique<ClusterIndex>(spec, shape));
}

}  // namespace longkv
