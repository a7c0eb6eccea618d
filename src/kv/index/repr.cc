// InfLLM's representatives (arXiv 2402.04617): per query head the mean of the `reps` keys of a block that received most
// attention mass from that head. Blocks without mass, such as those filled while decoding, have the mean of `reps`
// evenly spaced keys for all heads.
#include <algorithm>
#include <numeric>

#include "kv/codec/codec.h"
#include "kv/index/kinds.h"
#include "kv/index/vector_index.h"

namespace longkv {

namespace {

class ReprIndex final : public VectorIndex {
 public:
  ReprIndex(const IndexSpec& spec, const KvShape& shape)
      : VectorIndex(shape, spec.block, shape.group_size, ScanRule::kOwn, 1),
        group_(shape.group_size),
        reps_(spec.reps) {}

  void set_importance(int kv_head, const KvHeadView& keys, const float* mass, int64_t stride, int64_t n) override {
    std::vector<f16_t> summary(static_cast<size_t>(group_ * dim_));
    std::vector<int64_t> order(static_cast<size_t>(block_));
    std::vector<float> key(static_cast<size_t>(dim_)), sum(static_cast<size_t>(dim_));
    for (int64_t b = 0; (b + 1) * block_ <= std::min(n, rows(kv_head)); ++b) {
      for (int j = 0; j < group_; ++j) {
        const float* own = mass + j * stride + b * block_;
        const auto weight = [&](int64_t r) { return own[r] > 0 ? own[r] : 0.0f; };  // NaN counts as nothing
        std::iota(order.begin(), order.end(), int64_t{0});
        std::partial_sort(order.begin(), order.begin() + reps_, order.end(),
                          [&](int64_t x, int64_t y) { return weight(x) != weight(y) ? weight(x) > weight(y) : x < y; });
        std::fill(sum.begin(), sum.end(), 0.0f);
        std::sort(order.begin(), order.begin() + reps_);
        for (int64_t i = 0; i < reps_; ++i) {
          const int64_t row = b * block_ + order[size_t(i)];
          decode_k_rows(keys, row, row + 1, key.data());
          for (int64_t c = 0; c < dim_; ++c) sum[size_t(c)] += key[size_t(c)];
        }
        for (int64_t c = 0; c < dim_; ++c) summary[size_t(j * dim_ + c)] = to_f16(sum[size_t(c)] / float(reps_));
      }
      write_summary(kv_head, b, summary.data());
    }
  }

 protected:
  // State: the sum of the evenly spaced keys so far.
  void add_row(float* state, const float* row, int64_t r) const override {
    if (r == 0) std::fill(state, state + dim_, 0.0f);
    for (int64_t i = 0; i < reps_; ++i) {
      if (i * block_ / reps_ != r) continue;
      for (int64_t c = 0; c < dim_; ++c) state[c] += row[c];
    }
  }
  void encode(const float* state, int64_t count, f16_t* summary) const override {
    int64_t taken = 0;
    for (int64_t i = 0; i < reps_; ++i) taken += i * block_ / reps_ < count ? 1 : 0;
    for (int64_t j = 0; j < group_; ++j) {
      for (int64_t c = 0; c < dim_; ++c) summary[j * dim_ + c] = to_f16(state[c] / float(taken));
    }
  }

 private:
  const int group_;
  const int64_t reps_;
};

}  // namespace

Result<std::unique_ptr<BlockIndex>> make_repr_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity) {
  return reserved(std::make_unique<ReprIndex>(spec, shape), capacity);
}

}  // namespace longkv
