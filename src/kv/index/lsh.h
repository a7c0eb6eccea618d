// MagicPIG's hash tables (arXiv 2410.16179): rows that share a code with the query in at least two of L tables are
// drawn, and weighted by one over the chance of that.
//
// A code is K signs of random projections of the centred key. Full segments of kSegment rows have their rows sorted by
// code, per table; rows of the open segment are found by comparing codes. What is drawn is the same either way.
#pragma once

#include <cstdint>
#include <vector>

#include "kv/index/index.h"

namespace longkv {

class LshIndex final : public BlockIndex {
 public:
  static constexpr int64_t kSegment = 8192;

  LshIndex(const IndexSpec& spec, const KvShape& shape);

  // Rows are hashed once the first prompt is complete: its mean key is what keys are centred by from then on.
  void append(int kv_head, const KvHeadView& keys, int64_t begin, int64_t end) override;
  void finish_prompt(int kv_head, const KvHeadView& keys) override;
  void truncate(int kv_head, const KvHeadView& keys, int64_t rows) override;
  // Score of a row: the tables in which it shares the query's code.
  void score(int kv_head, const float* q, int n_q, int64_t block_begin, int64_t block_end, float* scores,
             int64_t stride) const override;
  int64_t blocks(int kv_head) const override { return heads_[size_t(kv_head)].rows; }
  int64_t covered(int kv_head) const override { return heads_[size_t(kv_head)].hashed; }
  int64_t bytes_scored(int64_t n) const override { return n * tables_ * int64_t(sizeof(uint16_t)); }
  int64_t bytes_held() const override;
  void visit(KvState& state, std::span<const KvHeadView> heads) override;

  // Rows of `rows` drawn for one query head, ascending, and minus the log of the chance of each. `view`: their keys.
  void draw(int kv_head, const KvHeadView& view, const float* q, RowRange rows, std::vector<int64_t>& drawn,
            std::vector<float>& log_weight) const;
  // Bytes of tables that one draw over n rows reads, if codes are spread evenly.
  int64_t bytes_drawn(int64_t n) const;

  // The chance that a key at cosine c to the query shares its code in two tables or more.
  double inclusion(double c) const;

 private:
  struct Segment {
    std::vector<uint16_t> starts;  // [tables][2^K + 1], into the table's rows
    std::vector<uint16_t> rows;    // [tables][kSegment], within the segment, sorted by code
  };
  struct Head {
    int64_t rows = 0;      // noted
    int64_t hashed = 0;    // with codes
    bool centred = false;  // the mean is known
    std::vector<float> mean;
    std::vector<Segment> segments;
    std::vector<uint16_t> open;  // [tables][kSegment], codes of the open segment's rows
  };
  void hash_rows(Head& head, const KvHeadView& keys, int64_t end);
  void close_segment(Head& head);
  bool valid(const Segment& segment) const;
  void codes_of(const float* x, int64_t n, uint16_t* codes, int64_t stride) const;
  template <class Hit>
  void each_collision(const Head& head, const uint16_t* codes, RowRange rows, const Hit& hit) const;

  int64_t dim_;
  int bits_;
  int64_t tables_;
  int64_t columns_;                   // bits * tables, whole tiles
  std::vector<float> projections_;    // [columns / 16][dim][16]
  std::vector<float> log_inclusion_;  // over cosines
  std::vector<Head> heads_;
};

}  // namespace longkv
