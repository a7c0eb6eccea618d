#include "base/error.h"
#include "kv/recipe/stage.h"

namespace longkv {

namespace {

// The methods that recipes can name.
constexpr KeepKind kKinds[] = {KeepKind::kAll, KeepKind::kStreaming};

const RecipeField kFields[] = {
    LONGKV_COUNT_FIELD("sink", " streaming ", 0, kMaxRecipeRows, true, keep.sink),
    LONGKV_COUNT_FIELD("window", " streaming ", 1, kMaxRecipeRows, true, keep.window),
    LONGKV_WORD_FIELD("positions", " streaming ", "absolute cache", false, keep.cache_positions),
};

const RecipePreset kPresets[] = {
    {"streaming", "keep=streaming"},
};

Status validate(const Recipe& recipe) {
  const KeepSpec& keep = recipe.keep;
  if (keep.kind == KeepKind::kStreaming && (!recipe.select.all || recipe.index.kind != IndexKind::kNone)) {
    return fail(
        Code::kInvalidArgument,
        "keep=streaming attends its sinks and window only, so there is nothing to choose; nearest legal recipes: "
        "keep=streaming(sink={},window={}) alone, or keep=all with this index and select",
        keep.sink, keep.window);
  }
  return {};
}

}  // namespace

RecipeStageInfo keep_stage() {
  std::vector<std::string> names;
  for (const KeepKind kind : kKinds) names.emplace_back(keep_kind_name(kind));
  return {RecipeStage::kKeep,
          "keep",
          names,
          false,
          kFields,
          kPresets,
          [](const Recipe& r) { return std::string(keep_kind_name(r.keep.kind)); },
          [](Recipe& r, std::string_view choice) {
            for (const KeepKind kind : kKinds) {
              if (choice == keep_kind_name(kind)) r.keep = default_keep(kind);
            }
          },
          validate};
}

}  // namespace longkv
