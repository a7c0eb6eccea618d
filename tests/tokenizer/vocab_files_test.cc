// Ids recorded by llama.cpp for its vocabulary files (models/ggml-vocab-*.gguf with .inp and .out beside them).
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <sstream>

#include "gguf/gguf.h"
#include "support/paths.h"
#include "tokenizer/tokenizer.h"

namespace longkv {
namespace {

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// The inputs are separated by a line of their own.
std::vector<std::string> split_inputs(const std::string& text) {
  constexpr std::string_view kBorder = "\n__ggml_vocab_test__\n";
  std::vector<std::string> inputs;
  size_t pos = 0;
  for (;;) {
    const size_t border = text.find(kBorder, pos);
    if (border == std::string::npos) return inputs;
    inputs.push_back(text.substr(pos, border - pos));
    pos = border + kBorder.size();
  }
}

class VocabFiles : public testing::TestWithParam<const char*> {};

TEST_P(VocabFiles, GivesTheRecordedIds) {
  const std::string name = std::string("vocab/ggml-vocab-") + GetParam() + ".gguf";
  const std::string path = test::fetched_model(name);
  if (path.empty()) GTEST_SKIP() << name << " is absent: run scripts/fetch_models";
  auto file = GgufFile::open(path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  auto tokenizer = Tokenizer::from_metadata(file->metadata());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();

  const std::vector<std::string> inputs = split_inputs(read_file(path + ".inp"));
  std::istringstream outputs(read_file(path + ".out"));
  ASSERT_GT(inputs.size(), 40U);
  for (const std::string& input : inputs) {
    std::string line;
    ASSERT_TRUE(std::getline(outputs, line));
    std::istringstream words(line);
    const std::vector<int32_t> expected{std::istream_iterator<int32_t>(words), {}};
    const auto ids = tokenizer->encode(input, false, false);
    ASSERT_TRUE(ids.ok()) << ids.status().message();
    EXPECT_EQ(*ids, expected) << "input: " << testing::PrintToString(input);
    EXPECT_EQ(tokenizer->decode(*ids), input);
  }
}

INSTANTIATE_TEST_SUITE_P(, VocabFiles,
                         testing::Values("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe",
                                         "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace longkv
