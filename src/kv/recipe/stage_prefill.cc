#include "base/error.h"
#include "kv/recipe/stage.h"

namespace longkv {

namespace {

constexpr const char* kSparse = " a_shape vertical_slash block_sparse minference flex xattention ";
// In the order of PrefillKind.
constexpr const char* kKinds[] = {"dense",      "a_shape", "vertical_slash", "block_sparse",
                                  "minference", "flex",    "xattention"};
constexpr int64_t kBlock = 128;  // a multiple of every pattern's block of queries

const RecipeField kFields[] = {
    LONGKV_COUNT_FIELD("sink", " a_shape xattention ", 0, kMaxRecipeRows, true, prefill.sink),
    LONGKV_COUNT_FIELD("window", " a_shape ", 1, kMaxRecipeRows, true, prefill.window),
    LONGKV_COUNT_FIELD("columns", " vertical_slash minference ", 1, kMaxRecipeRows, true, prefill.columns),
    LONGKV_COUNT_FIELD("diagonals", " vertical_slash minference ", 1, kMaxRecipeRows, true, prefill.diagonals),
    LONGKV_COUNT_FIELD("blocks", " block_sparse ", 1, kMaxRecipeRows, true, prefill.blocks),
    LONGKV_TEXT_FIELD("file", " minference ", false, prefill.file),
    LONGKV_WORD_FIELD("missing", " minference ", "error vertical_slash", false, prefill.missing),
    LONGKV_REAL_FIELD("gamma", " flex ", 0, 1, true, prefill.share),
    LONGKV_REAL_FIELD("tau", " xattention ", 0, 1, true, prefill.share),
    LONGKV_REAL_FIELD("tau", " flex ", 0, 1, true, prefill.trust),
    LONGKV_COUNT_FIELD("min_budget", " flex ", 0, kMaxRecipeRows, true, prefill.min_budget),
    LONGKV_COUNT_FIELD("stride", " xattention ", 1, 128, true, prefill.stride),
    LONGKV_COUNT_FIELD("min_blocks", " xattention ", 0, kMaxRecipeRows, true, prefill.min_blocks),
    LONGKV_WORD_FIELD("heads", " xattention ", "query kv", false, prefill.shared),
    LONGKV_COUNT_FIELD("dense_layers", kSparse, 0, 65536, false, prefill.dense_layers),
    LONGKV_COUNT_FIELD("last", kSparse, 0, kMaxRecipeRows, false, prefill.last),
    LONGKV_COUNT_FIELD("threshold", kSparse, 0, kMaxRecipeRows, false, prefill.threshold),
    LONGKV_COUNT_FIELD("chunk", kSparse, kBlock, 1 << 20, false, prefill.chunk),
};

const RecipePreset kPresets[] = {
    {"a_shape", "prefill=a_shape"},
    {"minference", "prefill=minference"},
    {"flex", "prefill=flex"},
    {"xattention", "prefill=xattention"},
};

Status validate(const Recipe& recipe) {
  const PrefillSpec& spec = recipe.prefill;
  if (spec.kind == PrefillKind::kDense) return {};
  if (spec.chunk % kBlock != 0) {
    return fail(Code::kInvalidArgument, "prefill: chunk={} is no multiple of {} queries; nearest legal: chunk={}",
                spec.chunk, kBlock, (spec.chunk + kBlock / 2) / kBlock * kBlock);
  }
  if (spec.kind == PrefillKind::kXAttention && spec.stride != 8 && spec.stride != 16) {
    return fail(Code::kInvalidArgument, "prefill=xattention: stride={} is not possible; nearest legal: stride={}",
                spec.stride, spec.stride < 12 ? 8 : 16);
  }
  return {};
}

}  // namespace

RecipeStageInfo prefill_stage() {
  RecipeStageInfo info{};
  info.stage = RecipeStage::kPrefill;
  info.name = "prefill";
  info.choices.assign(std::begin(kKinds), std::end(kKinds));
  info.fields = kFields;
  info.presets = kPresets;
  info.get = [](const Recipe& r) { return std::string(kKinds[size_t(r.prefill.kind)]); };
  info.set = [](Recipe& r, std::string_view choice) {
    r.prefill = PrefillSpec{};
    for (size_t i = 0; i < std::size(kKinds); ++i) {
      if (choice == kKinds[i]) r.prefill.kind = PrefillKind(i);
    }
  };
  info.validate = validate;
  return info;
}

}  // namespace longkv
