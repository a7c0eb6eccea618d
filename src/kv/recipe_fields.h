// The parameters of recipes in one table: their names, ranges, words and places in Recipe. Parsing, printing and help
// all read it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kv/recipe.h"
#include "kv/recipe_parts.h"
#include "longkv/status.h"

namespace longkv {

enum class RecipeStage { kPrefill, kKeep, kStore, kIndex, kSelect, kTail, kPlace };

struct RecipeStageInfo {
  RecipeStage stage;
  const char* name;
  std::vector<std::string> choices;
};
std::span<const RecipeStageInfo> recipe_stages();
const RecipeStageInfo& recipe_stage(RecipeStage stage);

struct RecipeField {
  RecipeStage stage;
  const char* key;
  // The choices of the stage that have this parameter, each between blanks: " fixed dynamic ".
  const char* choices;
  int64_t min;  // of numbers
  int64_t max;
  const char* words;  // of enumerations, blank separated, in the order of their values; nullptr: a number
  bool always;        // printed even when it has its neutral value
  int64_t (*get)(const Recipe&);
  void (*set)(Recipe&, int64_t);
};
std::span<const RecipeField> recipe_fields();

// Keys of a stage with this choice.
std::vector<std::string> field_keys(RecipeStage stage, std::string_view choice);
const RecipeField* find_field(RecipeStage stage, std::string_view choice, std::string_view key);

// A value as it is written.
std::string field_value(const RecipeField& field, int64_t value);

// Parses a parameter's value and stores it.
Status set_field(const RecipeField& field, const RecipeParam& param, Recipe& recipe);

// The choice that a recipe has in a stage, and setting it; the stage's parameters become neutral.
std::string stage_choice(const Recipe& recipe, RecipeStage stage);
void set_stage_choice(RecipeStage stage, std::string_view choice, Recipe& recipe);

std::optional<IndexKind> parse_index_kind(std::string_view name);

}  // namespace longkv
