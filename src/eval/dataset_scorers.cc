#include "eval/dataset_scorers.h"

#include <algorithm>
#include <cstdlib>

#include "eval/chinese_words.h"
#include "eval/text.h"
#include "eval/text_scores.h"

namespace longkv {

namespace {

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

template <class Score>
double best_of(const std::vector<std::string>& references, const Score& score) {
  double best = 0;
  for (const std::string& r : references) best = std::max(best, score(r));
  return best;
}

// Class names that occur; parts of the right one ("Sports" in "Water sports") do not count against it.
double class_score(std::string_view output, const std::string& reference, const std::vector<std::string>& classes) {
  int64_t left = 0;
  bool right = false;
  for (const std::string& c : classes) {
    if (c.empty() || output.find(c) == std::string_view::npos) continue;
    if (c == reference) {
      right = true;
    } else if (reference.find(c) != std::string::npos) {
      continue;
    }
    ++left;
  }
  return right ? 1.0 / double(left) : 0;
}

double share_of_numbers(std::string_view output, const std::string& wanted) {
  const std::vector<std::string> numbers = digit_runs(output);
  if (numbers.empty() || wanted.empty()) return 0;
  return double(std::count(numbers.begin(), numbers.end(), wanted)) / double(numbers.size());
}

std::string paragraph_of(const std::string& reference) {
  const std::vector<std::string> numbers = digit_runs(reference);
  return numbers.empty() ? "" : numbers[0];
}

// The letter of "The correct answer is (X)", or without parentheses; 0 where there is none.
char answer_letter(std::string_view output) {
  const std::string text = replace_all(std::string(output), "*", "");
  for (const char* opening : {"The correct answer is (", "The correct answer is "}) {
    const size_t at = text.find(opening);
    if (at == std::string::npos) continue;
    const size_t letter = at + std::string_view(opening).size();
    const char c = letter < text.size() ? text[letter] : ' ';
    const char next = letter + 1 < text.size() ? text[letter + 1] : ' ';
    if (c >= 'A' && c <= 'D' && !is_letter(next)) return c;
  }
  return 0;
}

char lone_letter(std::string_view output) {
  for (size_t i = 0; i < output.size(); ++i) {
    if (output[i] < 'A' || output[i] > 'D') continue;
    const char before = i > 0 ? output[i - 1] : ' ', after = i + 1 < output.size() ? output[i + 1] : ' ';
    const bool alone = !is_letter(before) && !is_digit(before) && before != '_' && !is_letter(after) &&
                       !is_digit(after) && after != '_' && after != '\'';
    // "A function ..." is an article, not a choice.
    if (alone && !(output[i] == 'A' && after == ' ' && i + 2 < output.size() && is_letter(output[i + 2])))
      return output[i];
  }
  return 0;
}

bool is_letter_answer(char letter, const std::vector<std::string>& references) {
  return letter != 0 && std::find(references.begin(), references.end(), std::string(1, letter)) != references.end();
}

double letter_or_name(std::string_view output, const std::vector<std::string>& references) {
  if (const char letter = lone_letter(output); letter != 0) return is_letter_answer(letter, references);
  return std::any_of(references.begin(), references.end(),
                     [&](const std::string& r) { return r.size() > 1 && has_word(output, r); });
}

// The first number, whole or with decimals.
double first_number(std::string_view output, const std::vector<std::string>& references) {
  size_t i = 0;
  while (i < output.size() && !is_digit(output[i])) ++i;
  if (i == output.size()) return 0;
  const double found = std::strtod(std::string(output.substr(i, 64)).c_str(), nullptr);
  return std::any_of(references.begin(), references.end(),
                     [&](const std::string& r) { return std::strtod(r.c_str(), nullptr) == found; });
}

double last_integer(std::string_view output, const std::vector<std::string>& references) {
  const std::vector<std::string> words = split_white(output);
  if (words.empty()) return 0;
  std::string word = words.back();
  while (!word.empty() && !is_digit(word.back())) word.pop_back();
  const size_t first = word.find_first_not_of("-0123456789");
  if (word.empty() || first != std::string::npos) return 0;
  return std::find(references.begin(), references.end(), word) != references.end();
}

// Leading values that are right, over all. The references are one list, or one text that holds it.
double running_values(std::string_view output, const std::vector<std::string>& references) {
  std::vector<std::string> wanted;
  for (const std::string& r : references) {
    for (std::string& run : digit_runs(r)) wanted.push_back(std::move(run));
  }
  const std::vector<std::string> found = digit_runs(output);
  size_t right = 0;
  while (right < wanted.size() && right < found.size() && wanted[right] == found[right]) ++right;
  return wanted.empty() ? 0 : double(right) / double(wanted.size());
}

double name(std::string_view output, const std::vector<std::string>& references) {
  const std::string text = lower_ascii(output);
  return std::any_of(references.begin(), references.end(),
                     [&](const std::string& r) { return has_word(text, lower_ascii(trim(r))); });
}

std::string without_white(std::string_view text) { return join(split_white(text), ""); }

double keyword_or_edit(std::string_view output, const std::vector<std::string>& references) {
  if (references.empty()) return 0;
  if (output.find(references[0]) != std::string_view::npos) return 1;
  return references.size() < 2 ? 0 : 0.2 * edit_similarity(without_white(output), without_white(references[1]));
}

double answer_number(std::string_view output, const std::vector<std::string>& references) {
  const size_t at = lower_ascii(output).rfind("answer");
  if (at == std::string::npos) return 0;
  const std::vector<std::string> numbers = digit_runs(output.substr(at));
  return !numbers.empty() && std::find(references.begin(), references.end(), numbers[0]) != references.end();
}

}  // namespace

double score_dataset_answer(EvalMetric metric, std::string_view output, const std::vector<std::string>& references,
                            const std::vector<std::string>& classes, const ChineseWords* words) {
  using M = EvalMetric;
  switch (metric) {
    case M::kF1: return best_of(references, [&](const std::string& r) { return f1_score(output, r); });
    case M::kF1Characters: return best_of(references, [&](const std::string& r) { return f1_characters(output, r); });
    case M::kF1Jieba:
      return best_of(references, [&](const std::string& r) { return f1_chinese(words->cut(output), words->cut(r)); });
    case M::kRougeL: return best_of(references, [&](const std::string& r) { return rouge_l(output, r); });
    case M::kRougeLCharacters:
      return best_of(references, [&](const std::string& r) { return rouge_l_characters(output, r); });
    case M::kRougeLJieba:
      return best_of(references, [&](const std::string& r) {
        return rouge_l(join(words->cut(output), " "), join(words->cut(r), " "));
      });
    case M::kClass: return best_of(references, [&](const std::string& r) { return class_score(output, r, classes); });
    case M::kParagraphNumber:
      return best_of(references, [&](const std::string& r) { return share_of_numbers(output, paragraph_of(r)); });
    case M::kCount: return best_of(references, [&](const std::string& r) { return share_of_numbers(output, r); });
    case M::kCodeSimilarity:
      return best_of(references, [&](const std::string& r) { return code_similarity(output, r); });
    case M::kAnswerLetter: return is_letter_answer(answer_letter(output), references);
    case M::kLetter: return is_letter_answer(lone_letter(output), references);
    case M::kLetterOrName: return letter_or_name(output, references);
    case M::kFirstNumber: return first_number(output, references);
    case M::kLastInteger: return last_integer(output, references);
    case M::kRunningValues: return running_values(output, references);
    case M::kName: return name(output, references);
    case M::kKeywordOrEdit: return keyword_or_edit(output, references);
    case M::kAnswerNumber: return answer_number(output, references);
    default: return 0;
  }
}

}  // namespace longkv
