// Recipes in YAML. The keys are those of the text form:
//
//   name: my-recipe                          preset: quest
//   index: {kind: minmax, block: 16}         with: {budget: 2K}
//   select: {kind: topk, budget: 1024}       store: q8_0
//   store: {k: q8_0, v: f16}
#include <algorithm>

#include "base/error.h"
#include "kv/recipe/parts.h"
#include "kv/recipe/stage.h"
#include "kv/recipe/words.h"
#include "kv/recipe/yaml_reader.h"

namespace longkv {

namespace {

constexpr size_t kMaxName = 64;

Result<RecipeWord> scalar(const YamlNode& key, const YamlNode& value) {
  if (value.kind == YamlNode::Kind::kScalar) return RecipeWord{value.text, value.where};
  return fail(Code::kInvalidArgument, "{}: '{}' needs one word or number", key.where, key.text.substr(0, 64));
}

// Adds the entries of a map to a part; `kind` becomes its choice where it is a stage.
Status read_map(const YamlDocument& doc, const YamlNode& map, RecipePart& part) {
  if (map.children.size() / 2 > kMaxRecipeParams) {
    return fail(Code::kInvalidArgument, "{}: more than {} parameters", map.where, kMaxRecipeParams);
  }
  for (size_t i = 0; i + 1 < map.children.size(); i += 2) {
    const YamlNode& key = doc.nodes[map.children[i]];
    LONGKV_ASSIGN(const RecipeWord value, scalar(key, doc.nodes[map.children[i + 1]]));
    if (!part.preset && key.text == "kind") {
      part.choice = value;
    } else {
      part.params.push_back({{key.text, key.where}, value});
    }
  }
  return {};
}

}  // namespace

Result<Recipe> parse_recipe_yaml(std::string_view yaml) {
  LONGKV_ASSIGN(const YamlDocument doc, read_yaml(yaml));
  std::vector<RecipePart> parts;
  RecipePart preset;
  const YamlNode* with = nullptr;
  std::string name;
  std::vector<std::string> allowed{"name", "preset", "with"};
  for (const RecipeStageInfo& info : recipe_stages()) allowed.push_back(info.name);

  const YamlNode& root = doc.root();
  for (size_t i = 0; i + 1 < root.children.size(); i += 2) {
    const YamlNode& key = doc.nodes[root.children[i]];
    const YamlNode& value = doc.nodes[root.children[i + 1]];
    if (std::find(allowed.begin(), allowed.end(), key.text) == allowed.end()) {
      return unknown_word("key", {key.text, key.where}, allowed);
    }
    if (key.text == "name") {
      LONGKV_ASSIGN(const RecipeWord word, scalar(key, value));
      const bool plain =
          std::all_of(word.text.begin(), word.text.end(), [](unsigned char c) { return c >= ' ' && c < 127; });
      if (word.text.size() > kMaxName || !plain) {
        return fail(Code::kInvalidArgument, "{}: a name has at most {} plain characters", word.where, kMaxName);
      }
      name = word.text;
    } else if (key.text == "preset") {
      preset.preset = true;
      LONGKV_ASSIGN(preset.name, scalar(key, value));
    } else if (key.text == "with") {
      if (value.kind != YamlNode::Kind::kMap) {
        return fail(Code::kInvalidArgument, "{}: 'with' needs a map of parameters, as in with: {{budget: 2K}}",
                    key.where);
      }
      with = &value;
    } else {
      RecipePart part;
      part.name = {key.text, key.where};
      if (value.kind == YamlNode::Kind::kMap) {
        LONGKV_TRY(read_map(doc, value, part));
      } else {
        LONGKV_ASSIGN(part.choice, scalar(key, value));
      }
      parts.push_back(std::move(part));
    }
  }
  if (with != nullptr && !preset.preset) {
    return fail(Code::kInvalidArgument, "{}: 'with' changes a preset, but no preset is named", with->where);
  }
  if (with != nullptr) LONGKV_TRY(read_map(doc, *with, preset));
  if (preset.preset) parts.insert(parts.begin(), preset);
  LONGKV_ASSIGN(Recipe recipe, build_recipe(parts));
  if (!name.empty()) recipe.name = name;
  return recipe;
}

Result<Recipe> load_recipe(const std::string& text_or_path) {
  // A recipe may name files too (leank:mask=dir/file), but only after an equals sign.
  const bool is_path = text_or_path.ends_with(".yaml") || text_or_path.ends_with(".yml") ||
                       text_or_path.find('/') < text_or_path.find('=');
  if (!is_path) return parse_recipe(text_or_path);
  LONGKV_ASSIGN(const std::string yaml, read_settings_file(text_or_path));
  Result<Recipe> recipe = parse_recipe_yaml(yaml);
  if (!recipe.ok()) return recipe.status().with_context(text_or_path);
  return recipe;
}

}  // namespace longkv
