#include "base/error.h"
#include "kv/recipe/stage.h"

namespace longkv {

namespace {

const RecipeField kFields[] = {
    LONGKV_COUNT_FIELD("sink", " streaming ", 0, kMaxRecipeRows, true, keep.sink),
    LONGKV_COUNT_FIELD("window", " streaming ", 1, kMaxRecipeRows, true, keep.window),
};

const RecipePreset kPresets[] = {
    {"streaming", "keep=streaming(sink=4,window=2044)"},  // 4 sinks and a cache of 2048 rows
};

Status validate(const Recipe& recipe) {
  if (recipe.keep.streaming && (!recipe.select.all || recipe.index.kind != IndexKind::kNone)) {
    return fail(
        Code::kInvalidArgument,
        "keep=streaming attends its sinks and window only, so there is nothing to choose; nearest legal recipes: "
        "keep=streaming(sink={},window={}) alone, or keep=all with this index and select",
        recipe.keep.sink, recipe.keep.window);
  }
  return {};
}

}  // namespace

RecipeStageInfo keep_stage() {
  return {RecipeStage::kKeep,
          "keep",
          {"all", "streaming"},
          false,
          kFields,
          kPresets,
          [](const Recipe& r) { return std::string(r.keep.streaming ? "streaming" : "all"); },
          [](Recipe& r, std::string_view choice) {
            r.keep = KeepSpec{};
            r.keep.streaming = choice == "streaming";
          },
          validate};
}

}  // namespace longkv
