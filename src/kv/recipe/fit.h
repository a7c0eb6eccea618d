// What a recipe names and a model does not have.
#pragma once

#include <string>
#include <vector>

#include "kv/recipe.h"
#include "kv/types.h"

namespace longkv {

// A sentence for each layer, KV head or channel that the recipe's lists and numbers name beyond those of the model.
// Such parts have no effect, so somebody should be told.
std::vector<std::string> recipe_misfits(const Recipe& recipe, const KvShape& shape);

}  // namespace longkv
