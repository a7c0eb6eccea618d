// What differs between model families. A family reads its own metadata keys into the common configuration; the names
// of its tensors are resolved in model/weights.cc by presence, so most families need nothing there.
#pragma once

#include <span>
#include <string_view>

#include "gguf/metadata.h"
#include "longkv/status.h"
#include "model/config.h"

namespace longkv {

struct Family {
  std::string_view name;  // value of general.architecture
  // Called with the common fields already filled in. `metadata` keys are prefixed with the family's name.
  Status (*configure)(const Metadata& metadata, ModelConfig& config);
  // Keys that configure() reads, without the family's name; those of rope.* aside.
  std::span<const std::string_view> keys = {};
  // Tensors of a layer that others may lack and every model of this family has: without them it would compute nonsense.
  std::span<const std::string_view> tensors = {};
};

std::span<const Family> families();
const Family* find_family(std::string_view name);  // nullptr: not known

Status configure_llama(const Metadata& metadata, ModelConfig& config);  // also internlm2
Status configure_qwen(const Metadata& metadata, ModelConfig& config);   // qwen2, qwen3
Status configure_gemma3(const Metadata& metadata, ModelConfig& config);
Status configure_phi3(const Metadata& metadata, ModelConfig& config);

}  // namespace longkv
