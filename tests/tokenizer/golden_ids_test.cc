// Ids of Hugging Face `tokenizers` over hostile strings (tests/golden/make_tokenizer_goldens.py).
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "gguf/gguf.h"
#include "support/paths.h"
#include "tokenizer/tokenizer.h"

namespace longkv {
namespace {

void compare(const std::string& golden, const std::string& model) {
  const std::string path = test::fetched_model(model);
  if (path.empty()) GTEST_SKIP() << model << " is absent: run scripts/fetch_models";
  auto file = GgufFile::open(path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  auto tokenizer = Tokenizer::from_metadata(file->metadata());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  const auto recorded = nlohmann::json::parse(std::ifstream(test::golden(golden)));
  ASSERT_GT(recorded["cases"].size(), 200U);
  for (const auto& row : recorded["cases"]) {
    const auto text = row[0].get<std::string>();
    const auto ids = tokenizer->encode(text, false, false);
    ASSERT_TRUE(ids.ok()) << ids.status().message();
    EXPECT_EQ(*ids, row[1].get<std::vector<int32_t>>()) << testing::PrintToString(text);
  }
}

TEST(GoldenIds, SmolLm2) { compare("tokenizer_smollm2.json", "SmolLM2-135M-Instruct.Q4_1.gguf"); }
TEST(GoldenIds, Gemma3) { compare("tokenizer_gemma3.json", "gemma-3-270m-q4_k_m.gguf"); }

}  // namespace
}  // namespace longkv
