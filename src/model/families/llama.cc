#include "model/families/families.h"

namespace longkv {

Status configure_llama(const Metadata&, ModelConfig& config) {
  config.rope.pairs = RopePairs::kAdjacent;
  return {};
}

}  // namespace longkv
