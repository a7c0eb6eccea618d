#include "model/identity.h"

#include <fmt/format.h>

namespace longkv {

std::string model_identity(const ModelConfig& c) {
  const RopeConfig& r = c.rope;
  return fmt::format("{}; {} {} layers, {} heads, {} KV heads, {} and {} channels, rope {} of base {} scaling {} by {}",
                     c.name, c.family, c.layers, c.heads, c.kv_heads, c.head_dim_k, c.head_dim_v, r.dim, r.base,
                     int(r.scaling), r.factor);
}

}  // namespace longkv
