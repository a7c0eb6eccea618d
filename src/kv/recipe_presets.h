// Named recipes with the values that their papers publish, and how overrides change them. Documented in
// docs/recipes.md.
#pragma once

#include <string>
#include <vector>

#include "kv/recipe.h"
#include "kv/recipe_parts.h"
#include "longkv/status.h"

namespace longkv {

const Recipe* find_preset(const std::string& name);

// The preset named by the part with the part's overrides. Rules, each leaving a note in the recipe:
//  - a budget too small for the published local window scales the window in the published proportion, in whole blocks;
//  - the initial tokens of the ktransformers presets follow the block as published: one block, or 64 tokens for blocks
//    of 32 and less;
//  - preselected blocks cover as many tokens as published when the block changes.
Result<Recipe> resolve_preset(const RecipePart& part);

}  // namespace longkv
