#include "base/error.h"
#include "kv/recipe.h"
#include "kv/recipe/stage.h"

namespace longkv {

std::string Recipe::canonical() const {
  std::string out;
  for (const RecipeStageInfo& stage : recipe_stages()) {
    const std::string choice = stage.get(*this);
    if (!stage.always && choice == stage.choices[0]) continue;
    // What parsing the stage alone would give: parameters equal to it are left out.
    Recipe neutral;
    stage.set(neutral, choice);
    std::string params;
    for (const RecipeField& field : stage.fields) {
      if (find_field(stage, choice, field.key) != &field) continue;
      const RecipeValue value = field.get(*this);
      if (!field.always && value == field.get(neutral)) continue;
      params += (params.empty() ? "" : ",") + std::string(field.key) + "=" + field_text(field, value);
    }
    out += out.empty() ? "" : " + ";
    out += stage.name;
    if (!choice.empty()) out += "=" + choice;
    if (!params.empty()) out += "(" + params + ")";
  }
  return out;
}

// The canonical string has every setting that counts and none that does not.
bool operator==(const Recipe& a, const Recipe& b) { return a.canonical() == b.canonical(); }

Status validate_recipe(const Recipe& recipe) {
  for (const RecipeStageInfo& stage : recipe_stages()) {
    const std::string choice = stage.get(recipe);
    for (const RecipeField& field : stage.fields) {
      if (find_field(stage, choice, field.key) != &field) continue;
      const RecipeValue value = field.get(recipe);
      double number = 0;
      if (field.kind == RecipeField::Kind::kCount) {
        number = double(std::get<int64_t>(value));
      } else if (field.kind == RecipeField::Kind::kReal) {
        number = std::get<double>(value);
      } else {
        continue;
      }
      if (!(number >= field.min && number <= field.max)) {
        return fail(Code::kInvalidArgument, "{}: {}={} is out of range; expected {} to {}", stage.name, field.key,
                    field_text(field, value), field.min, field.max);
      }
    }
  }
  for (const RecipeStageInfo& stage : recipe_stages()) LONGKV_TRY(stage.validate(recipe));
  return {};
}

}  // namespace longkv
