// RetroInfer's clusters of keys (arXiv 2505.02922): scored by their centroid, read by their members, or estimated from
// their size and the sum of their values.
//
// Rows are clustered in segments, once: those of a prompt at its end in runs of `segment`, those of an answer whenever
// kGather rows wait. A segment's keys minus their mean are put in rows / cluster groups by spherical k-means from
// evenly spaced starts; a centroid is the mean of its members' keys. The first `skip_rows` rows and at least the last
// `keep_rows` stay outside and have to be attended.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv/index/index.h"

namespace longkv {

class ClusterIndex final : public BlockIndex {
 public:
  static constexpr int64_t kGather = 1024;
  static constexpr int kRounds = 10;

  ClusterIndex(const IndexSpec& spec, const KvShape& shape);

  void append(int kv_head, const KvHeadView& keys, int64_t begin, int64_t end) override;
  void finish_prompt(int kv_head, const KvHeadView& keys) override;
  void truncate(int kv_head, const KvHeadView& keys, int64_t rows) override;
  // Score of a cluster: q . centroid; -inf for one without members.
  void score(int kv_head, const float* q, int n_q, int64_t block_begin, int64_t block_end, float* scores,
             int64_t stride) const override;
  int64_t blocks(int kv_head) const override { return int64_t(heads_[size_t(kv_head)].starts.size()) - 1; }
  int64_t covered(int kv_head) const override { return heads_[size_t(kv_head)].end; }
  int64_t bytes_scored(int64_t n) const override { return n * dim_ * int64_t(sizeof(float)); }
  int64_t bytes_held() const override;
  void visit(KvState& state, std::span<const KvHeadView> heads) override;

  // Rows of a cluster, ascending.
  std::span<const int32_t> members(int kv_head, int64_t cluster) const {
    const Head& head = heads_[size_t(kv_head)];
    const int64_t first = head.starts[size_t(cluster)];
    return std::span(head.members).subspan(size_t(first), size_t(head.starts[size_t(cluster) + 1] - first));
  }
  // The partial of whole clusters for one query head, each key taken for its centroid: a cluster of n rows with values
  // of sum s counts n e^(scale q.c) in the denominator and s e^(scale q.c) in the numerator. out: [dim_v].
  void estimate(int kv_head, const float* q, float scale, std::span<const int64_t> clusters, float* out,
                float* lse) const;
  // Bytes that estimating one cluster reads.
  int64_t bytes_estimated() const { return (dim_ + dim_v_) * int64_t(sizeof(float)); }

 private:
  struct Segment {
    int64_t begin = 0, end = 0;  // rows
    int64_t first = 0;           // cluster
  };
  struct Head {
    int64_t rows = 0;
    int64_t end = 0;  // rows from here on are in no cluster
    std::vector<Segment> segments;
    std::vector<float> centroids;    // [clusters / 16][dim][16]
    std::vector<float> values;       // [clusters][dim_v], sums
    std::vector<int64_t> starts{0};  // [clusters + 1], into members
    std::vector<int32_t> members;
  };
  void cluster_rows(Head& head, const KvHeadView& keys, int64_t begin, int64_t end);
  bool valid(const Head& head) const;
  void put_centroid(Head& head, int64_t cluster, const float* centroid);

  int64_t dim_, dim_v_, cluster_, segment_, skip_rows_, keep_rows_;
  std::vector<Head> heads_;
};

}  // namespace longkv
