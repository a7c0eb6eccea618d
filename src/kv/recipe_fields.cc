#include "kv/recipe_fields.h"

#include <array>
#include <sstream>

#include "base/error.h"
#include "kv/recipe_words.h"

namespace longkv {

namespace {

constexpr std::pair<IndexKind, const char*> kIndexNames[] = {
    {IndexKind::kNone, "none"},     {IndexKind::kMean, "mean"},   {IndexKind::kMax, "max"},
    {IndexKind::kMinMax, "minmax"}, {IndexKind::kFixed, "fixed"}, {IndexKind::kDynamic, "dynamic"},
    {IndexKind::kBits, "bits"},
};

constexpr const char* kTypes = "f32 f16 bf16 q8_0 q4_0";  // in the order of KvType
constexpr const char* kAnyIndex = " mean max minmax fixed dynamic bits ";
constexpr int64_t kMaxRows = int64_t{1} << 40;

#define LONGKV_FIELD_ACCESS(member, type) \
  [](const Recipe& r) -> int64_t { return int64_t(r.member); }, [](Recipe& r, int64_t v) { r.member = type(v); }

constexpr RecipeField kFields[] = {
    {RecipeStage::kKeep, "sink", " streaming ", 0, kMaxRows, nullptr, true, LONGKV_FIELD_ACCESS(keep.sink, int64_t)},
    {RecipeStage::kKeep, "window", " streaming ", 1, kMaxRows, nullptr, true,
     LONGKV_FIELD_ACCESS(keep.window, int64_t)},
    {RecipeStage::kIndex, "block", kAnyIndex, 1, 65536, nullptr, true, LONGKV_FIELD_ACCESS(index.block, int64_t)},
    {RecipeStage::kIndex, "reps", " fixed dynamic ", 1, 64, nullptr, true, LONGKV_FIELD_ACCESS(index.reps, int)},
    {RecipeStage::kIndex, "rotate", " bits ", 0, 1, "false true", false, LONGKV_FIELD_ACCESS(index.rotate, bool)},
    {RecipeStage::kIndex, "coarse", kAnyIndex, 0, 65536, nullptr, false, LONGKV_FIELD_ACCESS(index.coarse, int64_t)},
    {RecipeStage::kSelect, "budget", " topk ", 1, kMaxRows, nullptr, true, LONGKV_FIELD_ACCESS(select.budget, int64_t)},
    {RecipeStage::kSelect, "sink", " topk ", 0, kMaxRows, nullptr, true, LONGKV_FIELD_ACCESS(select.sink, int64_t)},
    {RecipeStage::kSelect, "local", " topk ", 0, kMaxRows, nullptr, true, LONGKV_FIELD_ACCESS(select.local, int64_t)},
    {RecipeStage::kSelect, "heads", " topk ", 0, 2, "kv shared query", false,
     LONGKV_FIELD_ACCESS(select.heads, SelectHeads)},
    {RecipeStage::kSelect, "aggregate", " topk ", 0, 2, "sum max softmax", false,
     LONGKV_FIELD_ACCESS(select.aggregate, Aggregate)},
    {RecipeStage::kSelect, "dense_layers", " topk ", 0, 65536, nullptr, false,
     LONGKV_FIELD_ACCESS(select.dense_layers, int)},
    {RecipeStage::kSelect, "layer_step", " topk ", 1, 65536, nullptr, false,
     LONGKV_FIELD_ACCESS(select.layer_step, int)},
    {RecipeStage::kSelect, "token_step", " topk ", 1, 65536, nullptr, false,
     LONGKV_FIELD_ACCESS(select.token_step, int)},
    {RecipeStage::kSelect, "preselect", " topk ", 0, kMaxRows, nullptr, false,
     LONGKV_FIELD_ACCESS(select.preselect, int64_t)},
    {RecipeStage::kSelect, "preselect_queries", " topk ", 1, 4096, nullptr, false,
     LONGKV_FIELD_ACCESS(select.preselect_queries, int64_t)},
    {RecipeStage::kSelect, "preselect_kernel", " topk ", 1, 1023, nullptr, false,
     LONGKV_FIELD_ACCESS(select.preselect_kernel, int64_t)},
    {RecipeStage::kStore, "k", "", 0, 4, kTypes, true, LONGKV_FIELD_ACCESS(store.k, KvType)},
    {RecipeStage::kStore, "v", "", 0, 4, kTypes, true, LONGKV_FIELD_ACCESS(store.v, KvType)},
};
#undef LONGKV_FIELD_ACCESS

std::vector<std::string> split_words(const char* words) {
  std::istringstream in(words);
  std::vector<std::string> out;
  for (std::string w; in >> w;) out.push_back(w);
  return out;
}

bool has_choice(const RecipeField& field, std::string_view choice) {
  if (field.stage == RecipeStage::kStore) return true;
  return std::string_view(field.choices).find(fmt::format(" {} ", choice)) != std::string_view::npos;
}

}  // namespace

const char* index_kind_name(IndexKind kind) {
  for (const auto& [k, name] : kIndexNames) {
    if (k == kind) return name;
  }
  return "unknown";
}

std::optional<IndexKind> parse_index_kind(std::string_view name) {
  for (const auto& [kind, n] : kIndexNames) {
    if (name == n) return kind;
  }
  return std::nullopt;
}

std::span<const RecipeStageInfo> recipe_stages() {
  static const std::array<RecipeStageInfo, 7> stages{{
      {RecipeStage::kPrefill, "prefill", {"dense"}},
      {RecipeStage::kKeep, "keep", {"all", "streaming"}},
      {RecipeStage::kStore, "store", split_words(kTypes)},
      {RecipeStage::kIndex, "index", {"none", "mean", "max", "minmax", "fixed", "dynamic", "bits"}},
      {RecipeStage::kSelect, "select", {"all", "topk"}},
      {RecipeStage::kTail, "tail", {"none"}},
      {RecipeStage::kPlace, "place", {"cpu"}},
  }};
  return stages;
}

const RecipeStageInfo& recipe_stage(RecipeStage stage) { return recipe_stages()[size_t(stage)]; }

std::span<const RecipeField> recipe_fields() { return kFields; }

std::vector<std::string> field_keys(RecipeStage stage, std::string_view choice) {
  std::vector<std::string> keys;
  for (const RecipeField& f : kFields) {
    if (f.stage == stage && has_choice(f, choice)) keys.push_back(f.key);
  }
  return keys;
}

const RecipeField* find_field(RecipeStage stage, std::string_view choice, std::string_view key) {
  for (const RecipeField& f : kFields) {
    if (f.stage == stage && f.key == key && has_choice(f, choice)) return &f;
  }
  return nullptr;
}

std::string field_value(const RecipeField& field, int64_t value) {
  if (field.words == nullptr) return std::to_string(value);
  const std::vector<std::string> words = split_words(field.words);
  return value >= 0 && size_t(value) < words.size() ? words[size_t(value)] : std::to_string(value);
}

Status set_field(const RecipeField& field, const RecipeParam& param, Recipe& recipe) {
  if (field.words == nullptr) {
    LONGKV_ASSIGN(const int64_t value, parse_size(field.key, param.value, field.min, field.max));
    field.set(recipe, value);
    return {};
  }
  const std::vector<std::string> words = split_words(field.words);
  for (size_t i = 0; i < words.size(); ++i) {
    if (param.value.text == words[i]) {
      field.set(recipe, int64_t(i));
      return {};
    }
  }
  return unknown_word(fmt::format("value of {}", field.key), param.value, words);
}

std::string stage_choice(const Recipe& recipe, RecipeStage stage) {
  switch (stage) {
    case RecipeStage::kPrefill: return "dense";
    case RecipeStage::kKeep: return recipe.keep.streaming ? "streaming" : "all";
    case RecipeStage::kStore: return recipe.store.k == recipe.store.v ? kv_type_name(recipe.store.k) : "";
    case RecipeStage::kIndex: return index_kind_name(recipe.index.kind);
    case RecipeStage::kSelect: return recipe.select.all ? "all" : "topk";
    case RecipeStage::kTail: return "none";
    case RecipeStage::kPlace: return "cpu";
  }
  return "";
}

void set_stage_choice(RecipeStage stage, std::string_view choice, Recipe& recipe) {
  switch (stage) {
    case RecipeStage::kKeep:
      recipe.keep = KeepSpec{};
      recipe.keep.streaming = choice == "streaming";
      break;
    case RecipeStage::kStore:
      recipe.store = KvTypes{};
      if (const auto type = parse_kv_type(choice)) recipe.store = {*type, *type};
      break;
    case RecipeStage::kIndex:
      recipe.index = IndexSpec{};
      recipe.index.kind = parse_index_kind(choice).value_or(IndexKind::kNone);
      break;
    case RecipeStage::kSelect:
      recipe.select = SelectSpec{};
      recipe.select.all = choice == "all";
      break;
    case RecipeStage::kPrefill:
    case RecipeStage::kTail:
    case RecipeStage::kPlace: break;  // one choice each
  }
}

}  // namespace longkv
