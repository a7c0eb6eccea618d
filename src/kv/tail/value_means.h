// The mean of all V rows of a head, kept as rows come and go.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv/state.h"
#include "kv/types.h"

namespace longkv {

// Sums run in double in ascending order of rows, with a copy every kStride rows from which cutting goes on: a mean
// after any history equals one made at once, bit for bit.
class ValueMeans {
 public:
  explicit ValueMeans(const KvShape& shape);
  // Rows [begin, end) of a head, in ascending order without gaps.
  void append(int kv_head, const KvHeadView& view, int64_t begin, int64_t end);
  void truncate(int kv_head, const KvHeadView& view, int64_t rows);
  // out: [dim_v]; zero without rows.
  void mean(int kv_head, float* out) const;
  int64_t bytes_held() const;
  void visit(KvState& state, std::span<const KvHeadView> heads);
  static constexpr int64_t kStride = 1024;

 private:
  struct Head {
    int64_t rows = 0;
    std::vector<double> sum;     // [dim_v]
    std::vector<double> stored;  // [rows / kStride][dim_v], sums of the rows before
    std::vector<float> values;   // scratch: decoded rows
  };
  int64_t dim_;
  std::vector<Head> heads_;
};

}  // namespace longkv
