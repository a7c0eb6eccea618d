// Rules of the benchmarks on fixed pairs, and graded scores against the Python packages over 1,000 random pairs.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "eval/scorers.h"
#include "eval/text_scores.h"
#include "support/paths.h"
#include "support/program.h"

namespace longkv {
namespace {

using M = EvalMetric;
using Strings = std::vector<std::string>;

TEST(DatasetScorers, ReferencePackagesAgree) {
  // tests/golden/make_score_goldens.py: LongBench's F1, rouge 1.0.1, rapidfuzz 3.14.6.
  std::istringstream in(test::file_bytes(test::golden("eval/text_scores.jsonl")));
  int64_t n = 0;
  for (std::string line; std::getline(in, line); ++n) {
    const auto j = nlohmann::json::parse(line);
    const std::string a = j[0], b = j[1];
    EXPECT_NEAR(f1_score(a, b), j[2].get<double>(), 1e-9) << line;
    EXPECT_NEAR(rouge_l(a, b), j[3].get<double>(), 1e-9) << line;
    EXPECT_NEAR(indel_ratio(a, b), j[4].get<double>(), 1e-9) << line;
    EXPECT_NEAR(code_similarity(a, b), j[5].get<double>(), 1e-9) << line;
  }
  EXPECT_EQ(n, 1000);
}

TEST(DatasetScorers, WordsInCommon) {
  EXPECT_EQ(score_answer(M::kF1, "The Eiffel Tower!", {"eiffel tower"}), 1);
  EXPECT_EQ(score_answer(M::kF1, "London", {"Paris", "Rome"}), 0);
  EXPECT_NEAR(score_answer(M::kF1, "in Paris", {"Lyon", "Paris"}), 2.0 / 3, 1e-12) << "the best reference counts";
  EXPECT_EQ(score_answer(M::kF1Characters, "北京。", {"北京"}), 1);
  EXPECT_EQ(score_answer(M::kF1Characters, "上海", {"北京"}), 0);
  EXPECT_NEAR(score_answer(M::kRougeL, "a b c", {"a b c"}), 1, 1e-7);
  EXPECT_EQ(score_answer(M::kRougeL, "x y", {"a b"}), 0);
  EXPECT_EQ(score_answer(M::kRougeL, "", {"a b"}), 0);
  EXPECT_NEAR(score_answer(M::kRougeLCharacters, "会议总结", {"会议总结"}), 1, 1e-7);
  EXPECT_EQ(score_answer(M::kRougeLCharacters, "无", {"会议"}), 0);
}

TEST(DatasetScorers, Classes) {
  const Strings classes = {"Sport", "Water sport", "Water", "Food"};
  EXPECT_EQ(score_answer(M::kClass, "Food", {"Food"}, classes), 1);
  EXPECT_EQ(score_answer(M::kClass, "Food or Sport", {"Food"}, classes), 0.5);
  EXPECT_EQ(score_answer(M::kClass, "Sport", {"Food"}, classes), 0);
  EXPECT_EQ(score_answer(M::kClass, "Water sport", {"Water sport"}, classes), 1)
      << "parts of the right name are not wrong";
}

TEST(DatasetScorers, Numbers) {
  EXPECT_EQ(score_answer(M::kParagraphNumber, "Paragraph 12", {"Paragraph 12"}), 1);
  EXPECT_EQ(score_answer(M::kParagraphNumber, "12 or 13", {"Paragraph 12"}), 0.5);
  EXPECT_EQ(score_answer(M::kParagraphNumber, "112", {"Paragraph 12"}), 0);
  EXPECT_EQ(score_answer(M::kCount, "There are 7.", {"7"}), 1);
  EXPECT_EQ(score_answer(M::kCount, "seven", {"7"}), 0);
  EXPECT_EQ(score_answer(M::kFirstNumber, "It is 3.50", {"3.5"}), 1);
  EXPECT_EQ(score_answer(M::kFirstNumber, "4, not 3.5", {"3.5"}), 0);
  EXPECT_EQ(score_answer(M::kLastInteger, "the result is -12.", {"-12"}), 1);
  EXPECT_EQ(score_answer(M::kLastInteger, "-12 is it", {"-12"}), 0);
  EXPECT_EQ(score_answer(M::kRunningValues, "1, 2, 4, 4", {"1", "2", "3", "4"}), 0.5);
  EXPECT_EQ(score_answer(M::kRunningValues, "1 2", {"[1, 2]"}), 1);
  EXPECT_EQ(score_answer(M::kRunningValues, "2 1", {"[1, 2]"}), 0);
  EXPECT_EQ(score_answer(M::kAnswerNumber, "5 + 7. Answer: 12.", {"12"}), 1);
  EXPECT_EQ(score_answer(M::kAnswerNumber, "12", {"12"}), 0);
}

TEST(DatasetScorers, Choices) {
  EXPECT_EQ(score_answer(M::kAnswerLetter, "The correct answer is **(B)**", {"B"}), 1);
  EXPECT_EQ(score_answer(M::kAnswerLetter, "The correct answer is B.", {"B"}), 1);
  EXPECT_EQ(score_answer(M::kAnswerLetter, "B", {"B"}), 0) << "the form is a part of the rule";
  EXPECT_EQ(score_answer(M::kAnswerLetter, "The correct answer is Berlin", {"B"}), 0);
  EXPECT_EQ(score_answer(M::kLetter, "C. because", {"C"}), 1);
  EXPECT_EQ(score_answer(M::kLetter, "A cat is (D)", {"D"}), 1);
  EXPECT_EQ(score_answer(M::kLetter, "Could be", {"C"}), 0);
  EXPECT_EQ(score_answer(M::kLetterOrName, "B", {"parse_line", "B"}), 1);
  EXPECT_EQ(score_answer(M::kLetterOrName, "parse_line()", {"parse_line", "B"}), 1);
  EXPECT_EQ(score_answer(M::kLetterOrName, "parse_lines()", {"parse_line", "B"}), 0);
  EXPECT_EQ(score_answer(M::kName, "It was ANNA.", {"Anna"}), 1);
  EXPECT_EQ(score_answer(M::kName, "Annabel", {"Anna"}), 0);
}

TEST(DatasetScorers, CodeAndKeywords) {
  EXPECT_EQ(score_answer(M::kCodeSimilarity, "\n```\n# note\nreturn x\n", {"return x"}), 1);
  EXPECT_LT(score_answer(M::kCodeSimilarity, "print(y)", {"return x"}), 0.4);
  EXPECT_EQ(score_answer(M::kKeywordOrEdit, "it is Dolores", {"Dolores", "a needle"}), 1);
  EXPECT_NEAR(score_answer(M::kKeywordOrEdit, "a nee dle", {"Dolores", "a needle"}), 0.2, 1e-12);
  EXPECT_LT(score_answer(M::kKeywordOrEdit, "nothing", {"Dolores", "a needle"}), 0.1);
}

}  // namespace
}  // namespace longkv
