#include <algorithm>
#include <array>

#include "base/error.h"
#include "kv/recipe_fields.h"
#include "kv/recipe_parts.h"
#include "kv/recipe_presets.h"
#include "kv/recipe_words.h"

namespace longkv {

namespace {

// Who set a stage; empty text: nobody yet.
using StageOwners = std::array<RecipeWord, 7>;

Status claim(RecipeStage stage, const RecipeWord& by, StageOwners& owners) {
  RecipeWord& owner = owners[size_t(stage)];
  if (!owner.text.empty()) {
    return fail(Code::kInvalidArgument,
                "{}: '{}' sets the stage '{}', which '{}' ({}) has set; change a preset's values in place "
                "(quest:budget=2K), or leave one of the two out",
                by.where, by.text, recipe_stage(stage).name, owner.text, owner.where);
  }
  owner = by;
  return {};
}

Status check_duplicates(const RecipePart& part) {
  for (size_t i = 0; i < part.params.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (part.params[i].key.text == part.params[j].key.text) {
        return fail(Code::kInvalidArgument, "{}: '{}' is given twice (first at {})", part.params[i].key.where,
                    part.params[i].key.text, part.params[j].key.where);
      }
    }
  }
  return {};
}

Status apply_preset(const RecipePart& part, StageOwners& owners, Recipe& recipe) {
  // Someone who types `quest=...` or `index:...` mixed up the two forms.
  for (const RecipeStageInfo& info : recipe_stages()) {
    if (part.name.text == info.name) {
      return fail(Code::kInvalidArgument,
                  "{}: '{}' is a stage, not a preset; write {}=CHOICE, where CHOICE is one of: {}", part.name.where,
                  part.name.text, info.name, join_words(info.choices));
    }
  }
  LONGKV_ASSIGN(Recipe preset, resolve_preset(part));
  for (RecipeStage stage : {RecipeStage::kKeep, RecipeStage::kIndex, RecipeStage::kSelect}) {
    LONGKV_TRY(claim(stage, part.name, owners));
  }
  const bool stores = std::any_of(part.params.begin(), part.params.end(), [](const RecipeParam& p) {
    return p.key.text == "store" || p.key.text == "k" || p.key.text == "v";
  });
  if (stores) {
    LONGKV_TRY(claim(RecipeStage::kStore, part.name, owners));
    recipe.store = preset.store;
  }
  recipe.keep = preset.keep;
  recipe.index = preset.index;
  recipe.select = preset.select;
  recipe.notes = preset.notes;
  return {};
}

Status apply_stage(const RecipePart& part, StageOwners& owners, Recipe& recipe) {
  const RecipeStageInfo* info = nullptr;
  std::vector<std::string> names;
  for (const RecipeStageInfo& s : recipe_stages()) {
    names.push_back(s.name);
    if (part.name.text == s.name) info = &s;
  }
  if (info == nullptr) {
    if (find_preset(part.name.text) != nullptr) {
      return fail(Code::kInvalidArgument, "{}: '{}' is a preset; its parameters follow a colon, as in {}:budget=2K",
                  part.name.where, part.name.text, part.name.text);
    }
    return unknown_word("stage", part.name, names);
  }
  const std::string& choice = part.choice.text;
  const bool choice_optional = info->stage == RecipeStage::kStore;
  if (choice.empty() && !choice_optional) {
    return fail(Code::kInvalidArgument, "{}: the stage '{}' needs a choice: {}={}(...); one of: {}", part.name.where,
                info->name, info->name, info->choices.back(), join_words(info->choices));
  }
  if (!choice.empty() && std::find(info->choices.begin(), info->choices.end(), choice) == info->choices.end()) {
    return unknown_word(fmt::format("choice of {}", info->name), part.choice, info->choices);
  }
  LONGKV_TRY(claim(info->stage, part.name, owners));
  set_stage_choice(info->stage, choice, recipe);
  for (const RecipeParam& param : part.params) {
    const RecipeField* field = find_field(info->stage, choice, param.key.text);
    if (field != nullptr) {
      LONGKV_TRY(set_field(*field, param, recipe));
      continue;
    }
    const std::vector<std::string> keys = field_keys(info->stage, choice);
    const std::string what = choice.empty() ? info->name : fmt::format("{}={}", info->name, choice);
    if (keys.empty()) {
      return fail(Code::kInvalidArgument, "{}: {} takes no parameters, found '{}'", param.key.where, what,
                  param.key.text);
    }
    return unknown_word(fmt::format("parameter of {}", what), param.key, keys);
  }
  return {};
}

// A label for tables: the preset and its overrides as typed, and what was joined to it.
std::string label(const std::vector<RecipePart>& parts) {
  const bool named = std::any_of(parts.begin(), parts.end(), [](const RecipePart& p) { return p.preset; });
  if (!named) return "custom";
  std::string out;
  for (const RecipePart& part : parts) {
    out += (out.empty() ? "" : "+") + part.name.text;
    if (!part.choice.text.empty()) out += "=" + part.choice.text;
    std::string params;
    for (const RecipeParam& p : part.params) params += (params.empty() ? "" : ",") + p.key.text + "=" + p.value.text;
    if (!params.empty()) out += part.preset ? ":" + params : "(" + params + ")";
  }
  return out;
}

}  // namespace

Result<Recipe> build_recipe(const std::vector<RecipePart>& parts) {
  if (parts.empty()) {
    return fail(Code::kInvalidArgument, "the recipe is empty; name a preset ({}) or a stage, as in select=all",
                join_words(recipe_presets()));
  }
  Recipe recipe;
  StageOwners owners;
  for (const RecipePart& part : parts) {
    LONGKV_TRY(check_duplicates(part));
    LONGKV_TRY(part.preset ? apply_preset(part, owners, recipe) : apply_stage(part, owners, recipe));
  }
  recipe.name = label(parts);
  LONGKV_TRY(validate_recipe(recipe));
  return recipe;
}

Result<Recipe> parse_recipe(std::string_view text) {
  LONGKV_ASSIGN(const std::vector<RecipePart> parts, split_recipe_text(text));
  return build_recipe(parts);
}

}  // namespace longkv
