// Per-channel maximum of a block's keys, taken over the keys alone: a channel that is negative in all rows stays so.
#include <algorithm>

#include "kv/index/kinds.h"
#include "kv/index/vector_index.h"

namespace longkv {

namespace {

class MaxIndex final : public VectorIndex {
 public:
  MaxIndex(const IndexSpec& spec, const KvShape& shape) : VectorIndex(shape, spec.block, 1, ScanRule::kMaxDot) {}

 protected:
  void add_row(float* state, const float* row, int64_t r) const override {
    for (int64_t c = 0; c < dim_; ++c) state[c] = r == 0 ? row[c] : std::max(state[c], row[c]);
  }
  void encode(const float* state, int64_t, f16_t* summary) const override {
    for (int64_t c = 0; c < dim_; ++c) summary[c] = to_f16(state[c]);
  }
};

}  // namespace

Result<std::unique_ptr<BlockIndex>> make_max_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity) {
  return reserved(std::make_unique<MaxIndex>(spec, shape), capacity);
}

}  // namespace longkv
