#include "eval/scorers.h"

#include <algorithm>
#include <cstdlib>
#include <set>

#include "eval/dataset_scorers.h"
#include "eval/text.h"

namespace longkv {

namespace {

// Digits without leading zeros, so that "00012" and "12" are one number.
std::string number(std::string_view digits) {
  while (digits.size() > 1 && digits.front() == '0') digits.remove_prefix(1);
  return std::string(digits);
}

bool is_any(const std::vector<std::string>& references, std::string_view word) {
  return std::find(references.begin(), references.end(), word) != references.end();
}

// RULER: control characters count as line ends.
std::string clean(std::string_view text) {
  std::string out = lower_ascii(trim(text));
  for (char& c : out) c = static_cast<unsigned char>(c) < 0x20 ? '\n' : c;
  return out;
}

double substrings(std::string_view output, const std::vector<std::string>& references, bool all) {
  if (references.empty()) return 0;
  const std::string text = clean(output);
  double found = 0;
  for (const std::string& r : references) found += text.find(lower_ascii(r)) != std::string::npos;
  return all ? found / double(references.size()) : double(found > 0);
}

double all_words(std::string_view output, const std::vector<std::string>& references) {
  if (references.empty()) return 0;
  const std::string text = lower_ascii(output);
  double found = 0;
  for (const std::string& r : references) found += has_word(text, lower_ascii(r));
  return found / double(references.size());
}

// InfiniteBench's kv_retrieval.
double word(std::string_view output, const std::vector<std::string>& references) {
  std::string text(output);
  for (char& c : text) {
    if (std::string_view("\n:\"'.,?!{}").find(c) != std::string_view::npos) c = ' ';
  }
  const std::vector<std::string> words = split_white(text);
  return std::any_of(words.begin(), words.end(), [&](const std::string& w) { return is_any(references, w); });
}

double set_overlap(const std::set<std::string>& found, const std::set<std::string>& wanted) {
  double shared = 0;
  for (const std::string& f : found) shared += double(wanted.count(f));
  const double all = double(found.size() + wanted.size()) - shared;
  return all > 0 ? shared / all : 0;
}

// Names V123456 after the last "Answer:" (after everything when there is none).
double variable_set(std::string_view output, const std::vector<std::string>& references) {
  const size_t marker = lower_ascii(output).rfind("answer");
  if (marker != std::string::npos) output.remove_prefix(marker);
  std::set<std::string> found;
  for (size_t i = 0; i + 1 < output.size(); ++i) {
    if (output[i] != 'V' || !is_digit(output[i + 1])) continue;
    size_t end = i + 1;
    while (end < output.size() && is_digit(output[end])) ++end;
    found.emplace(output.substr(i, end - i));
  }
  return found == std::set<std::string>(references.begin(), references.end());
}

double number_set(std::string_view output, const std::vector<std::string>& references) {
  std::set<std::string> found, wanted;
  for (const std::string& run : digit_runs(output)) found.insert(number(run));
  for (const std::string& r : references) wanted.insert(number(r));
  return set_overlap(found, wanted);
}

double first_run(std::string_view output, const std::vector<std::string>& references, bool as_number) {
  const std::vector<std::string> runs = digit_runs(output);
  if (runs.empty()) return 0;
  return std::any_of(references.begin(), references.end(),
                     [&](const std::string& r) { return as_number ? number(r) == number(runs[0]) : r == runs[0]; });
}

}  // namespace

const char* eval_metric_name(EvalMetric metric) {
  static const char* const kNames[] = {"first_integer",
                                       "digit_run",
                                       "all_substrings",
                                       "any_substring",
                                       "word",
                                       "variable_set",
                                       "all_words",
                                       "number_set",
                                       "nll",
                                       "f1",
                                       "f1_characters",
                                       "f1_jieba",
                                       "rouge_l",
                                       "rouge_l_characters",
                                       "rouge_l_jieba",
                                       "class",
                                       "paragraph_number",
                                       "count",
                                       "code_similarity",
                                       "answer_letter",
                                       "letter",
                                       "letter_or_name",
                                       "first_number",
                                       "last_integer",
                                       "running_values",
                                       "name",
                                       "keyword_or_edit",
                                       "answer_number"};
  return kNames[int(metric)];
}

double score_answer(EvalMetric metric, std::string_view output, const std::vector<std::string>& references,
                    const std::vector<std::string>& distractors, const ChineseWords* words) {
  switch (metric) {
    case EvalMetric::kFirstInteger: return first_run(output, references, true);
    case EvalMetric::kDigitRun: return first_run(output, references, false);
    case EvalMetric::kAllSubstrings: return substrings(output, references, true);
    case EvalMetric::kAnySubstring: return substrings(output, references, false);
    case EvalMetric::kWord: return word(output, references);
    case EvalMetric::kVariableSet: return variable_set(output, references);
    case EvalMetric::kAllWords: return all_words(output, references);
    case EvalMetric::kNumberSet: return number_set(output, references);
    case EvalMetric::kNegativeLogLikelihood: return 0;
    default: return score_dataset_answer(metric, output, references, distractors, words);
  }
}

bool meets_stop(std::string_view output, std::string_view stop) {
  return cut_at_stop(output, stop).size() < output.size();
}

std::string_view cut_at_stop(std::string_view output, std::string_view stop) {
  if (stop.empty()) return output;
  const size_t begin = output.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos) return output;
  return output.substr(0, output.find(stop, begin + 1));
}

int64_t named_candidates(std::string_view output, const std::vector<std::string>& references,
                         const std::vector<std::string>& distractors) {
  const std::string text = lower_ascii(output);
  int64_t n = 0;
  for (const auto* list : {&references, &distractors}) {
    for (const std::string& candidate : *list) n += has_word(text, lower_ascii(candidate));
  }
  return n;
}

}  // namespace longkv
