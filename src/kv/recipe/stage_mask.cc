#include "base/error.h"
#include "kv/recipe/stage.h"

namespace longkv {

namespace {

constexpr const char* kNames[] = {"none", "leank", "think"};  // in the order of MaskKind

const RecipeField kFields[] = {
    LONGKV_TEXT_FIELD("mask", " leank ", false, mask.mask),
    LONGKV_COUNT_FIELD("sink", " leank think ", 0, kMaxRecipeRows, true, mask.sink),
    LONGKV_COUNT_FIELD("window", " leank think ", 0, kMaxRecipeRows, true, mask.window),
    LONGKV_WORD_FIELD("mean", " leank think ", "learned on off", false, mask.mean),
    LONGKV_WORD_FIELD("removed", " leank ", "learned mean constant drop", false, mask.removed),
    LONGKV_REAL_FIELD("ratio", " think ", 0.0, 0.95, true, mask.ratio),
    LONGKV_COUNT_FIELD("queries", " think ", 1, 4096, false, mask.queries),
};

const RecipePreset kPresets[] = {
    {"leank", "mask=leank(sink=128,window=768)"},  // as the published masks are deployed
    {"think", "mask=think(ratio=0.4,sink=0,window=32)"},
};

}  // namespace

RecipeStageInfo mask_stage() {
  return {RecipeStage::kMask,
          "mask",
          {"none", "leank", "think"},
          false,
          kFields,
          kPresets,
          [](const Recipe& r) { return std::string(kNames[size_t(r.mask.kind)]); },
          [](Recipe& r, std::string_view choice) {
            r.mask = MaskSpec{};
            for (size_t i = 0; i < std::size(kNames); ++i) {
              if (choice == kNames[i]) r.mask.kind = MaskKind(i);
            }
          },
          [](const Recipe&) { return Status(); }};
}

}  // namespace longkv
