#include "model/families/families.h"

namespace longkv {

// q, k and v lie in one tensor, gate and up in another. A sliding window, where given, holds in every layer.
Status configure_phi3(const Metadata& metadata, ModelConfig& config) {
  config.rope.pairs = RopePairs::kHalves;
  LONGKV_ASSIGN(const int64_t window, metadata.integer_or("phi3.attention.sliding_window", 0, int64_t(1) << 31, 0));
  if (window > 0 && window < config.context) config.window.assign(size_t(config.layers), window);
  return {};
}

}  // namespace longkv
