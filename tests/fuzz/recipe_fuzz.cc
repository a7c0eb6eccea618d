// Recipe strings: whatever the bytes, parsing returns; what it accepts is valid and its canonical string parses back
// equal.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "kv/recipe.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace longkv;
  const Result<Recipe> recipe = parse_recipe({reinterpret_cast<const char*>(data), size});
  if (!recipe.ok()) {
    if (recipe.status().message().empty()) std::abort();
    return 0;
  }
  if (!validate_recipe(*recipe).ok()) std::abort();
  const Result<Recipe> back = parse_recipe(recipe->canonical());
  if (!back.ok() || !(*back == *recipe)) std::abort();
  return 0;
}
