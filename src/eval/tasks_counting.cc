// RULER's aggregation: which words of a long list are the most frequent.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "eval/tasks.h"
#include "eval/text.h"
#include "eval/words.h"

namespace longkv {

namespace {

constexpr int kCommon = 10;
constexpr int64_t kShortPrompt = 4096;  // below, every word is repeated less often

// A numbered list in which the first `common` words occur `often` times and the others `rarely`.
std::string word_list(EvalRandom& random, const std::vector<std::string>& words, size_t common, int often, int rarely) {
  std::vector<std::string> all;
  for (size_t i = 0; i < words.size(); ++i) {
    for (int k = 0; k < (i < common ? often : rarely); ++k) all.push_back(words[i]);
  }
  random.shuffle(all);
  std::string text;
  for (size_t i = 0; i < all.size(); ++i) text += fmt::format("{}{}. {}", i == 0 ? "" : " ", i + 1, all[i]);
  return text;
}

std::string numbered(const std::vector<std::string>& words) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) text += fmt::format(" {}. {}", i + 1, words[i]);
  return text;
}

constexpr const char* kAskCommon = "\n\nWhich 10 words occur most often in the list above?";
constexpr const char* kCommonPrefix = "The 10 words that occur most often in the list are:";

EvalSample build_cwe(const TaskRequest& request, int64_t n) {
  EvalRandom random(request.id.seed(), "words");
  const bool is_short = request.id.length < kShortPrompt;
  const std::vector<std::string> example = draw_words(random, is_short ? 20 : 40);
  EvalRandom list_random(request.id.seed(), "list");
  const std::vector<std::string> words = draw_words(list_random, size_t(n));
  EvalSample s;
  s.suite = "longkv";
  s.metric = EvalMetric::kAllWords;
  s.references.assign(words.begin(), words.begin() + kCommon);
  s.context = fmt::format(
      "The lists below hold words of which some occur more often than others. Remember those.\n\n{}{}\n{}{}\n\n{}",
      word_list(random, example, kCommon, is_short ? 3 : 10, is_short ? 1 : 3), kAskCommon, kCommonPrefix,
      numbered({example.begin(), example.begin() + kCommon}),
      word_list(list_random, words, kCommon, is_short ? 6 : 30, is_short ? 1 : 3));
  s.question = kAskCommon;
  s.asked = "occur most often";
  s.answer_prefix = kCommonPrefix;
  s.facts = s.references;
  s.stop = "\n\n";
  return s;
}

EvalSample build_fwe(const TaskRequest& request, int64_t n) {
  EvalRandom random(request.id.seed(), "words");
  constexpr double kZeta2 = 1.6449340668482264;
  constexpr int kFrequent = 3;
  const auto words = std::max<int64_t>(kFrequent + 1, request.id.length / 50);
  std::vector<std::string> vocabulary;
  for (int64_t i = 0; i < words; ++i) {
    std::string word = random.letters(6, 'a');
    if (std::find(vocabulary.begin(), vocabulary.end(), word) == vocabulary.end())
      vocabulary.push_back(std::move(word));
  }
  std::vector<std::string> all;
  for (size_t k = 0; k < vocabulary.size(); ++k) {
    const double rank = double(k + 1);
    const auto count = int64_t(double(n) / (rank * rank) / kZeta2);
    for (int64_t i = 0; i < count; ++i) all.push_back(k == 0 ? "..." : vocabulary[k]);
  }
  random.shuffle(all);
  EvalSample s;
  s.suite = "longkv";
  s.metric = EvalMetric::kAllWords;
  s.references.assign(vocabulary.begin() + 1, vocabulary.begin() + 1 + kFrequent);
  s.distractors.assign(vocabulary.begin() + 1 + kFrequent, vocabulary.end());
  s.context =
      "Below is a text of coded words. Count how often each occurs; the dots \"...\" are noise and no word.\n\n" +
      join(all, " ");
  s.question =
      "\n\nWhich three coded words occur most often in the text above? Leave the dots out and explain nothing.";
  s.asked = "three coded words";
  s.answer_prefix = "The three coded words that occur most often are";
  s.facts = s.references;
  s.stop = "\n\n";
  return s;
}

}  // namespace

void add_counting_tasks(std::vector<EvalTask>& tasks) {
  tasks.push_back({"cwe", 1, "the ten words that occur most often in a list (RULER)", "different words", kCommon + 2,
                   int64_t(drawable_words()), false, false, build_cwe});
  // Ranks 2 to 5 need different counts: n / (16 zeta(2)) - n / (25 zeta(2)) above 1.
  tasks.push_back({"fwe", 1, "the three coded words that occur most often (RULER)", "coded words", 80, int64_t(1) << 40,
                   false, false, build_fwe});
}

}  // namespace longkv
