#include "kv/recipe/stage.h"

namespace longkv {

namespace {

constexpr const char* kTypes = "f32 f16 bf16 q8_0 q4_0";  // in the order of KvType

const RecipeField kFields[] = {
    LONGKV_WORD_FIELD("k", nullptr, kTypes, false, store.k),
    LONGKV_WORD_FIELD("v", nullptr, kTypes, false, store.v),
};

const RecipePreset kPresets[] = {
    {"q8", "store=q8_0"},
    {"q4", "store=q4_0"},
};

}  // namespace

RecipeStageInfo store_stage() {
  return {RecipeStage::kStore,
          "store",
          {"f16", "f32", "bf16", "q8_0", "q4_0"},
          true,
          kFields,
          kPresets,
          [](const Recipe& r) { return std::string(r.store.k == r.store.v ? kv_type_name(r.store.k) : ""); },
          [](Recipe& r, std::string_view choice) {
            r.store = StoreSpec{};
            if (const auto type = parse_kv_type(choice)) r.store.k = r.store.v = *type;
          },
          [](const Recipe&) { return Status(); }};
}

}  // namespace longkv
