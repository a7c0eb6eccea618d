// A recipe as written, in text or YAML, before it means anything: presets and stages with their parameters.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kv/recipe.h"
#include "longkv/status.h"

namespace longkv {

constexpr size_t kMaxRecipeText = 4096;
constexpr size_t kMaxRecipeParts = 16;
constexpr size_t kMaxRecipeParams = 32;  // of one part

// A word and where it stands: "position 7", "line 3, column 9".
struct RecipeWord {
  std::string text;
  std::string where;
};

struct RecipeParam {
  RecipeWord key;
  RecipeWord value;
};

// `preset:key=value,...` or `stage=choice(key=value,...)`. For a preset `choice` is empty; `store(k=..,v=..)` has an
// empty choice too.
struct RecipePart {
  bool preset = false;
  RecipeWord name;
  RecipeWord choice;
  std::vector<RecipeParam> params;
};

// Characters of values that need no quotes.
bool is_recipe_value_char(char c);

Result<std::vector<RecipePart>> split_recipe_text(std::string_view text);

// Sets a stage's choice and parameters as a part of the form stage=choice(...) says.
Status apply_stage(const RecipePart& part, Recipe& recipe);

// Gives the parts their meaning and validates the result.
Result<Recipe> build_recipe(const std::vector<RecipePart>& parts);

}  // namespace longkv
