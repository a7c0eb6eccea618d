// Chinese words and scores against jieba 0.42.1, rouge 1.0.1 and LongBench's F1 (tests/golden/make_jieba_goldens.py).
#include "eval/chinese_words.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "eval/data/datasets.h"
#include "eval/scorers.h"
#include "support/paths.h"
#include "support/program.h"

namespace longkv {
namespace {

using Strings = std::vector<std::string>;

void agrees_with_jieba(const ChineseWords& words, const std::string& file, int64_t pairs) {
  std::istringstream in(test::file_bytes(test::golden(file)));
  int64_t n = 0;
  for (std::string line; std::getline(in, line); ++n) {
    const auto j = nlohmann::json::parse(line);
    const std::string a = j[0], b = j[1];
    EXPECT_EQ(words.cut(a), j[2].get<Strings>()) << line;
    EXPECT_EQ(words.cut(b), j[3].get<Strings>()) << line;
    EXPECT_NEAR(score_answer(EvalMetric::kF1Jieba, a, {b}, {}, &words), j[4].get<double>(), 1e-9) << line;
    EXPECT_NEAR(score_answer(EvalMetric::kRougeLJieba, a, {b}, {}, &words), j[5].get<double>(), 1e-9) << line;
  }
  EXPECT_EQ(n, pairs);
}

TEST(ChineseWords, AnInventedDictionaryCutsAsJieba) {
  const auto words = ChineseWords::open(test::golden("eval/jieba"));
  ASSERT_TRUE(words.ok()) << words.status().message();
  agrees_with_jieba(**words, "eval/jieba/texts.jsonl", 300);
}

TEST(ChineseWords, TheDictionaryOfThePackageCutsAsJieba) {
  const std::string folder = ChineseWords::installed();
  if (folder.empty())
    GTEST_SKIP() << "the package jieba is not installed (scripts/setup --test installs python3-jieba)";
  const auto words = ChineseWords::open(folder);
  ASSERT_TRUE(words.ok()) << words.status().message();
  agrees_with_jieba(**words, "eval/chinese_words.jsonl", 500);
}

TEST(ChineseWords, DamagedPackagesAreRefused) {
  namespace fs = std::filesystem;
  const fs::path whole = test::golden("eval/jieba"), copy = test::temp_path("jieba");
  const auto refusal = [&](const std::string& file, const std::string& text) {
    fs::remove_all(copy);
    fs::copy(whole, copy, fs::copy_options::recursive);
    if (text.empty()) {
      fs::remove(copy / file);
    } else {
      std::ofstream(copy / file) << text;
    }
    const auto opened = ChineseWords::open(copy.string());
    EXPECT_FALSE(opened.ok()) << file << ": " << text;
    return opened.ok() ? std::string() : opened.status().message();
  };
  EXPECT_NE(refusal("dict.txt", "一 3 n\n二 n\n").find("line 2"), std::string::npos);
  EXPECT_NE(refusal("dict.txt", "一 3x n\n").find("line 1"), std::string::npos);
  EXPECT_NE(refusal("dict.txt", "\n").find("line 1"), std::string::npos);
  EXPECT_NE(refusal("dict.txt", "").find("dict.txt"), std::string::npos);
  for (const char* text : {"", "P={}", "P={'Q': {'B': -1}}", "P={'B': {'E': x}}", "P={'B': {'E' -1}}", "P={'B", "no"})
    EXPECT_NE(refusal("finalseg/prob_trans.py", text).find("prob_trans.py"), std::string::npos) << text;
  for (const char* text : {"P={'B': {'\\u4e': -1}}", "P={'B': {'ab': -1}}", "P={'\\u4e00': -1}"})
    EXPECT_NE(refusal("finalseg/prob_emit.py", text).find("prob_emit.py"), std::string::npos) << text;
}

// Answers of LongBench's Chinese tasks are judged by words, and the dictionary is among the files that a result names.
TEST(ChineseWords, LongBenchIsScoredByWords) {
  const std::string dir = test::temp_path("zh");
  std::filesystem::create_directories(dir);
  std::ofstream(dir + "/multifieldqa_zh.jsonl")
      << R"({"input": "谁？", "context": "文字", "answers": ["北京"], "all_classes": null, "dataset": "multifieldqa_zh"})"
      << "\n";
  DatasetRequest request;
  request.path = dir;
  request.samples = 1;
  request.jieba = test::golden("eval/jieba");
  const auto d = read_dataset(request);
  ASSERT_TRUE(d.ok()) << d.status().message();
  ASSERT_EQ(d->samples.size(), 1u);
  EXPECT_EQ(d->samples[0].metric, EvalMetric::kF1Jieba);
  ASSERT_NE(d->samples[0].words, nullptr);
  EXPECT_EQ(d->files.back().name, "jieba/dict.txt");
  EXPECT_EQ(d->files.back().sha256.size(), 64u);
  request.jieba = dir;
  EXPECT_EQ(read_dataset(request).status().code(), Code::kIo);
}

}  // namespace
}  // namespace longkv
