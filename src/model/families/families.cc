#include "model/families/families.h"

namespace longkv {

std::span<const Family> families() {
  static constexpr std::string_view kWindow[] = {"attention.sliding_window"};
  static constexpr std::string_view kWindows[] = {"attention.sliding_window", "attention.sliding_window_pattern"};
  static constexpr std::string_view kBiases[] = {"attn_q.bias", "attn_k.bias", "attn_v.bias"};
  static constexpr std::string_view kHeadNorms[] = {"attn_q_norm.weight", "attn_k_norm.weight"};
  static constexpr std::string_view kGemmaNorms[] = {"attn_q_norm.weight", "attn_k_norm.weight",
                                                     "post_attention_norm.weight", "post_ffw_norm.weight"};
  static constexpr Family kFamilies[] = {
      {"llama", configure_llama},
      {"internlm2", configure_llama},
      {"qwen2", configure_qwen, {}, kBiases},
      {"qwen3", configure_qwen, {}, kHeadNorms},
      {"gemma3", configure_gemma3, kWindows, kGemmaNorms},
      {"phi3", configure_phi3, kWindow},
  };
  return kFamilies;
}

const Family* find_family(std::string_view name) {
  for (const Family& family : families()) {
    if (family.name == name) return &family;
  }
  return nullptr;
}

}  // namespace longkv
