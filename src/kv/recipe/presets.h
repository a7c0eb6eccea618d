// Named recipes: what they stand for, and how overrides change them. Documented in docs/methods.md.
#pragma once

#include <vector>

#include "kv/recipe.h"
#include "kv/recipe/parts.h"
#include "kv/recipe/stage.h"
#include "longkv/status.h"

namespace longkv {

struct ResolvedPreset {
  Recipe recipe;
  std::vector<RecipeStage> stages;  // that it sets; the others are free for what it is joined with
};

// The preset named by the part with the part's overrides. Rules, each leaving a note in the recipe:
//  - a budget too small for the published local window scales the window in the published proportion, in whole blocks;
//  - the initial tokens of the ktransformers presets follow the block as published: one block, or 64 tokens for blocks
//    of 32 and less;
//  - preselected blocks cover as many tokens as published when the block changes.
Result<ResolvedPreset> resolve_preset(const RecipePart& part);

bool is_preset(std::string_view name);

}  // namespace longkv
