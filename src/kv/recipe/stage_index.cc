#include "base/error.h"
#include "kv/recipe/stage.h"
#include "kv/recipe/words.h"

namespace longkv {

namespace {

constexpr std::pair<IndexKind, const char*> kNames[] = {
    {IndexKind::kNone, "none"},     {IndexKind::kMean, "mean"},         {IndexKind::kMax, "max"},
    {IndexKind::kMinMax, "minmax"}, {IndexKind::kFixed, "fixed"},       {IndexKind::kDynamic, "dynamic"},
    {IndexKind::kBits, "bits"},     {IndexKind::kMeanDev, "meandev"},   {IndexKind::kCuboid, "cuboid"},
    {IndexKind::kRepr, "repr"},     {IndexKind::kChannels, "channels"}, {IndexKind::kLabels, "labels"},
    {IndexKind::kLsh, "lsh"},       {IndexKind::kClusters, "clusters"},
};
constexpr const char* kBlocks = " mean max minmax fixed dynamic bits meandev cuboid repr ";
constexpr const char* kCoarse = " mean max minmax fixed dynamic bits meandev cuboid repr channels labels ";

const RecipeField kFields[] = {
    LONGKV_COUNT_FIELD("block", kBlocks, 1, 65536, true, index.block),
    LONGKV_COUNT_FIELD("reps", " fixed dynamic repr ", 1, 64, true, index.reps),
    LONGKV_WORD_FIELD("rotate", " bits ", "false true", false, index.rotate),
    LONGKV_WORD_FIELD("width", " bits ", "1 2 4", false, index.width),
    LONGKV_WORD_FIELD("unbiased", " bits ", "false true", false, index.unbiased),
    LONGKV_WORD_FIELD("pool", " bits ", "mass max", false, index.pool_max),
    LONGKV_WORD_FIELD("summary", " minmax meandev cuboid ", "f16 q8", false, index.eight),
    LONGKV_REAL_FIELD("deviation", " meandev ", 0, 100, false, index.deviation),
    LONGKV_COUNT_FIELD("channels", " channels labels ", 1, 1024, true, index.channels),
    LONGKV_TEXT_FIELD("file", " labels ", false, index.file),
    LONGKV_COUNT_FIELD("hash_bits", " lsh ", 1, 16, true, index.hash_bits),
    LONGKV_COUNT_FIELD("tables", " lsh ", 2, 1024, true, index.tables),
    LONGKV_COUNT_FIELD("cluster", " clusters ", 2, 1024, true, index.cluster),
    LONGKV_COUNT_FIELD("segment", " clusters ", 256, 65536, true, index.segment),
    LONGKV_COUNT_FIELD("coarse", kCoarse, 0, 65536, false, index.coarse),
};

Status validate(const Recipe& recipe) {
  const IndexSpec& index = recipe.index;
  if (recipe.select.all && index.kind != IndexKind::kNone) {
    return fail(Code::kInvalidArgument,
                "index={} would be built and never read, since every row is attended; nearest legal recipes: "
                "select=topk(budget=2048) with it, or select=all without an index",
                index_kind_name(index.kind));
  }
  const bool reps =
      index.kind == IndexKind::kFixed || index.kind == IndexKind::kDynamic || index.kind == IndexKind::kRepr;
  if (reps && index.reps > index.block) {
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
            const auto kind = r.index.kind;
            // These know single tokens.
            if (kind == IndexKind::kChannels || kind == IndexKind::kLabels || kind == IndexKind::kLsh ||
                kind == IndexKind::kClusters) {
              r.index.block = 1;
            }
            if (kind == IndexKind::kLabels) r.index.channels = 16;
          },
          validate};
}

}  // namespace longkv
