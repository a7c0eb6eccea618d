#include "base/error.h"
#include "kv/recipe/stage.h"
#include "kv/recipe/words.h"

namespace longkv {

namespace {

constexpr std::pair<IndexKind, const char*> kNames[] = {
    {IndexKind::kNone, "none"},     {IndexKind::kMean, "mean"},   {IndexKind::kMax, "max"},
    {IndexKind::kMinMax, "minmax"}, {IndexKind::kFixed, "fixed"}, {IndexKind::kDynamic, "dynamic"},
    {IndexKind::kBits, "bits"},
};
constexpr const char* kAny = " mean max minmax fixed dynamic bits ";

const RecipeField kFields[] = {
    LONGKV_COUNT_FIELD("block", kAny, 1, 65536, true, index.block),
    LONGKV_COUNT_FIELD("reps", " fixed dynamic ", 1, 64, true, index.reps),
    LONGKV_WORD_FIELD("rotate", " bits ", "false true", false, index.rotate),
    LONGKV_WORD_FIELD("unbiased", " bits ", "false true", false, index.unbiased),
    LONGKV_WORD_FIELD("pool", " bits ", "mass max", false, index.pool_max),
    LONGKV_COUNT_FIELD("coarse", kAny, 0, 65536, false, index.coarse),
};

Status validate(const Recipe& recipe) {
  const IndexSpec& index = recipe.index;
  if (recipe.select.all && index.kind != IndexKind::kNone) {
    return fail(Code::kInvalidArgument,
                "index={} would be built and never read, since every row is attended; nearest legal recipes: "
                "select=topk(budget=2048) with it, or select=all without an index",
                index_kind_name(index.kind));
  }
  if ((index.kind == IndexKind::kFixed || index.kind == IndexKind::kDynamic) && index.reps > index.block) {
    return fail(Code::kInvalidArgument, "reps={} exceeds block={}; nearest legal: reps={}", index.reps, index.block,
                index.block);
  }
  return {};
}

}  // namespace

const char* index_kind_name(IndexKind kind) {
  for (const auto& [k, name] : kNames) {
    if (k == kind) return name;
  }
  return "unknown";
}

std::optional<IndexKind> parse_index_kind(std::string_view name) {
  for (const auto& [kind, n] : kNames) {
    if (name == n) return kind;
  }
  return std::nullopt;
}

RecipeStageInfo index_stage() {
  std::vector<std::string> choices;
  for (const auto& [kind, name] : kNames) choices.emplace_back(name);
  return {RecipeStage::kIndex,
          "index",
          choices,
          false,
          kFields,
          {},
          [](const Recipe& r) { return std::string(index_kind_name(r.index.kind)); },
          [](Recipe& r, std::string_view choice) {
            r.index = IndexSpec{};
            r.index.kind = parse_index_kind(choice).value_or(IndexKind::kNone);
          },
          validate};
}

}  // namespace longkv
