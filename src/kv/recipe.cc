#include "kv/recipe.h"

#include "base/error.h"
#include "kv/recipe_fields.h"

namespace longkv {

std::string Recipe::canonical() const {
  static const Recipe neutral;
  std::string out;
  for (RecipeStage stage : {RecipeStage::kKeep, RecipeStage::kIndex, RecipeStage::kSelect, RecipeStage::kStore}) {
    if (stage == RecipeStage::kKeep && !keep.streaming) continue;
    if (stage == RecipeStage::kIndex && index.kind == IndexKind::kNone) continue;
    const std::string choice = stage_choice(*this, stage);
    std::string params;
    for (const RecipeField& field : recipe_fields()) {
      if (field.stage != stage || find_field(stage, choice, field.key) != &field) continue;
      if (stage == RecipeStage::kStore && !choice.empty()) continue;  // K and V alike: store=f16
      const int64_t value = field.get(*this);
      if (!field.always && value == field.get(neutral)) continue;
      params += (params.empty() ? "" : ",") + std::string(field.key) + "=" + field_value(field, value);
    }
    out += out.empty() ? "" : " + ";
    out += recipe_stage(stage).name;
    if (!choice.empty()) out += "=" + choice;
    if (!params.empty()) out += "(" + params + ")";
  }
  return out;
}

// The canonical string has every setting that counts and none that does not.
bool operator==(const Recipe& a, const Recipe& b) { return a.canonical() == b.canonical(); }

Status validate_recipe(const Recipe& recipe) {
  for (const RecipeField& field : recipe_fields()) {
    if (find_field(field.stage, stage_choice(recipe, field.stage), field.key) != &field) continue;
    const int64_t value = field.get(recipe);
    if (value < field.min || value > field.max) {
      return fail(Code::kInvalidArgument, "{}: {}={} is out of range; expected {} to {}",
                  recipe_stage(field.stage).name, field.key, value, field.min, field.max);
    }
  }
  const IndexSpec& index = recipe.index;
  const SelectSpec& select = recipe.select;
  if (recipe.keep.streaming && (!select.all || index.kind != IndexKind::kNone)) {
    return fail(
        Code::kInvalidArgument,
        "keep=streaming attends its sinks and window only, so there is nothing to choose; nearest legal recipes: "
        "keep=streaming(sink={},window={}) alone, or keep=all with this index and select",
        recipe.keep.sink, recipe.keep.window);
  }
  if (!select.all && index.kind == IndexKind::kNone) {
    return fail(Code::kInvalidArgument,
                "select=topk needs an index to choose by; nearest legal recipes: index=minmax(block=16) with it, or "
                "select=all");
  }
  if (select.all) {
    if (index.kind == IndexKind::kNone) return {};
    return fail(Code::kInvalidArgument,
                "index={} would be built and never read, since every row is attended; nearest legal recipes: "
                "select=topk(budget=2048) with it, or select=all without an index",
                index_kind_name(index.kind));
  }
  if ((index.kind == IndexKind::kFixed || index.kind == IndexKind::kDynamic) && index.reps > index.block) {
    return fail(Code::kInvalidArgument, "reps={} exceeds block={}; nearest legal: reps={}", index.reps, index.block,
                index.block);
  }
  if (select.preselect_kernel % 2 == 0) {
    return fail(Code::kInvalidArgument, "preselect_kernel={} has no middle; nearest legal: {}", select.preselect_kernel,
                select.preselect_kernel + 1);
  }
  // Everything attended counts: sinks, local window, the open block, rows that arrive before the next choice.
  const int64_t forced = select.sink + select.local + index.block - 1 + select.token_step - 1;
  if (forced + index.block > select.budget) {
    return fail(
        Code::kInvalidArgument,
        "budget={} holds no block of {} beside up to {} forced rows (sink={}, local={}, open block of up to {}, "
        "token_step={}); nearest legal: budget={}, or a smaller local window or block",
        select.budget, index.block, forced, select.sink, select.local, index.block - 1, select.token_step,
        forced + index.block);
  }
  return {};
}

}  // namespace longkv
