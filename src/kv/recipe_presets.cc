#include "kv/recipe_presets.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "kv/recipe_fields.h"
#include "kv/recipe_words.h"

namespace longkv {

namespace {

// KTransformers attends one initial block, `blocks` chosen ones and a local window of 4096 tokens, and shares one list
// among all heads of a layer.
Recipe ktransformers(const char* name, int64_t blocks) {
  Recipe r;
  r.name = name;
  r.index = {.kind = IndexKind::kDynamic, .block = 128, .reps = 1};
  r.select.all = false;
  r.select.sink = 128;
  r.select.local = 4096;
  r.select.budget = 128 + 4096 + blocks * 128;
  r.select.heads = SelectHeads::kShared;
  return r;
}

std::vector<Recipe> make_presets() {
  std::vector<Recipe> presets;

  Recipe full;
  full.name = "full";
  presets.push_back(full);

  Recipe streaming;  // 4 sinks and a cache of 2048 rows
  streaming.name = "streaming";
  streaming.keep = {.streaming = true, .sink = 4, .window = 2044};
  presets.push_back(streaming);

  Recipe quest;  // pages of 16, the last page inside the budget, the first two layers dense, no sinks forced
  quest.name = "quest";
  quest.index = {.kind = IndexKind::kMinMax, .block = 16};
  quest.select.all = false;
  quest.select.budget = 1024;
  quest.select.sink = 0;
  quest.select.local = 0;
  quest.select.dense_layers = 2;
  presets.push_back(quest);

  Recipe infllm;  // n_init 128, n_local 4096, 16 blocks of 128, 4 representatives
  infllm.name = "infllm";
  infllm.index = {.kind = IndexKind::kDynamic, .block = 128, .reps = 4};
  infllm.select.all = false;
  infllm.select.sink = 128;
  infllm.select.local = 4096;
  infllm.select.budget = 128 + 4096 + 16 * 128;
  infllm.select.heads = SelectHeads::kShared;
  presets.push_back(infllm);

  presets.push_back(ktransformers("ktransformers", 96));

  Recipe preselect = ktransformers("ktransformers-preselect", 32);
  preselect.select.preselect = 32;
  preselect.select.dense_layers = 2;
  presets.push_back(preselect);
  return presets;
}

const std::vector<Recipe>& presets() {
  static const std::vector<Recipe> all = make_presets();
  return all;
}

// Stages whose parameters the preset has, under their own names.
std::vector<RecipeStage> preset_stages(const Recipe& preset) {
  std::vector<RecipeStage> stages{RecipeStage::kStore};
  if (preset.keep.streaming) stages.push_back(RecipeStage::kKeep);
  if (!preset.select.all) {
    stages.push_back(RecipeStage::kIndex);
    stages.push_back(RecipeStage::kSelect);
  }
  return stages;
}

std::vector<std::string> preset_keys(const Recipe& preset, const Recipe& now) {
  std::vector<std::string> keys{"store"};
  if (!preset.select.all) keys.push_back("index");
  if (preset.keep.streaming) keys.push_back("budget");
  for (RecipeStage stage : preset_stages(preset)) {
    for (const std::string& key : field_keys(stage, stage_choice(now, stage))) keys.push_back(key);
  }
  return keys;
}

bool overrides(const RecipePart& part, std::string_view key) {
  return std::any_of(part.params.begin(), part.params.end(), [&](const auto& p) { return p.key.text == key; });
}

Status set_choice(RecipeStage stage, const RecipeParam& param, Recipe& recipe) {
  std::vector<std::string> choices = recipe_stage(stage).choices;
  std::erase(choices, "none");  // a preset that chooses blocks keeps choosing
  if (std::find(choices.begin(), choices.end(), param.value.text) == choices.end()) {
    return unknown_word(fmt::format("value of {}", param.key.text), param.value, choices);
  }
  const IndexSpec before = recipe.index;
  set_stage_choice(stage, param.value.text, recipe);
  if (stage == RecipeStage::kIndex) {
    recipe.index.block = before.block;
    if (find_field(RecipeStage::kIndex, param.value.text, "reps") != nullptr) recipe.index.reps = before.reps;
  }
  return {};
}

Status apply_override(const Recipe& preset, const RecipeParam& param, Recipe& recipe) {
  for (RecipeStage stage : preset_stages(preset)) {
    if (const RecipeField* field = find_field(stage, stage_choice(recipe, stage), param.key.text)) {
      return set_field(*field, param, recipe);
    }
  }
  if (preset.keep.streaming && param.key.text == "budget") {
    LONGKV_ASSIGN(const int64_t budget, parse_size("budget", param.value, recipe.keep.sink + 1, int64_t{1} << 40));
    recipe.keep.window = budget - recipe.keep.sink;
    return {};
  }
  return unknown_word(fmt::format("parameter of {}", preset.name), param.key, preset_keys(preset, recipe));
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

const Recipe* find_preset(const std::string& name) {
  for (const Recipe& r : presets()) {
    if (r.name == name) return &r;
  }
  return nullptr;
}

const std::vector<std::string>& recipe_presets() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> out;
    for (const Recipe& r : presets()) out.push_back(r.name);
    return out;
  }();
  return names;
}

Result<Recipe> resolve_preset(const RecipePart& part) {
  const Recipe* preset = find_preset(part.name.text);
  if (preset == nullptr) return unknown_word("preset", part.name, recipe_presets());
  Recipe recipe = *preset;
  // Choices first: which parameters exist depends on them, whatever the order.
  for (const bool choices : {true, false}) {
    for (const RecipeParam& param : part.params) {
      const bool index = param.key.text == "index" && !preset->select.all;
      const bool store = param.key.text == "store";
      if ((index || store) != choices) continue;
      if (index) LONGKV_TRY(set_choice(RecipeStage::kIndex, param, recipe));
      if (store) LONGKV_TRY(set_choice(RecipeStage::kStore, param, recipe));
      if (!choices) LONGKV_TRY(apply_override(*preset, param, recipe));
    }
  }
  adapt(*preset, part, recipe);
  return recipe;
}

}  // namespace longkv
