// Evenly spaced keys of a block, kept apart; the base of `dynamic`, which uses them where it knows nothing better.
#pragma once

#include "kv/index/vector_index.h"

namespace longkv {

// Representative i is row floor(i * block / reps) of its block; in an open block that does not have the row yet it
// repeats row 0, which changes no maximum.
class FixedIndex : public VectorIndex {
 public:
  FixedIndex(const IndexSpec& spec, const KvShape& shape)
      : VectorIndex(shape, spec.block, spec.reps, ScanRule::kMaxDot) {}

 protected:
  void add_row(float* state, const float* row, int64_t r) const override;
  void encode(const float* state, int64_t count, f16_t* summary) const override;
};

}  // namespace longkv
