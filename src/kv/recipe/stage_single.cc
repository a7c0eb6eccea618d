// Stages that have one choice in this version.
#include "kv/recipe/stage.h"

namespace longkv {

namespace {

RecipeStageInfo single(RecipeStage stage, const char* name, const char* choice, std::string (*get)(const Recipe&)) {
  RecipeStageInfo info{};
  info.stage = stage;
  info.name = name;
  info.choices = {choice};
  info.get = get;
  info.set = [](Recipe&, std::string_view) {};
  info.validate = [](const Recipe&) { return Status(); };
  return info;
}

}  // namespace

RecipeStageInfo place_stage() {
  return single(RecipeStage::kPlace, "place", "cpu", [](const Recipe&) { return std::string("cpu"); });
}

}  // namespace longkv
