#include "model/families/families.h"

namespace longkv {

std::span<const Family> families() {
  static constexpr Family kFamilies[] = {
      {"llama", configure_llama}, {"internlm2", configure_llama}, {"qwen2", configure_qwen},
      {"qwen3", configure_qwen},  {"gemma3", configure_gemma3},   {"phi3", configure_phi3},
  };
  return kFamilies;
}

}  // namespace longkv
