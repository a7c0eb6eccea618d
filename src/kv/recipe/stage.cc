#include "kv/recipe/stage.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <sstream>

#include "base/error.h"
#include "kv/recipe/words.h"

namespace longkv {

namespace {

std::vector<std::string> split_words(const char* words) {
  std::istringstream in(words);
  std::vector<std::string> out;
  for (std::string w; in >> w;) out.push_back(w);
  return out;
}

bool has_choice(const RecipeField& field, std::string_view choice) {
  if (field.choices == nullptr) return true;
  return std::string_view(field.choices).find(fmt::format(" {} ", choice)) != std::string_view::npos;
}

Result<double> parse_real(const RecipeField& field, const RecipeWord& word) {
  std::string_view text = word.text;
  const bool percent = text.ends_with('%');
  if (percent) text.remove_suffix(1);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (percent) value /= 100;
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value) || value < field.min ||
      value > field.max) {
    return fail(Code::kInvalidArgument, "{}: {}='{}'; expected a number from {} to {} (10% is 0.1)", word.where,
                field.key, word.text.substr(0, 64), field.min, field.max);
  }
  return value;
}

}  // namespace

std::span<const RecipeStageInfo> recipe_stages() {
  static const std::array<RecipeStageInfo, 8> stages{prefill_stage(), keep_stage(),   mask_stage(), store_stage(),
                                                     index_stage(),   select_stage(), tail_stage(), place_stage()};
  return stages;
}

const RecipeStageInfo& recipe_stage(RecipeStage stage) { return recipe_stages()[size_t(stage)]; }

const RecipeStageInfo* find_stage(std::string_view name) {
  for (const RecipeStageInfo& stage : recipe_stages()) {
    if (name == stage.name) return &stage;
  }
  return nullptr;
}

std::vector<std::string> field_keys(const RecipeStageInfo& stage, std::string_view choice) {
  std::vector<std::string> keys;
  for (const RecipeField& f : stage.fields) {
    if (has_choice(f, choice)) keys.emplace_back(f.key);
  }
  return keys;
}

const RecipeField* find_field(const RecipeStageInfo& stage, std::string_view choice, std::string_view key) {
  for (const RecipeField& f : stage.fields) {
    if (f.key == key && has_choice(f, choice)) return &f;
  }
  return nullptr;
}

std::string field_text(const RecipeField& field, const RecipeValue& value) {
  if (const auto* text = std::get_if<std::string>(&value)) {
    const bool plain = !text->empty() && std::all_of(text->begin(), text->end(), is_recipe_value_char);
    return plain ? *text : '"' + *text + '"';
  }
  if (const auto* real = std::get_if<double>(&value)) return fmt::format("{}", *real);
  const int64_t number = std::get<int64_t>(value);
  if (field.words == nullptr) return std::to_string(number);
  const std::vector<std::string> words = split_words(field.words);
  return number >= 0 && size_t(number) < words.size() ? words[size_t(number)] : std::to_string(number);
}

Status set_field(const RecipeField& field, const RecipeParam& param, Recipe& recipe) {
  switch (field.kind) {
    case RecipeField::Kind::kCount: {
      LONGKV_ASSIGN(const int64_t value, parse_size(field.key, param.value, int64_t(field.min), int64_t(field.max)));
      field.set(recipe, value);
      return {};
    }
    case RecipeField::Kind::kReal: {
      LONGKV_ASSIGN(const double value, parse_real(field, param.value));
      field.set(recipe, value);
      return {};
    }
    case RecipeField::Kind::kText: {
      if (param.value.text.find_first_of("\"\n\r") != std::string::npos) {
        return fail(Code::kInvalidArgument, "{}: {} must not hold quotes or line ends", param.value.where, field.key);
      }
      field.set(recipe, param.value.text);
      return {};
    }
    case RecipeField::Kind::kWord: break;
  }
  const std::vector<std::string> words = split_words(field.words);
  const auto found = std::find(words.begin(), words.end(), param.value.text);
  if (found == words.end()) return unknown_word(fmt::format("value of {}", field.key), param.value, words);
  field.set(recipe, int64_t(found - words.begin()));
  return {};
}

}  // namespace longkv
