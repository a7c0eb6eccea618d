#include "model/families/families.h"

namespace longkv {

std::span<const Family> families() {
  static constexpr Family kFamilies[] = {
      {"llama", configure_llama}, {"internlm2", configure_llama}, {"qwen2", configure_qwen},
      {"qwen3", configure_qwen},  {"gemma3", configure_gemma3},   {"phi3", configure_phi3},
  };
  return kFamilies;
}

std::span<const std::string_view> tensors_needed(std::string_view family) {
  static constexpr std::string_view kBiases[] = {"attn_q.bias", "attn_k.bias", "attn_v.bias"};
  static constexpr std::string_view kHeadNorms[] = {"attn_q_norm.weight", "attn_k_norm.weight"};
  static constexpr std::string_view kGemma[] = {"attn_q_norm.weight", "attn_k_norm.weight",
                                                "post_attention_norm.weight", "post_ffw_norm.weight"};
  if (family == "qwen2") return kBiases;
  if (family == "qwen3") return kHeadNorms;
  if (family == "gemma3") return kGemma;
  return {};
}

}  // namespace longkv
