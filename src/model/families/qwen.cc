#include "model/families/families.h"

namespace longkv {

// qwen2 adds biases to q, k and v; qwen3 normalises each head of q and k. Both are found by their tensors.
Status configure_qwen(const Metadata&, ModelConfig& config) {
  config.rope.pairs = RopePairs::kHalves;
  return {};
}

}  // namespace longkv
