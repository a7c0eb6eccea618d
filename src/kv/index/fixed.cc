#include "kv/index/fixed.h"

#include <algorithm>

#include "kv/index/kinds.h"

namespace longkv {

void FixedIndex::add_row(float* state, const float* row, int64_t r) const {
  for (int64_t i = 0; i < slots_; ++i) {
    if (r == 0 || i * block_ / slots_ == r) std::copy(row, row + dim_, state + i * dim_);
  }
}

void FixedIndex::encode(const float* state, int64_t, f16_t* summary) const {
  for (int64_t i = 0; i < slots_ * dim_; ++i) summary[i] = to_f16(state[i]);
}

Result<std::unique_ptr<BlockIndex>> make_fixed_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity) {
  return reserved(std::make_unique<FixedIndex>(spec, shape), capacity);
}

}  // namespace longkv
