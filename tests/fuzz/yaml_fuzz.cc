// YAML recipes and KTransformers configurations: whatever the bytes, parsing returns and what it accepts is valid.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "kv/recipe.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace longkv;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const Result<Recipe> recipe = parse_recipe_yaml(text);
  if (recipe.ok()) {
    const Result<Recipe> back = parse_recipe(recipe->canonical());
    if (!back.ok() || !(*back == *recipe)) std::abort();
  }
  const Result<KTransformersConfig> config = parse_ktransformers_yaml(text);
  if (config.ok() && (!validate_recipe(config->recipe).ok() || config->max_seq_len < 1)) std::abort();
  return 0;
}
