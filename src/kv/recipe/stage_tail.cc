#include "base/error.h"
#include "kv/recipe/stage.h"

namespace longkv {

namespace {

constexpr const char* kKinds[] = {"none", "mean", "sample", "clusters"};

const RecipeField kFields[] = {
    LONGKV_REAL_FIELD("rate", " sample ", 0, 1, true, tail.rate),
    LONGKV_REAL_FIELD("epsilon", " sample ", 0, 10, true, tail.epsilon),
    LONGKV_REAL_FIELD("delta", " sample ", 1e-6, 0.999999, true, tail.delta),
    LONGKV_COUNT_FIELD("seed", " sample ", 0, 4294967295.0, false, tail.seed),
    LONGKV_REAL_FIELD("share", " clusters ", 0, 1, true, tail.share),
};

Status validate(const Recipe& recipe) {
  const TailSpec& tail = recipe.tail;
  const SelectSpec& select = recipe.select;
  if (tail.kind == TailKind::kNone) return {};
  const char* name = kKinds[size_t(tail.kind)];
  if (select.all || select.mode == SelectMode::kSampled) {
    return fail(Code::kInvalidArgument,
                "tail={} stands in for rows that are not read, and select={} leaves none to it; nearest legal: "
                "tail=none with it, or select=topk",
                name, select.all ? "all" : "sampled");
  }
  if (tail.kind == TailKind::kClusters && recipe.index.kind != IndexKind::kClusters) {
    return fail(Code::kInvalidArgument,
                "tail=clusters estimates clusters, and index={} has none; nearest legal: index=clusters with it, or "
                "tail=sample",
                index_kind_name(recipe.index.kind));
  }
  const bool scores_tokens =
      recipe.index.block == 1 && recipe.index.kind != IndexKind::kLsh && recipe.index.kind != IndexKind::kClusters;
  if (tail.kind == TailKind::kMean &&
      (!scores_tokens || select.refine != Refine::kNone || select.mode != SelectMode::kTopK || select.layer_step > 1 ||
       select.token_step > 1 || select.preselect > 0)) {
    return fail(Code::kInvalidArgument,
                "tail=mean needs the index's score of every row in every step and layer; nearest legal: "
                "index=channels(channels=32) + select=topk with layer_step=1, token_step=1, refine=none and "
                "preselect=0");
  }
  return {};
}

}  // namespace

RecipeStageInfo tail_stage() {
  return {RecipeStage::kTail,
          "tail",
          {"none", "mean", "sample", "clusters"},
          false,
          kFields,
          {},
          [](const Recipe& r) { return std::string(kKinds[size_t(r.tail.kind)]); },
          [](Recipe& r, std::string_view choice) {
            r.tail = TailSpec{};
            for (size_t k = 0; k < std::size(kKinds); ++k) {
              if (choice == kKinds[k]) r.tail.kind = TailKind(k);
            }
          },
          validate};
}

}  // namespace longkv
