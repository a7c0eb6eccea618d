// The stages of a recipe and their parameters, as tables: names, ranges, words and places in Recipe. Parsing, printing,
// validating and help all read them. A stage's table lies in stage_NAME.cc; a method adds its choice, its parameters,
// its presets and its rules there.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "kv/recipe.h"
#include "kv/recipe/parts.h"
#include "longkv/status.h"

namespace longkv {

// kMask (channel masks) belongs to the storing of rows, but is chosen apart from the encoding: leank+kivi2.
enum class RecipeStage { kPrefill, kKeep, kMask, kStore, kIndex, kSelect, kTail, kPlace };

using RecipeValue = std::variant<int64_t, double, std::string>;

struct RecipeField {
  enum class Kind {
    kCount,  // int64_t, written with an optional K, M or G
    kWord,   // int64_t, written as one of `words`
    kReal,   // double
    kText,   // std::string, quoted where needed: files, lists
  };
  Kind kind;
  const char* key;
  // The choices of the stage that have this parameter, each between blanks: " fixed dynamic ". nullptr: all choices.
  const char* choices;
  double min;         // of counts and reals, both inclusive
  double max;         // 0, 0 for texts
  const char* words;  // blank separated, in the order of their values; nullptr unless kWord
  bool always;        // printed even when it has its neutral value
  RecipeValue (*get)(const Recipe&);
  void (*set)(Recipe&, const RecipeValue&);
};

// A named recipe with its paper's values: the text that it stands for.
struct RecipePreset {
  const char* name;
  const char* text;
};

struct RecipeStageInfo {
  RecipeStage stage;
  const char* name;
  std::vector<std::string> choices;  // the neutral one first
  bool always;                       // printed in canonical strings even when neutral
  std::span<const RecipeField> fields;
  std::span<const RecipePreset> presets;
  // The choice that a recipe has, and setting it: the stage's parameters become those of a new Recipe. An empty choice
  // stands for "described by its parameters alone", as in store(k=q8_0,v=f16).
  std::string (*get)(const Recipe&);
  void (*set)(Recipe&, std::string_view choice);
  // Rules beyond the ranges of fields. Errors name the nearest legal recipe.
  Status (*validate)(const Recipe&);
};

// In the order in which recipes are printed.
std::span<const RecipeStageInfo> recipe_stages();
const RecipeStageInfo& recipe_stage(RecipeStage stage);
const RecipeStageInfo* find_stage(std::string_view name);

// One per file stage_NAME.cc.
RecipeStageInfo prefill_stage();
RecipeStageInfo keep_stage();
RecipeStageInfo mask_stage();
RecipeStageInfo store_stage();
RecipeStageInfo index_stage();
RecipeStageInfo select_stage();
RecipeStageInfo tail_stage();
RecipeStageInfo place_stage();

// Keys of a stage with this choice.
std::vector<std::string> field_keys(const RecipeStageInfo& stage, std::string_view choice);
const RecipeField* find_field(const RecipeStageInfo& stage, std::string_view choice, std::string_view key);

// A value as it is written, and the value of a parameter stored. Errors: kInvalidArgument with position and range.
std::string field_text(const RecipeField& field, const RecipeValue& value);
Status set_field(const RecipeField& field, const RecipeParam& param, Recipe& recipe);

constexpr double kMaxRecipeRows = double(int64_t{1} << 40);

// Members of RecipeField for a member of Recipe: LONGKV_COUNT_FIELD("block", " minmax ", 1, 65536, true, index.block).
#define LONGKV_RECIPE_FIELD(kind, key, choices, min, max, words, always, member, held)            \
  ::longkv::RecipeField {                                                                         \
    ::longkv::RecipeField::Kind::kind, key, choices, min, max, words, always,                     \
        [](const ::longkv::Recipe& r) -> ::longkv::RecipeValue { return held(r.member); },        \
        [](::longkv::Recipe& r, const ::longkv::RecipeValue& v) {                                 \
          r.member = static_cast<std::remove_reference_t<decltype(r.member)>>(std::get<held>(v)); \
        }                                                                                         \
  }
#define LONGKV_COUNT_FIELD(key, choices, min, max, always, member) \
  LONGKV_RECIPE_FIELD(kCount, key, choices, min, max, nullptr, always, member, int64_t)
// `words` in the order of the member's enumerators ("false true" for bool).
#define LONGKV_WORD_FIELD(key, choices, words, always, member) \
  LONGKV_RECIPE_FIELD(kWord, key, choices, 0, 0, words, always, member, int64_t)
#define LONGKV_REAL_FIELD(key, choices, min, max, always, member) \
  LONGKV_RECIPE_FIELD(kReal, key, choices, min, max, nullptr, always, member, double)
#define LONGKV_TEXT_FIELD(key, choices, always, member) \
  LONGKV_RECIPE_FIELD(kText, key, choices, 0, 0, nullptr, always, member, std::string)

}  // namespace longkv
