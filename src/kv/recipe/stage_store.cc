#include "base/error.h"
#include "kv/recipe/stage.h"

namespace longkv {

namespace {

constexpr const char* kTypes = "f32 f16 bf16 q8_0 q4_0 fp8 kivi2 kivi4";  // in the order of KvType
constexpr int64_t kKiviWindow = 128;                                      // the published residual

const RecipeField kFields[] = {
    LONGKV_WORD_FIELD("k", nullptr, kTypes, false, store.k),
    LONGKV_WORD_FIELD("v", nullptr, kTypes, false, store.v),
    LONGKV_COUNT_FIELD("sink", nullptr, 0, kMaxRecipeRows, false, store.sink),
    LONGKV_COUNT_FIELD("window", nullptr, 0, kMaxRecipeRows, false, store.window),
    LONGKV_WORD_FIELD("rotate", nullptr, "false true k v", false, store.rotate),
};

const RecipePreset kPresets[] = {
    {"q8", "store=q8_0"},     {"q4", "store=q4_0"},     {"fp8", "store=fp8"},
    {"kivi2", "store=kivi2"}, {"kivi4", "store=kivi4"},
};

bool encoded(KvType type) { return kv_type_scaled(type) || kv_type_blocked(type); }

Status validate(const Recipe& recipe) {
  const StoreSpec& store = recipe.store;
  if (kv_type_blocked(store.k) != kv_type_blocked(store.v)) {
    return fail(Code::kInvalidArgument,
                "store(k={},v={}): kivi2 and kivi4 encode blocks of rows and go together; nearest legal: "
                "store(k={},v={})",
                kv_type_name(store.k), kv_type_name(store.v),
                kv_type_blocked(store.k) ? kv_type_name(store.k) : "kivi4",
                kv_type_blocked(store.v) ? kv_type_name(store.v) : "kivi4");
  }
  if (store.rotates_k() && kv_type_blocked(store.k)) {
    return fail(Code::kInvalidArgument,
                "rotate={} with {} keys: they have a scale per channel, which a rotation would mix; nearest legal: "
                "rotate=v",
                store.rotate == StoreRotate::kBoth ? "true" : "k", kv_type_name(store.k));
  }
  if (store.rotates_k() && recipe.mask.kind != MaskKind::kNone) {
    return fail(
        Code::kInvalidArgument,
        "rotate of K mixes the channels that the mask chooses between; nearest legal: rotate=v with the mask, or "
        "no mask");
  }
  if ((store.rotates_k() && !encoded(store.k)) || (store.rotates_v() && !encoded(store.v))) {
    return fail(
        Code::kInvalidArgument,
        "rotate with store(k={},v={}): only encoded types gain by it; nearest legal: rotate=false, or q8_0, q4_0 "
        "or fp8",
        kv_type_name(store.k), kv_type_name(store.v));
  }
  return {};
}

}  // namespace

RecipeStageInfo store_stage() {
  return {RecipeStage::kStore,
          "store",
          {"f16", "f32", "bf16", "q8_0", "q4_0", "fp8", "kivi2", "kivi4"},
          true,
          kFields,
          kPresets,
          [](const Recipe& r) { return std::string(r.store.k == r.store.v ? kv_type_name(r.store.k) : ""); },
          [](Recipe& r, std::string_view choice) {
            r.store = StoreSpec{};
            if (const auto type = parse_kv_type(choice)) r.store.k = r.store.v = *type;
            if (kv_type_blocked(r.store.k)) r.store.window = kKiviWindow;
          },
          validate};
}

}  // namespace longkv
