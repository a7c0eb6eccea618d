// KTransformers' long-context configuration as a recipe. Meanings that differ from KTransformers' (whose own code drops
// or contradicts some settings) are listed in docs/recipes.md.
#include <algorithm>
#include <cctype>
#include <map>

#include "base/error.h"
#include "kv/recipe/parts.h"
#include "kv/recipe/words.h"
#include "kv/recipe/yaml_reader.h"

namespace longkv {

namespace {

struct KeyInfo {
  const char* key;
  const char* alias;     // the name in KTransformers' documents, where it differs
  const char* fallback;  // where the key is absent or blank: KTransformers' template value
};

// token_step is blank in most published templates; 100, the value of the first, would freeze the choice for 100 tokens,
// and none of the published results used it.
constexpr KeyInfo kKeys[] = {
    {"chunk_size", nullptr, "4096"},
    {"max_seq_len", nullptr, "32000"},
    {"block_size", nullptr, "128"},
    {"local_windows_len", nullptr, "4096"},
    {"second_select_num", "second_block_count", "32"},
    {"threads_num", nullptr, nullptr},
    {"anchor_type", "representative_type", "DYNAMIC"},
    {"anchor_num", "representative_num", "1"},
    {"kv_type", nullptr, "FP16"},
    {"dense_layer_num", nullptr, "2"},
    {"preselect_block", nullptr, "true"},
    {"preselect_block_count", nullptr, "32"},
    {"head_select_mode", nullptr, "SHARED"},
    {"layer_step", nullptr, "1"},
    {"token_step", nullptr, "1"},
};

// Sections of the same file that configure KTransformers' server and have nothing to do with the KV cache.
constexpr const char* kOtherSections[] = {
    "log",  "server",  "db",         "user", "model",          "web",        "ext",
    "attn", "fastapi", "local_chat", "kvc2", "sched_strategy", "sched_port", "sched_metrics_port"};

struct Choice {
  const char* word;
  IndexKind kind;
};
constexpr Choice kAnchors[] = {
    {"DYNAMIC", IndexKind::kDynamic}, {"FIXED", IndexKind::kFixed},  {"FIX", IndexKind::kFixed},
    {"BLOCK_MEAN", IndexKind::kMean}, {"MEAN", IndexKind::kMean},    {"BLOCK_MAX", IndexKind::kMax},
    {"MAX", IndexKind::kMax},         {"QUEST", IndexKind::kMinMax},
};

std::string upper(std::string text) {
  for (char& c : text) c = char(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

class Section {
 public:
  // Takes the keys of the map; an unknown key, or a key given under both of its names, is an error.
  static Result<Section> read(const YamlDocument& doc, const YamlNode& map) {
    Section section;
    std::vector<std::string> allowed;
    for (const KeyInfo& info : kKeys) {
      allowed.push_back(info.key);
      if (info.alias != nullptr) allowed.push_back(info.alias);
    }
    for (size_t i = 0; i + 1 < map.children.size(); i += 2) {
      const YamlNode& key = doc.nodes[map.children[i]];
      const YamlNode& value = doc.nodes[map.children[i + 1]];
      const KeyInfo* info = nullptr;
      for (const KeyInfo& k : kKeys) {
        if (key.text == k.key || (k.alias != nullptr && key.text == k.alias)) info = &k;
      }
      if (info == nullptr) return unknown_word("key of long_context", {key.text, key.where}, allowed);
      if (value.kind == YamlNode::Kind::kMap || value.kind == YamlNode::Kind::kSequence) {
        return fail(Code::kInvalidArgument, "{}: '{}' needs one word or number", key.where, key.text);
      }
      if (!section.seen_.insert({info->key, key.where}).second) {
        return fail(Code::kInvalidArgument, "{}: '{}' and its other name '{}' are both given", key.where, info->key,
                    info->alias);
      }
      if (value.kind == YamlNode::Kind::kScalar) section.words_[info->key] = {value.text, value.where};
    }
    return section;
  }

  bool has(const std::string& key) const { return words_.count(key) != 0; }

  RecipeWord word(const std::string& key, std::vector<std::string>& notes) const {
    if (const auto it = words_.find(key); it != words_.end()) return it->second;
    for (const KeyInfo& info : kKeys) {
      if (key != info.key) continue;
      notes.push_back(fmt::format("{} is absent or blank: {} is used", key, info.fallback));
      return {info.fallback, "long_context"};
    }
    return {"", "long_context"};
  }

 private:
  std::map<std::string, RecipeWord> words_;
  std::map<std::string, std::string> seen_;
};

Status read_anchor(const Section& section, Recipe& recipe) {
  const RecipeWord type = section.word("anchor_type", recipe.notes);
  const Choice* choice = nullptr;
  std::vector<std::string> allowed;
  for (const Choice& c : kAnchors) {
    allowed.push_back(c.word);
    if (upper(type.text) == c.word) choice = &c;
  }
  if (choice == nullptr) return unknown_word("value of anchor_type", type, allowed);
  recipe.index.kind = choice->kind;
  const RecipeWord number = section.word("anchor_num", recipe.notes);
  LONGKV_ASSIGN(const int64_t reps, parse_size("anchor_num", number, 1, 64));
  const bool box = choice->kind == IndexKind::kMinMax;
  const bool single = choice->kind == IndexKind::kMean || choice->kind == IndexKind::kMax;
  if ((box && reps != 2) || (single && reps != 1)) {
    return fail(Code::kInvalidArgument, "{}: anchor_num={} with anchor_type={}: {} takes exactly {}", number.where,
                reps, type.text, box ? "a box of minimum and maximum" : "a mean or maximum", box ? 2 : 1);
  }
  recipe.index.reps = box || single ? 1 : int(reps);
  return {};
}

Status read_store(const Section& section, Recipe& recipe) {
  const RecipeWord type = section.word("kv_type", recipe.notes);
  constexpr std::pair<const char*, KvType> kTypes[] = {
      {"FP16", KvType::kF16}, {"FP32", KvType::kF32}, {"Q8_0", KvType::kQ8_0}, {"Q4_0", KvType::kQ4_0}};
  std::vector<std::string> allowed;
  for (const auto& [word, kv] : kTypes) {
    allowed.push_back(word);
    if (upper(type.text) == word) {
      recipe.store = {kv, kv};
      return {};
    }
  }
  return unknown_word("value of kv_type", type, allowed);
}

Status read_heads(const Section& section, Recipe& recipe) {
  const RecipeWord mode = section.word("head_select_mode", recipe.notes);
  if (upper(mode.text) == "SHARED") {
    recipe.select.heads = SelectHeads::kShared;
  } else if (upper(mode.text) == "SEPARATE") {
    recipe.select.heads = SelectHeads::kPerKvHead;
  } else {
    const std::vector<std::string> allowed{"SHARED", "SEPARATE"};
    return unknown_word("value of head_select_mode", mode, allowed);
  }
  return {};
}

Result<int64_t> number(const Section& section, const char* key, int64_t min, int64_t max, Recipe& recipe) {
  return parse_size(key, section.word(key, recipe.notes), min, max);
}

}  // namespace

Result<KTransformersConfig> parse_ktransformers_yaml(std::string_view yaml) {
  LONGKV_ASSIGN(const YamlDocument doc, read_yaml(yaml));
  const YamlNode* map = nullptr;
  std::string unread;
  const YamlNode& root = doc.root();
  for (size_t i = 0; i + 1 < root.children.size(); i += 2) {
    const YamlNode& key = doc.nodes[root.children[i]];
    if (key.text == "long_context") {
      map = &doc.nodes[root.children[i + 1]];
      continue;
    }
    if (std::find(std::begin(kOtherSections), std::end(kOtherSections), key.text) == std::end(kOtherSections)) {
      std::vector<std::string> allowed(std::begin(kOtherSections), std::end(kOtherSections));
      allowed.insert(allowed.begin(), "long_context");
      return unknown_word("section", {key.text, key.where}, allowed);
    }
    unread += (unread.empty() ? "" : ", ") + key.text;
  }
  if (map == nullptr || map->kind != YamlNode::Kind::kMap) {
    return fail(Code::kInvalidArgument,
                "no section 'long_context' with keys such as block_size; longkv reads this "
                "section of a KTransformers config.yaml");
  }
  LONGKV_ASSIGN(const Section section, Section::read(doc, *map));

  KTransformersConfig config;
  Recipe& recipe = config.recipe;
  recipe.name = "ktransformers-config";
  recipe.select.all = false;
  if (!unread.empty()) recipe.notes.push_back("sections that say nothing of the cache are not read: " + unread);
  LONGKV_ASSIGN(config.chunk_size, number(section, "chunk_size", 1, int64_t{1} << 24, recipe));
  LONGKV_ASSIGN(config.max_seq_len, number(section, "max_seq_len", 1, int64_t{1} << 40, recipe));
  if (section.has("threads_num")) {
    LONGKV_ASSIGN(const int64_t threads, number(section, "threads_num", 1, 4096, recipe));
    config.threads = int(threads);
  }
  LONGKV_ASSIGN(recipe.index.block, number(section, "block_size", 1, 65536, recipe));
  const int64_t block = recipe.index.block;
  LONGKV_TRY(read_anchor(section, recipe));
  LONGKV_TRY(read_store(section, recipe));
  LONGKV_TRY(read_heads(section, recipe));

  SelectSpec& select = recipe.select;
  select.sink = block > 32 ? block : 64 / block * block;
  LONGKV_ASSIGN(select.local, number(section, "local_windows_len", 0, int64_t{1} << 40, recipe));
  LONGKV_ASSIGN(const int64_t picked, number(section, "second_select_num", 1, int64_t{1} << 24, recipe));
  LONGKV_ASSIGN(const int64_t dense, number(section, "dense_layer_num", 0, 65536, recipe));
  LONGKV_ASSIGN(const int64_t layer_step, number(section, "layer_step", 1, 65536, recipe));
  LONGKV_ASSIGN(const int64_t token_step, number(section, "token_step", 1, 65536, recipe));
  select.dense_layers = int(dense);
  select.layer_step = int(layer_step);
  select.token_step = int(token_step);
  // Picked blocks beside the forced rows, the open block and what arrives between two choices.
  select.budget = select.sink + select.local + picked * block + std::max<int64_t>(0, block - 1) + token_step - 1;

  LONGKV_ASSIGN(const bool preselect, parse_bool("preselect_block", section.word("preselect_block", recipe.notes)));
  const RecipeWord count = section.word("preselect_block_count", recipe.notes);
  LONGKV_ASSIGN(const int64_t candidates, parse_size("preselect_block_count", count, 0, int64_t{1} << 24));
  if (preselect && candidates == 0) {
    return fail(
        Code::kInvalidArgument,
        "{}: preselect_block is true, but preselect_block_count=0 leaves no block to choose from; give a count or "
        "set preselect_block: false",
        count.where);
  }
  if (preselect) {
    select.preselect = candidates;
  } else if (section.has("preselect_block_count") && candidates > 0) {
    recipe.notes.push_back(fmt::format("preselect_block_count={} has no effect: preselect_block is false", candidates));
  }
  LONGKV_TRY(validate_recipe(recipe));
  return config;
}

Result<KTransformersConfig> load_ktransformers_yaml(const std::string& path) {
  LONGKV_ASSIGN(const std::string yaml, read_settings_file(path));
  Result<KTransformersConfig> config = parse_ktransformers_yaml(yaml);
  if (!config.ok()) return config.status().with_context(path);
  return config;
}

}  // namespace longkv
