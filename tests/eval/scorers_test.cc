// Every rule of judging: a right answer, a wrong one, and the pitfalls that it exists for.
#include "eval/scorers.h"

#include <gtest/gtest.h>

namespace longkv {
namespace {

using M = EvalMetric;
using Strings = std::vector<std::string>;

TEST(Scorers, FirstIntegerIsAWholeNumber) {
  EXPECT_EQ(score_answer(M::kFirstInteger, " 71432.", {"71432"}), 1);
  EXPECT_EQ(score_answer(M::kFirstInteger, "It is 007, I think", {"7"}), 1);
  EXPECT_EQ(score_answer(M::kFirstInteger, "70000", {"7"}), 0) << "no substring";
  EXPECT_EQ(score_answer(M::kFirstInteger, "1 or 71432", {"71432"}), 0) << "only the first counts";
  EXPECT_EQ(score_answer(M::kFirstInteger, "none", {"71432"}), 0);
}

TEST(Scorers, DigitRunKeepsLeadingZeros) {
  EXPECT_EQ(score_answer(M::kDigitRun, "key: 00712", {"00712"}), 1);
  EXPECT_EQ(score_answer(M::kDigitRun, "key: 712", {"00712"}), 0);
  EXPECT_EQ(score_answer(M::kDigitRun, "1122334455", {"1122334455"}), 1);
  EXPECT_EQ(score_answer(M::kDigitRun, "112334455", {"1122334455"}), 0) << "a dropped digit";
}

TEST(Scorers, SubstringsInAnyCase) {
  const Strings refs = {"Alpha", "beta", "gamma", "delta"};
  EXPECT_EQ(score_answer(M::kAllSubstrings, "ALPHA beta", refs), 0.5);
  EXPECT_EQ(score_answer(M::kAllSubstrings, "delta, gamma, beta, alpha", refs), 1);
  EXPECT_EQ(score_answer(M::kAllSubstrings, "", refs), 0);
  EXPECT_EQ(score_answer(M::kAnySubstring, "the delta", refs), 1);
  EXPECT_EQ(score_answer(M::kAnySubstring, "epsilon", refs), 0);
  EXPECT_EQ(score_answer(M::kAllSubstrings, "x", {}), 0);
}

TEST(Scorers, KeyValueIsAWholeWord) {
  const Strings refs = {"2b0f-44"};
  EXPECT_EQ(score_answer(M::kWord, "\"2b0f-44\"}", refs), 1);
  EXPECT_EQ(score_answer(M::kWord, "it is 2b0f-44.", refs), 1);
  EXPECT_EQ(score_answer(M::kWord, "2b0f-445", refs), 0);
  EXPECT_EQ(score_answer(M::kWord, "2b0f", refs), 0);
}

TEST(Scorers, WholeWordsOnly) {
  EXPECT_EQ(score_answer(M::kAllWords, "oak, elm", {"oak", "elm"}), 1);
  EXPECT_EQ(score_answer(M::kAllWords, "oaks and elm", {"oak", "elm"}), 0.5);
  EXPECT_EQ(score_answer(M::kAllWords, "5 in 15", {"15"}), 1);
  EXPECT_EQ(score_answer(M::kAllWords, "15", {"5"}), 0);
}

TEST(Scorers, SetsOfNumbersAndVariables) {
  EXPECT_EQ(score_answer(M::kNumberSet, "3, 7 and 12", {"3", "7", "12"}), 1);
  EXPECT_EQ(score_answer(M::kNumberSet, "3, 7, 12, 13", {"3", "7", "12"}), 0.75) << "a list of everything is no answer";
  EXPECT_EQ(score_answer(M::kNumberSet, "", {"3"}), 0);
  EXPECT_EQ(score_answer(M::kVariableSet, "V111111 = 3 so. Answer: V222222, V333333", {"V333333", "V222222"}), 1);
  EXPECT_EQ(score_answer(M::kVariableSet, "Answer: V222222", {"V333333", "V222222"}), 0);
  EXPECT_EQ(score_answer(M::kVariableSet, "Answer: V222222, V333333, V444444", {"V333333", "V222222"}), 0);
}

TEST(Scorers, AnswersEndAtTheStopOnceSomethingWasSaid) {
  EXPECT_EQ(cut_at_stop("\n\n 12\nmore", "\n"), "\n\n 12");
  EXPECT_EQ(cut_at_stop("12", "\n"), "12");
  EXPECT_EQ(cut_at_stop("\"12\" and", "\""), "\"12") << "an opening quotation mark is no end";
  EXPECT_EQ(cut_at_stop(" \n ", "\n"), " \n ");
  EXPECT_EQ(cut_at_stop("a.b", ""), "a.b");
  EXPECT_FALSE(meets_stop("\n", "\n"));
  EXPECT_TRUE(meets_stop("x\n", "\n"));
}

TEST(Scorers, AnswersThatNameTooMuchAreCounted) {
  EXPECT_EQ(named_candidates("11 22 33", {"11"}, {"22", "44"}), 2);
  EXPECT_EQ(named_candidates("111", {"11"}, {"1"}), 0);
}

}  // namespace
}  // namespace longkv
