#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>

#include "base/error.h"
#include "kv/recipe/parts.h"
#include "kv/recipe/presets.h"
#include "kv/recipe/stage.h"
#include "kv/recipe/words.h"

namespace longkv {

namespace {

// Who set a stage; empty text: nobody yet.
using StageOwners = std::array<RecipeWord, 8>;

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

Status check_params(const RecipePart& part) {
  for (size_t i = 0; i < part.params.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (part.params[i].key.text == part.params[j].key.text) {
        return fail(Code::kInvalidArgument, "{}: '{}' is given twice (first at {})", part.params[i].key.where,
                    part.params[i].key.text, part.params[j].key.where);
      }
    }
  }
  // The canonical form writes the one that does not count as 0.
  const auto amount = [&](std::string_view key) {
    return std::any_of(part.params.begin(), part.params.end(),
                       [&](const RecipeParam& p) { return p.key.text == key && p.value.text != "0"; });
  };
  if (amount("budget") && amount("keep_ratio")) {
    return fail(Code::kInvalidArgument, "{}: budget and keep_ratio both say how much is kept; give one",
                part.name.where);
  }
  return {};
}

// A share of nothing, given where no budget is, would leave the budget that the method has by default.
Status check_share(const RecipePart& part) {
  const auto zero = [](std::string_view text) {
    if (text.ends_with('%')) text.remove_suffix(1);
    double value = 1;
    return std::from_chars(text.data(), text.data() + text.size(), value).ec == std::errc() && value == 0;
  };
  const RecipeParam* share = nullptr;
  bool budget = false;
  for (const RecipeParam& p : part.params) {
    if (p.key.text == "keep_ratio" && zero(p.value.text)) share = &p;
    budget |= p.key.text == "budget" && !zero(p.value.text);
  }
  if (share == nullptr || budget) return {};
  return fail(Code::kInvalidArgument,
              "{}: keep_ratio={} keeps nothing; expected a share above 0, to 1 (10% is 0.1), or a budget of rows",
              share->value.where, share->value.text);
}

void copy_stage(const RecipeStageInfo& stage, const Recipe& from, Recipe& to) {
  const std::string choice = stage.get(from);
  stage.set(to, choice);
  for (const RecipeField& field : stage.fields) {
    if (find_field(stage, choice, field.key) == &field) field.set(to, field.get(from));
  }
}

Status apply_preset(const RecipePart& part, StageOwners& owners, Recipe& recipe) {
  // Someone who types `quest=...` or `index:...` mixed up the two forms.
  if (const RecipeStageInfo* stage = find_stage(part.name.text)) {
    return fail(Code::kInvalidArgument,
                "{}: '{}' is a stage, not a preset; write {}=CHOICE, where CHOICE is one of: {}", part.name.where,
                part.name.text, stage->name, join_words(stage->choices));
  }
  LONGKV_ASSIGN(const ResolvedPreset preset, resolve_preset(part));
  LONGKV_TRY(check_share(part));
  for (const RecipeStage stage : preset.stages) {
    LONGKV_TRY(claim(stage, part.name, owners));
    copy_stage(recipe_stage(stage), preset.recipe, recipe);
  }
  recipe.notes.insert(recipe.notes.end(), preset.recipe.notes.begin(), preset.recipe.notes.end());
  return {};
}

Status find_named_stage(const RecipePart& part, const RecipeStageInfo*& stage) {
  stage = find_stage(part.name.text);
  if (stage != nullptr) return {};
  if (is_preset(part.name.text)) {
    return fail(Code::kInvalidArgument, "{}: '{}' is a preset; its parameters follow a colon, as in {}:budget=2K",
                part.name.where, part.name.text, part.name.text);
  }
  std::vector<std::string> names;
  for (const RecipeStageInfo& s : recipe_stages()) names.emplace_back(s.name);
  return unknown_word("stage", part.name, names);
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

Status apply_stage(const RecipePart& part, Recipe& recipe) {
  const RecipeStageInfo* stage = nullptr;
  LONGKV_TRY(find_named_stage(part, stage));
  const std::string& choice = part.choice.text;
  if (choice.empty() && stage->stage != RecipeStage::kStore) {
    return fail(Code::kInvalidArgument, "{}: the stage '{}' needs a choice: {}={}(...); one of: {}", part.name.where,
                stage->name, stage->name, stage->choices.back(), join_words(stage->choices));
  }
  if (!choice.empty() && std::find(stage->choices.begin(), stage->choices.end(), choice) == stage->choices.end()) {
    return unknown_word(fmt::format("choice of {}", stage->name), part.choice, stage->choices);
  }
  stage->set(recipe, choice);
  for (const RecipeParam& param : part.params) {
    const RecipeField* field = find_field(*stage, choice, param.key.text);
    if (field != nullptr) {
      LONGKV_TRY(set_field(*field, param, recipe));
      continue;
    }
    const std::vector<std::string> keys = field_keys(*stage, choice);
    const std::string what = choice.empty() ? stage->name : fmt::format("{}={}", stage->name, choice);
    if (keys.empty()) {
      return fail(Code::kInvalidArgument, "{}: {} takes no parameters, found '{}'", param.key.where, what,
                  param.key.text);
    }
    return unknown_word(fmt::format("parameter of {}", what), param.key, keys);
  }
  return {};
}

Result<Recipe> build_recipe(const std::vector<RecipePart>& parts) {
  if (parts.empty()) {
    return fail(Code::kInvalidArgument, "the recipe is empty; name a preset ({}) or a stage, as in select=all",
                join_words(recipe_presets()));
  }
  Recipe recipe;
  StageOwners owners;
  for (const RecipePart& part : parts) {
    LONGKV_TRY(check_params(part));
    if (part.preset) {
      LONGKV_TRY(apply_preset(part, owners, recipe));
      continue;
    }
    const RecipeStageInfo* stage = nullptr;
    LONGKV_TRY(find_named_stage(part, stage));
    LONGKV_TRY(claim(stage->stage, part.name, owners));
    LONGKV_TRY(apply_stage(part, recipe));
    LONGKV_TRY(check_share(part));
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
