// Attention weights of a decoded token over the rows of its heads, for methods that evict while decoding.
#pragma once

#include <vector>

#include "kv/keep/keep.h"

namespace longkv {

class StepWeights {
 public:
  // weights[query head of the KV head][rows] of one KV head: exp(score - lse). Valid until the next call.
  const std::vector<float>& of(const KeepStepInput& input, int kv_head, const KvHeadView& head, int group_size);

 private:
  std::vector<float> weights_;
};

}  // namespace longkv
