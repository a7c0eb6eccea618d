#include "kv/recipe/presets.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "kv/recipe/words.h"

namespace longkv {

namespace {

const RecipePreset* find_preset(std::string_view name) {
  for (const RecipeStageInfo& stage : recipe_stages()) {
    for (const RecipePreset& preset : stage.presets) {
      if (name == preset.name) return &preset;
    }
  }
  return nullptr;
}

// What a preset's own text says.
Result<ResolvedPreset> expand(const RecipePreset& preset) {
  ResolvedPreset out;
  LONGKV_ASSIGN(const std::vector<RecipePart> parts, split_recipe_text(preset.text));
  for (const RecipePart& part : parts) {
    LONGKV_TRY(apply_stage(part, out.recipe));
    out.stages.push_back(find_stage(part.name.text)->stage);
  }
  out.recipe.name = preset.name;
  return out;
}

bool sets(const ResolvedPreset& preset, RecipeStage stage) {
  return std::find(preset.stages.begin(), preset.stages.end(), stage) != preset.stages.end();
}

bool overrides(const RecipePart& part, std::string_view key) {
  return std::any_of(part.params.begin(), part.params.end(), [&](const auto& p) { return p.key.text == key; });
}

// A stage whose choice an override may change by its name: quest:index=bits, quest:store=q8_0.
const RecipeStageInfo* chosen_stage(const ResolvedPreset& preset, std::string_view key) {
  const RecipeStageInfo* stage = find_stage(key);
  if (stage == nullptr || stage->choices.size() < 2) return nullptr;
  if (stage->stage == RecipeStage::kMask) return nullptr;  // leank:mask=FILE is the parameter of that name
  return stage->stage == RecipeStage::kStore || sets(preset, stage->stage) ? stage : nullptr;
}

std::vector<std::string> preset_keys(const ResolvedPreset& preset) {
  std::vector<std::string> keys{"store"};
  for (const RecipeStage s : preset.stages) {
    const RecipeStageInfo& stage = recipe_stage(s);
    if (s == RecipeStage::kIndex) keys.emplace_back(stage.name);
    if (s == RecipeStage::kKeep && preset.recipe.keep.kind == KeepKind::kStreaming) keys.emplace_back("budget");
    for (std::string& key : field_keys(stage, stage.get(preset.recipe))) keys.push_back(std::move(key));
  }
  return keys;
}

Status set_choice(const RecipeStageInfo& stage, const RecipeParam& param, Recipe& recipe) {
  std::vector<std::string> choices = stage.choices;
  std::erase(choices, "none");  // a preset that chooses blocks keeps choosing
  if (std::find(choices.begin(), choices.end(), param.value.text) == choices.end()) {
    return unknown_word(fmt::format("value of {}", param.key.text), param.value, choices);
  }
  // Parameters that the new choice has too keep their values.
  const Recipe before = recipe;
  const std::string old_choice = stage.get(before);
  stage.set(recipe, param.value.text);
  if (stage.stage == RecipeStage::kStore) return {};
  for (const RecipeField& field : stage.fields) {
    const bool both =
        find_field(stage, old_choice, field.key) == &field && find_field(stage, param.value.text, field.key) == &field;
    if (both) field.set(recipe, field.get(before));
  }
  return {};
}

Status apply_override(const RecipeParam& param, ResolvedPreset& preset) {
  Recipe& recipe = preset.recipe;
  for (const RecipeStage s : preset.stages) {
    const RecipeStageInfo& stage = recipe_stage(s);
    if (const RecipeField* field = find_field(stage, stage.get(recipe), param.key.text)) {
      return set_field(*field, param, recipe);
    }
  }
  const RecipeStageInfo& store = recipe_stage(RecipeStage::kStore);
  if (const RecipeField* field = find_field(store, store.get(recipe), param.key.text)) {
    preset.stages.push_back(RecipeStage::kStore);
    return set_field(*field, param, recipe);
  }
  if (recipe.keep.kind == KeepKind::kStreaming && param.key.text == "budget") {
    LONGKV_ASSIGN(const int64_t budget, parse_size("budget", param.value, recipe.keep.sink + 1, int64_t{1} << 40));
    recipe.keep.window = budget - recipe.keep.sink;
    return {};
  }
  return unknown_word(fmt::format("parameter of {}", recipe.name), param.key, preset_keys(preset));
}

// The rules of resolve_preset.
void adapt(const Recipe& preset, const RecipePart& part, Recipe& recipe) {
  SelectSpec& select = recipe.select;
  if (select.all) return;
  const int64_t block = recipe.index.block;
  const bool new_block = block != preset.index.block;
  if (new_block && preset.name.starts_with("ktransformers") && !overrides(part, "sink")) {
    select.sink = block > 32 ? block : 64 / block * block;
    recipe.notes.push_back(
        fmt::format("sink={}: as published for blocks of {} (one block, or 64 tokens for blocks of 32 "
                    "and less)",
                    select.sink, block));
  }
  if (new_block && preset.select.preselect > 0 && !overrides(part, "preselect")) {
    select.preselect = std::max<int64_t>(1, preset.select.preselect * preset.index.block / block);
    recipe.notes.push_back(fmt::format("preselect={}: as many tokens as the published {} blocks of {}",
                                       select.preselect, preset.select.preselect, preset.index.block));
  }
  const int64_t forced = select.sink + select.local + block - 1 + select.token_step - 1;
  if (forced + block > select.budget && select.local > 0 && !overrides(part, "local")) {
    const double share = double(preset.select.local) / double(preset.select.budget);
    const int64_t blocks = std::llround(double(select.budget) * share / double(block));
    select.local = std::max<int64_t>(1, blocks) * block;
    recipe.notes.push_back(
        fmt::format("local={}: the published {} of {} tokens, in proportion to budget={}, in whole "
                    "blocks of {}",
                    select.local, preset.select.local, preset.select.budget, select.budget, block));
  }
}

}  // namespace

bool is_preset(std::string_view name) { return find_preset(name) != nullptr; }

const std::vector<std::string>& recipe_presets() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> out{"full"};
    for (const RecipeStageInfo& stage : recipe_stages()) {
      for (const RecipePreset& preset : stage.presets) {
        if (preset.name != out[0]) out.emplace_back(preset.name);
      }
    }
    return out;
  }();
  return names;
}

Result<ResolvedPreset> resolve_preset(const RecipePart& part) {
  const RecipePreset* preset = find_preset(part.name.text);
  if (preset == nullptr) return unknown_word("preset", part.name, recipe_presets());
  LONGKV_ASSIGN(const ResolvedPreset published, expand(*preset));
  ResolvedPreset out = published;
  // Choices first: which parameters exist depends on them, whatever the order.
  for (const RecipeParam& param : part.params) {
    const RecipeStageInfo* stage = chosen_stage(published, param.key.text);
    if (stage == nullptr) continue;
    LONGKV_TRY(set_choice(*stage, param, out.recipe));
    if (!sets(out, stage->stage)) out.stages.push_back(stage->stage);
  }
  for (const RecipeParam& param : part.params) {
    if (chosen_stage(published, param.key.text) == nullptr) LONGKV_TRY(apply_override(param, out));
  }
  adapt(published.recipe, part, out.recipe);
  return out;
}

}  // namespace longkv
