// Quest's box: per-channel maximum (slot 0) and minimum (slot 1). The score, sum over channels of
// max(q * upper, q * lower), bounds q.k of every key in the block from above; halves are rounded outwards so that it
// stays a bound for keys stored more finely. summary=q8: middle and half side in 8 bits with a scale per block, the
// side grown by what rounding took.
#include <algorithm>

#include "kv/index/kinds.h"
#include "kv/index/vector_index.h"

namespace longkv {

namespace {

class MinMaxIndex final : public VectorIndex {
 public:
  MinMaxIndex(const IndexSpec& spec, const KvShape& shape)
      : VectorIndex(shape, spec.block, 2, spec.eight ? ScanRule::kCentre : ScanRule::kBox, 2,
                    spec.eight ? Form::kByteBound : Form::kHalf) {}

 protected:
  void add_row(float* state, const float* row, int64_t r) const override {
    float* upper = state;
    float* lower = state + dim_;
    for (int64_t c = 0; c < dim_; ++c) upper[c] = r == 0 ? row[c] : std::max(upper[c], row[c]);
    for (int64_t c = 0; c < dim_; ++c) lower[c] = r == 0 ? row[c] : std::min(lower[c], row[c]);
  }
  void encode(const float* state, int64_t, f16_t* summary) const override {
    for (int64_t c = 0; c < dim_; ++c) summary[c] = f16_at_least(state[c]);
    for (int64_t c = dim_; c < 2 * dim_; ++c) summary[c] = f16_at_most(state[c]);
  }
  // Middle and half of the side: q.middle + |q|.half is the same bound.
  void encode_exact(const float* state, int64_t, float* summary) const override {
    for (int64_t c = 0; c < dim_; ++c) {
      const float middle = 0.5f * (state[c] + state[dim_ + c]);
      summary[c] = middle;
      summary[dim_ + c] = std::max(state[c] - middle, middle - state[dim_ + c]);
    }
  }
};

}  // namespace

Result<std::unique_ptr<BlockIndex>> make_minmax_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity) {
  return reserved(std::make_unique<MinMaxIndex>(spec, shape), capacity);
}

}  // namespace longkv
