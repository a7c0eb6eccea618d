// Questions about the filler itself: chapters of the story grammar. And the likelihood of what follows a text.
#include <fmt/format.h>

#include <algorithm>

#include "eval/story.h"
#include "eval/tasks.h"
#include "eval/text.h"

namespace longkv {

namespace {

constexpr int64_t kChapterSentences = 9;
constexpr int64_t kMinChapters = 6;
constexpr int64_t kContinuationSentences = 24;
constexpr int64_t kQuiet = 3;  // chapters without a purchase, asked for by story_filter

enum class StoryQuestion { kRetrieval, kFilter, kMultihop };

EvalSample build_story(StoryQuestion kind, const TaskRequest& request, int64_t n) {
  const uint64_t seed = request.id.seed();
  EvalRandom random(seed, "story");
  const int64_t chapters = n / kChapterSentences;
  // Filter: exactly three chapters are quiet. Multi-hop: a quarter, so that the last purchase may be some chapters
  // back.
  std::vector<int64_t> quiet;
  if (kind == StoryQuestion::kFilter) quiet = random.distinct(chapters, kQuiet);
  if (kind == StoryQuestion::kMultihop) quiet = random.distinct(chapters, chapters / 4);
  const std::vector<StoryChapter> story = story_chapters(random, chapters, quiet, kChapterSentences);
  EvalSample s;
  s.suite = "longkv";
  s.stop = "\n";
  s.metric = EvalMetric::kAllWords;
  if (kind == StoryQuestion::kRetrieval) {
    const StoryChapter& c = story[size_t(random.below(uint64_t(chapters)))];
    s.question = fmt::format("\n\nWhat did {} buy?", c.person);
    s.answer_prefix = fmt::format("{} bought", c.person);
    s.references = {c.bought};
    s.facts = {c.sentences[c.sentences.size() - 2]};
    s.asked = c.person;
  } else if (kind == StoryQuestion::kFilter) {
    s.question = "\n\nIn which three chapters was nothing bought? Give the numbers of the chapters.";
    s.answer_prefix = "Nothing was bought in chapters";
    s.asked = "nothing bought";
    std::sort(quiet.begin(), quiet.end());
    for (const int64_t q : quiet) {
      s.references.push_back(std::to_string(q + 1));
      s.facts.push_back(story[size_t(q)].sentences[size_t(kChapterSentences) - 2]);
    }
    s.metric = EvalMetric::kNumberSet;
  } else {
    // A person before whom something was bought; the answer stands one or more chapters earlier.
    size_t before = size_t(random.range(1, chapters - 1));
    const auto bought_before = [&](size_t i) {
      while (i > 0 && story[i - 1].bought.empty()) --i;
      return i;
    };
    while (bought_before(before) == 0) ++before;  // at most a quarter of the chapters is quiet
    const StoryChapter& c = story[bought_before(before) - 1];
    s.question = fmt::format("\n\nWhich goods were the last that anyone bought before {} came to {}?",
                             story[before].person, story[before].place);
    s.answer_prefix = fmt::format("The last goods bought before {} came were", story[before].person);
    s.references = {c.bought};
    s.facts = {story[before].sentences[1], c.sentences[size_t(kChapterSentences) - 2]};
    s.asked = story[before].person;
  }
  std::vector<std::string> sentences;
  for (const StoryChapter& c : story) {
    for (const std::string& sentence : c.sentences) sentences.push_back(sentence);
  }
  // What does not fill a chapter.
  for (int64_t i = chapters * kChapterSentences; i < n; ++i) sentences.push_back(story_sentence(random));
  s.context = "Read this chronicle. A question about it follows." + join(sentences, " ");
  return s;
}

EvalSample build_perplexity(const TaskRequest& request, int64_t n) {
  std::vector<std::string> text =
      request.haystack->sentences(EvalRandom(request.id.seed(), "filler"), n + kContinuationSentences);
  EvalSample s;
  s.suite = "longkv";
  s.metric = EvalMetric::kNegativeLogLikelihood;
  s.chat = false;
  s.new_tokens = kContinuationTokens;
  s.continuation = " " + join({text.begin() + n, text.end()}, " ");
  text.resize(size_t(n));
  s.context = join(text, " ");
  return s;
}

}  // namespace

void add_story_tasks(std::vector<EvalTask>& tasks) {
  const auto add = [&](const char* name, const char* about, StoryQuestion kind) {
    tasks.push_back({name, 1, about, "sentences", kMinChapters * kChapterSentences,
                     story_chapters_limit() * kChapterSentences, false, false,
                     [kind](const TaskRequest& r, int64_t n) { return build_story(kind, r, n); }});
  };
  add("story_retrieval", "what somebody bought in a chronicle", StoryQuestion::kRetrieval);
  add("story_filter", "the three chapters without a purchase", StoryQuestion::kFilter);
  add("story_multihop", "what was bought last before somebody came", StoryQuestion::kMultihop);
  tasks.push_back({"perplexity", 1, "likelihood of the text that follows, and KL divergence by position", "sentences",
                   4, int64_t(1) << 40, false, true, build_perplexity});
}

}  // namespace longkv
