#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "kv/recipe.h"
#include "kv/recipe/yaml_reader.h"

namespace longkv {
namespace {

void expect_refused(const Status& status, const std::vector<std::string>& parts) {
  ASSERT_FALSE(status.ok());
  for (const std::string& part : parts) {
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message() << "\n  lacks: " << part;
  }
}
void refuse_recipe(const std::string& yaml, const std::vector<std::string>& parts) {
  const Result<Recipe> r = parse_recipe_yaml(yaml);
  expect_refused(r.status(), parts);
}

TEST(RecipeYaml, FilesNamedLikeAPresetSayTheSame) {
  int presets = 0;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(LONGKV_SOURCE_DIR) + "/recipes")) {
    const Result<Recipe> file = load_recipe(entry.path().string());
    ASSERT_TRUE(file.ok()) << file.status().message();
    const std::string name = entry.path().stem().string();
    EXPECT_EQ(file->name, name);
    const Result<Recipe> preset = load_recipe(name);
    if (!preset.ok()) continue;
    ++presets;
    EXPECT_EQ(file->canonical(), preset->canonical());
  }
  EXPECT_GE(presets, 6);
}

TEST(RecipeYaml, PresetWithChangesAndStore) {
  const Result<Recipe> r =
      parse_recipe_yaml("preset: quest\nwith: {budget: 2K, block: 32}\nstore: {k: q8_0, v: f16}\n");
  ASSERT_TRUE(r.ok()) << r.status().message();
  EXPECT_EQ(*r, *parse_recipe("quest:budget=2K,block=32 + store(k=q8_0,v=f16)"));
}

TEST(RecipeYaml, MistakesHaveLineAndColumn) {
  refuse_recipe("index:\n  kind: minmax\n  blok: 16\nselect: {kind: topk}\n",
                {"line 3, column 3", "did you mean 'block'?"});
  refuse_recipe("index: {kind: minmax}\nselect: {kind: topk, budget: [1]}\n", {"line 2", "one word or number"});
  refuse_recipe("selct: all\n", {"line 1, column 1", "did you mean 'select'?"});
  refuse_recipe("select: all\nselect: topk\n", {"line 2", "given twice"});
  refuse_recipe("with: {budget: 1}\n", {"no preset is named"});
  refuse_recipe("preset: quest\nwith: 3\n", {"needs a map"});
  refuse_recipe("- a\n- b\n", {"a map of keys and values"});
  refuse_recipe("", {"a map of keys and values"});
  refuse_recipe("a: b: c\n", {"line 1", "not YAML"});
  refuse_recipe("select: all\n---\nselect: all\n", {"second document"});
  refuse_recipe("select: &x all\nstore: *x\n", {"line 1", "anchor"});
  refuse_recipe("select: !!str all\n", {"tag"});
  refuse_recipe("? [a]\n: b\n", {"a key must be a word"});
  refuse_recipe("name: \"a\\nb\"\nselect: all\n", {"plain characters"});
  refuse_recipe(std::string(70000, '#'), {"too long"});
  refuse_recipe("a: " + std::string(5000, '[') + "\n", {"levels deep"});
  refuse_recipe("a: " + std::string(5000, '{') + "\n", {"levels deep"});
  std::string wide = "a: [";
  for (int i = 0; i < 5000; ++i) wide += "1,";
  refuse_recipe(wide + "1]\n", {"more than 4096 values"});
}

TEST(RecipeYaml, FilesThatCannotBeRead) {
  expect_refused(load_recipe("/nowhere/x.yaml").status(), {"cannot read '/nowhere/x.yaml': No such file"});
  EXPECT_EQ(load_recipe("/nowhere/x.yaml").status().code(), Code::kIo);
  EXPECT_FALSE(load_recipe("/").ok());
}

constexpr const char* kTemplate = R"(log:
  dir: "logs"
  level: DEBUG
server:
  ip: 0.0.0.0
  port: 12456
ext:
  cpu_infer: 10

long_context:
  chunk_size: 4096
  max_seq_len: 32000
  block_size: 128
  local_windows_len: 4096
  second_select_num: 32
  anchor_type: DYNAMIC
  kv_type: FP16
  dense_layer_num: 2
  anchor_num: 1
  preselect_block: True
  head_select_mode: SHARED
  preselect_block_count: 32
  layer_step: 1
  token_step:

local_chat:
  prompt_file: ""
)";

std::string with(const std::string& key, const std::string& line) {
  std::istringstream in(kTemplate);
  std::string out;
  for (std::string l; std::getline(in, l);) {
    out += (l.find("  " + key + ":") == 0 ? line : l) + "\n";
  }
  return out;
}

TEST(KTransformersYaml, TheTemplateAsItStands) {
  const Result<KTransformersConfig> c = parse_ktransformers_yaml(kTemplate);
  ASSERT_TRUE(c.ok()) << c.status().message();
  EXPECT_EQ(c->max_seq_len, 32000);
  EXPECT_EQ(c->chunk_size, 4096);
  EXPECT_EQ(c->threads, 0);
  const Recipe& r = c->recipe;
  EXPECT_EQ(r.index.kind, IndexKind::kDynamic);
  EXPECT_EQ(r.index.block, 128);
  EXPECT_EQ(r.select.sink, 128);
  EXPECT_EQ(r.select.local, 4096);
  EXPECT_EQ((r.select.budget - r.select.sink - r.select.local) / 128, 32);
  EXPECT_EQ(r.select.preselect, 32);
  EXPECT_EQ(r.select.dense_layers, 2);
  EXPECT_EQ(r.select.heads, SelectHeads::kShared);
  EXPECT_EQ(r.select.token_step, 1);
  ASSERT_EQ(r.notes.size(), 2u);
  EXPECT_NE(r.notes[0].find("are not read: "), std::string::npos) << r.notes[0];
  EXPECT_NE(r.notes[1].find("token_step is absent or blank: 1 is used"), std::string::npos);
}

TEST(KTransformersYaml, AliasesAndDocumentedExample) {
  const Result<KTransformersConfig> c = parse_ktransformers_yaml(R"(long_context:
  chunk_size: 4096
  max_seq_len: 256000
  block_size: 32
  local_windows_len: 4096
  second_block_count: 96
  threads_num: 64
  representative_type: QUEST
  representative_num: 2
  kv_type: Q8_0
  dense_layer_num: 0
  preselect_block: False
  preselect_block_count: 96
  head_select_mode: SEPARATE
  layer_step: 2
  token_step: 4
)");
  ASSERT_TRUE(c.ok()) << c.status().message();
  EXPECT_EQ(c->threads, 64);
  EXPECT_EQ(c->recipe.index.kind, IndexKind::kMinMax);
  EXPECT_EQ(c->recipe.select.sink, 64);
  EXPECT_EQ(c->recipe.select.heads, SelectHeads::kPerKvHead);
  EXPECT_EQ(c->recipe.select.layer_step, 2);
  EXPECT_EQ(c->recipe.select.token_step, 4);
  EXPECT_EQ(c->recipe.select.preselect, 0);
  EXPECT_EQ(c->recipe.store.v, KvType::kQ8_0);
  ASSERT_EQ(c->recipe.notes.size(), 1u);
  EXPECT_NE(c->recipe.notes[0].find("preselect_block_count=96 has no effect"), std::string::npos);
}

TEST(KTransformersYaml, Refusals) {
  const auto refuse = [](const std::string& yaml, const std::vector<std::string>& parts) {
    expect_refused(parse_ktransformers_yaml(yaml).status(), parts);
  };
  ASSERT_TRUE(parse_ktransformers_yaml(with("block_size", "  block_size: 64")).ok());
  refuse(with("block_size", "  block_sise: 64"),
         {"unknown key of long_context 'block_sise'", "did you mean 'block_size'?"});
  refuse(with("block_size", "  block_size: 0"), {"line 13", "out of range", "1 to 65536"});
  refuse(with("anchor_num", "  anchor_num: 2\n  representative_num: 2"), {"other name", "both given"});
  refuse(with("anchor_type", "  anchor_type: QUEST"), {"takes exactly 2"});
  refuse(with("anchor_num", "  anchor_num: 0"), {"out of range"});
  refuse(with("anchor_type", "  anchor_type: LSH"), {"value of anchor_type", "BLOCK_MAX"});
  refuse(with("kv_type", "  kv_type: FP8"), {"value of kv_type 'FP8'", "FP16, FP32, Q8_0, Q4_0"});
  refuse(with("head_select_mode", "  head_select_mode: INDIVIDUAL"), {"SHARED, SEPARATE"});
  refuse(with("preselect_block_count", "  preselect_block_count: 0"), {"leaves no block to choose from"});
  refuse(with("preselect_block", "  preselect_block: maybe"), {"neither true nor false"});
  refuse(with("chunk_size", "  chunk_size: many"), {"whole number"});
  refuse(with("chunk_size", "  chunk_size: [1]"), {"one word or number"});
  refuse("long_kontext:\n  a: 1\n", {"unknown section", "did you mean 'long_context'?"});
  refuse("server:\n  port: 1\n", {"no section 'long_context'"});
  EXPECT_EQ(load_ktransformers_yaml("/nowhere/config.yaml").status().code(), Code::kIo);
}

}  // namespace
}  // namespace longkv
