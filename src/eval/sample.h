// One question over a long text, and how its answer is judged.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "eval/random.h"

namespace longkv {

class ChineseWords;

enum class EvalMetric {
  kFirstInteger,           // the first integer of the output equals the reference as a number
  kDigitRun,               // the first run of digits equals the reference as a string
  kAllSubstrings,          // share of references that occur, upper and lower case alike
  kAnySubstring,           // 1 if any reference occurs
  kWord,                   // a reference is one of the output's words
  kVariableSet,            // the set of V123456 names after the last answer marker equals the references
  kAllWords,               // share of references that occur as whole words
  kNumberSet,              // integers of the output against the references: shared ones over all
  kNegativeLogLikelihood,  // not judged: nats per token of the continuation; lower is better
  // Of data sets. Several references: the best one counts.
  kF1,                // LongBench: words in common
  kF1Characters,      // Chinese, by characters
  kF1Jieba,           // LongBench: Chinese, by jieba's words
  kRougeL,            // LongBench: the package "rouge"
  kRougeLCharacters,  // Chinese, by characters
  kRougeLJieba,       // LongBench: Chinese, by jieba's words
  kClass,             // LongBench: class names in the output; `distractors` are all classes
  kParagraphNumber,   // LongBench: share of the output's numbers that are the reference's
  kCount,             // LongBench: share of the output's numbers that are the reference
  kCodeSimilarity,    // LongBench: edit ratio of the first line of code
  kAnswerLetter,      // LongBench v2: the letter of "The correct answer is (X)"
  kLetter,            // InfiniteBench: the first letter that stands alone
  kLetterOrName,      // InfiniteBench code_debug: references are a name and its letter
  kFirstNumber,       // InfiniteBench math_find
  kLastInteger,       // InfiniteBench code_run: the last word
  kRunningValues,     // InfiniteBench math_calc: share of right leading values
  kName,              // InfiniteBench dialogue
  kKeywordOrEdit,     // NeedleBench v1: the keyword (first reference), else 0.2 of the similarity with the needle
  kAnswerNumber,      // GSM-Infinite: "Answer: N."
};
const char* eval_metric_name(EvalMetric metric);

struct EvalSample {
  SampleId id;
  std::string suite;          // where the task comes from: "longkv" for generated ones
  std::string context;        // what is long
  std::string question;       // after it, in the same turn
  std::string answer_prefix;  // words put into the model's mouth
  std::vector<std::string> references;
  std::vector<std::string> distractors;  // wrong candidates of the same kind,
  // What the context must still hold as tokens: the needle, the pair. The first one's place is the sample's depth.
  std::vector<std::string> facts;
  std::string asked;  // what the question must still hold: the key
  EvalMetric metric = EvalMetric::kAllSubstrings;
  std::shared_ptr<const ChineseWords> words;  // of the metrics by jieba's words
  std::string stop;          // the answer ends before this, once something but blanks was said; empty: never
  int64_t new_tokens = 0;    // cap; 0: the tokens of all references and kAnswerSlack more
  std::string continuation;  // kNegativeLogLikelihood: the text that is scored
  bool chat = true;          // false: never inside a chat template (LongBench's few-shot and code tasks)
};

constexpr int64_t kAnswerSlack = 16;
// Tokens of a continuation that are scored.
constexpr int64_t kContinuationTokens = 256;

}  // namespace longkv
