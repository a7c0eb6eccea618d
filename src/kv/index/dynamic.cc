// The keys of a block that received most attention mass from the last queries of the prompt, kept apart.
//
// Mass is added over the query heads of the group: one set of representatives per KV head. Only blocks that are
// complete when the mass is known use it. Blocks that decoding fills have received no such mass; they keep the evenly
// spaced keys of `fixed` until the next prompt.
#include <algorithm>
#include <numeric>

#include "kv/codec/codec.h"
#include "kv/index/fixed.h"
#include "kv/index/kinds.h"

namespace longkv {

namespace {

class DynamicIndex final : public FixedIndex {
 public:
  DynamicIndex(const IndexSpec& spec, const KvShape& shape) : FixedIndex(spec, shape), group_(shape.group_size) {}

  void set_importance(int kv_head, const KvHeadView& keys, const float* mass, int64_t stride, int64_t rows) override {
    const int64_t blocks = std::min(rows, this->rows(kv_head)) / block_;
    std::vector<float> total(static_cast<size_t>(block_));
    std::vector<int64_t> order(static_cast<size_t>(block_));
    std::vector<float> key(static_cast<size_t>(dim_));
    std::vector<f16_t> summary(static_cast<size_t>(slots_ * dim_));
    for (int64_t b = 0; b < blocks; ++b) {
      for (int64_t r = 0; r < block_; ++r) {
        float sum = 0;
        for (int j = 0; j < group_; ++j) {
          const float m = mass[j * stride + b * block_ + r];
          if (m > 0) sum += m;  // NaN counts as nothing
        }
        total[size_t(r)] = sum;
      }
      std::iota(order.begin(), order.end(), int64_t{0});
      std::partial_sort(order.begin(), order.begin() + slots_, order.end(), [&](int64_t x, int64_t y) {
        return total[size_t(x)] != total[size_t(y)] ? total[size_t(x)] > total[size_t(y)] : x < y;
      });
      for (int64_t i = 0; i < slots_; ++i) {
        const int64_t row = b * block_ + order[size_t(i)];
        decode_k_rows(keys, row, row + 1, key.data());
        for (int64_t c = 0; c < dim_; ++c) summary[size_t(i * dim_ + c)] = to_f16(key[size_t(c)]);
      }
      write_summary(kv_head, b, summary.data());
    }
  }

 private:
  const int group_;
};

}  // namespace

Result<std::unique_ptr<BlockIndex>> make_dynamic_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity) {
  return reserved(std::make_unique<DynamicIndex>(spec, shape), capacity);
}

}  // namespace longkv
