// Mean of a block's keys. The sum runs in fp32 and is divided by the rows that the block has.
#include "kv/index/kinds.h"
#include "kv/index/vector_index.h"

namespace longkv {

namespace {

class MeanIndex final : public VectorIndex {
 public:
  MeanIndex(const IndexSpec& spec, const KvShape& shape) : VectorIndex(shape, spec.block, 1, ScanRule::kMaxDot) {}

 protected:
  void add_row(float* state, const float* row, int64_t r) const override {
    for (int64_t c = 0; c < dim_; ++c) state[c] = r == 0 ? row[c] : state[c] + row[c];
  }
  void encode(const float* state, int64_t count, f16_t* summary) const override {
    for (int64_t c = 0; c < dim_; ++c) summary[c] = to_f16(state[c] / float(count));
  }
};

}  // namespace

Result<std::unique_ptr<BlockIndex>> make_mean_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity) {
  return reserved(std::make_unique<MeanIndex>(spec, shape), capacity);
}

}  // namespace longkv
