// Summaries of a block by a centre and a width, scored q.centre + |q|.width. Unlike a box they are no bound, but one
// outlier does not stretch them.
//   meandev: mean and `deviation` times the standard deviation of each channel, by Welford's update.
//   cuboid:  middle of the box and the mean distance of the keys from it (ArkVale's cuboid-mean).
#include <algorithm>
#include <cmath>

#include "kv/index/kinds.h"
#include "kv/index/vector_index.h"

namespace longkv {

namespace {

class CentreIndex : public VectorIndex {
 protected:
  CentreIndex(const IndexSpec& spec, const KvShape& shape, int64_t state_vectors)
      : VectorIndex(shape, spec.block, 2, ScanRule::kCentre, state_vectors, spec.eight ? Form::kByte : Form::kHalf) {}

  void encode(const float* state, int64_t count, f16_t* summary) const override {
    thread_local std::vector<float> exact;
    exact.resize(size_t(2 * dim_));
    encode_exact(state, count, exact.data());
    for (int64_t c = 0; c < 2 * dim_; ++c) summary[c] = to_f16(exact[size_t(c)]);
  }
};

class MeanDevIndex final : public CentreIndex {
 public:
  MeanDevIndex(const IndexSpec& spec, const KvShape& shape)
      : CentreIndex(spec, shape, 2), weight_(float(spec.deviation)) {}

 protected:
  // State: mean, and the sum of squared distances from it.
  void add_row(float* state, const float* row, int64_t r) const override {
    const float inverse = 1.0f / float(r + 1);
    for (int64_t c = 0; c < dim_; ++c) {
      float& mean = state[c];
      float& spread = state[dim_ + c];
      if (r == 0) mean = row[c], spread = 0.0f;
      const float before = row[c] - mean;
      mean += before * inverse;
      spread += before * (row[c] - mean);
    }
  }
  void encode_exact(const float* state, int64_t count, float* summary) const override {
    for (int64_t c = 0; c < dim_; ++c) {
      summary[c] = state[c];
      summary[dim_ + c] = weight_ * std::sqrt(std::max(0.0f, state[dim_ + c]) / float(count));
    }
  }

 private:
  const float weight_;
};

class CuboidIndex final : public CentreIndex {
 public:
  CuboidIndex(const IndexSpec& spec, const KvShape& shape) : CentreIndex(spec, shape, spec.block) {}

 protected:
  // The middle moves until the block is full, so its rows are kept.
  void add_row(float* state, const float* row, int64_t r) const override {
    std::copy(row, row + dim_, state + r * dim_);
  }
  void encode_exact(const float* state, int64_t count, float* summary) const override {
    for (int64_t c = 0; c < dim_; ++c) {
      float hi = state[c], lo = state[c];
      for (int64_t r = 1; r < count; ++r) {
        hi = std::max(hi, state[r * dim_ + c]);
        lo = std::min(lo, state[r * dim_ + c]);
      }
      const float middle = 0.5f * (hi + lo);
      float distance = 0;
      for (int64_t r = 0; r < count; ++r) distance += std::abs(state[r * dim_ + c] - middle);
      summary[c] = middle;
      summary[dim_ + c] = distance / float(count);
    }
  }
};

}  // namespace

Result<std::unique_ptr<BlockIndex>> make_meandev_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity) {
  return reserved(std::make_unique<MeanDevIndex>(spec, shape), capacity);
}

Result<std::unique_ptr<BlockIndex>> make_cuboid_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity) {
  return reserved(std::make_unique<CuboidIndex>(spec, shape), capacity);
}

}  // namespace longkv
