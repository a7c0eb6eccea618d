#include <cmath>

#include "model/families/families.h"
#include "model/settings.h"

namespace longkv {

// Five sliding-window layers, then one full one; the window layers rotate with their own base and never scale.
// Norm weights carry their +1 in the file.
Status configure_gemma3(const Metadata& metadata, ModelConfig& config) {
  config.rope.pairs = RopePairs::kHalves;
  config.activation = Activation::kGeluTanh;
  // The reference rounds the factor to bfloat16 with the weights; in fp32 it is exact.
  config.embedding_scale = float(std::sqrt(double(config.dim)));

  LONGKV_ASSIGN(const int64_t window, metadata.integer_or("gemma3.attention.sliding_window", 0, int64_t(1) << 31, 0));
  if (window > 0) {
    LONGKV_ASSIGN(const int64_t pattern,
                  metadata.integer_or("gemma3.attention.sliding_window_pattern", 1, int64_t(1) << 20, 6));
    config.window.assign(size_t(config.layers), window);
    for (int64_t layer = pattern - 1; layer < config.layers; layer += pattern) config.window[size_t(layer)] = 0;
    RopeConfig local;
    local.pairs = config.rope.pairs;
    local.dim = config.rope.dim;
    LONGKV_ASSIGN(local.base, real_within(metadata, "gemma3.rope.freq_base_swa", kMinRopeBase, kMaxRopeBase, 10000.0));
    config.rope_window = local;
  }
  // The 27B model scales by its width per head instead of the head dimension.
  if (config.layers == 62) config.attn_scale = 1.0f / std::sqrt(float(config.dim) / float(config.heads));
  return {};
}

}  // namespace longkv
