#include "train/lessons.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "eval/tasks.h"
#include "gguf/gguf.h"
#include "support/paths.h"

namespace longkv {
namespace {

Tokenizer needle_tokenizer() {
  const auto file = GgufFile::open(test::repo_model("needle-10m-128k-f16.gguf"));
  return *Tokenizer::from_metadata(file->metadata());
}

TEST(Lessons, FillTheirLengthAndHoldTheirAnswers) {
  const Tokenizer tokenizer = needle_tokenizer();
  LessonOptions options;
  std::set<std::string> kinds;
  for (int64_t tokens : {2000, 4096, 9001}) {
    for (uint64_t index = 0; index < 3; ++index) {
      const auto lesson = make_lesson(tokenizer, options, index, tokens);
      ASSERT_TRUE(lesson.ok()) << lesson.status().message();
      kinds.insert(lesson->kind);
      EXPECT_LE(int64_t(lesson->document.size()), tokens);
      EXPECT_GE(int64_t(lesson->document.size()), tokens * 9 / 10) << lesson->kind;
      ASSERT_FALSE(lesson->questions.empty());
      const std::string document = tokenizer.decode(lesson->document);
      for (const Question& q : lesson->questions) {
        ASSERT_LE(int64_t(q.ids.size()), options.max_chunk);
        ASSERT_LT(q.loss_from, int64_t(q.ids.size()) - 1);
        std::string answer = tokenizer.decode(std::vector<int32_t>(q.ids.begin() + q.loss_from + 1, q.ids.end()));
        while (!answer.empty() && (answer.back() == '.' || answer.back() == '"')) answer.pop_back();
        EXPECT_NE(document.find(answer), std::string::npos) << lesson->kind << ": " << answer;
      }
    }
  }
  EXPECT_EQ(kinds, (std::set<std::string>{"chains", "numbers", "pairs"}));
}

TEST(Lessons, FollowFromSeedAndIndex) {
  const Tokenizer tokenizer = needle_tokenizer();
  LessonOptions options;
  const auto a = make_lesson(tokenizer, options, 4, 3000), b = make_lesson(tokenizer, options, 4, 3000);
  EXPECT_EQ(a->document, b->document);
  EXPECT_NE(a->document, make_lesson(tokenizer, options, 7, 3000)->document);
  options.seed = 2;
  EXPECT_NE(a->document, make_lesson(tokenizer, options, 4, 3000)->document);
}

// No lesson begins from a seed that an evaluation can begin from, whatever roots, tasks, lengths and samples.
TEST(Lessons, SeedsAreNoEvaluations) {
  std::set<uint64_t> evaluation, lessons;
  for (const EvalTask& task : eval_tasks()) {
    for (uint64_t root : {1, 2, 77}) {
      for (int64_t length : {4096, 131072}) {
        for (int64_t index = 0; index < 50; ++index) {
          const double depth = task.has_depth ? double(index) * 2 : -1;
          evaluation.insert(SampleId{SeedSpace::kEval, root, task.name, task.version, length, depth, index}.seed());
        }
      }
    }
  }
  for (uint64_t seed : {1, 2, 77}) {
    for (uint64_t index = 0; index < 500; ++index) {
      lessons.insert(lesson_seed(seed, index));
      lessons.insert(lesson_seed(seed, (uint64_t{12} << 40) + index));  // held out
    }
  }
  EXPECT_EQ(lessons.size(), 3000u);
  // Disjoint not by luck: the highest bit tells one from the other.
  for (uint64_t seed : evaluation) EXPECT_EQ(seed >> 63, 0u);
  for (uint64_t seed : lessons) EXPECT_EQ(seed >> 63, 1u);
}

// ... and so no fact of a lesson is one of an evaluation.
TEST(Lessons, FactsAreNoEvaluations) {
  const Tokenizer tokenizer = needle_tokenizer();
  std::string documents;
  for (uint64_t index = 0; index < 12; ++index) {
    const auto lesson = make_lesson(tokenizer, {}, index, 4096);
    ASSERT_TRUE(lesson.ok());
    documents += tokenizer.decode(lesson->document);
  }
  int64_t facts = 0;
  for (const EvalTask& task : eval_tasks()) {
    if (task.name.find("kv") == std::string::npos && task.name.find("niah") == std::string::npos) continue;
    for (int64_t index = 0; index < 4; ++index) {
      TaskRequest request;
      request.id = {SeedSpace::kEval, 1, task.name, task.version, 4096, task.has_depth ? 50.0 : -1.0, index};
      static const Haystack haystack = Haystack::grammar();
      request.haystack = &haystack;
      const EvalSample sample = task.build(request, std::max<int64_t>(task.min_units, 8));
      for (const std::string& fact : sample.facts) {
        ++facts;
        EXPECT_EQ(documents.find(fact), std::string::npos) << task.name << ": " << fact;
      }
    }
  }
  EXPECT_GT(facts, 20);
}

TEST(Lessons, TheUsersTextsGoOnWhereTheDocumentEnds) {
  const Tokenizer tokenizer = needle_tokenizer();
  LessonOptions options;
  for (int i = 0; i < 3000; ++i) options.texts.resize(1), options.texts[0] += "Line " + std::to_string(i) + ". ";
  const auto lesson = make_lesson(tokenizer, options, 3, 1000);
  ASSERT_TRUE(lesson.ok()) << lesson.status().message();
  EXPECT_EQ(lesson->kind, "text");
  ASSERT_GT(lesson->questions.size(), 1u);
  for (const Question& q : lesson->questions) {
    std::vector<int32_t> all(lesson->document.begin() + 1, lesson->document.begin() + q.after);  // without BOS
    all.insert(all.end(), q.ids.begin(), q.ids.end());
    EXPECT_NE(options.texts[0].find(tokenizer.decode(all)), std::string::npos) << q.after;
  }
  options.generated = false;
  EXPECT_EQ(make_lesson(tokenizer, options, 0, 1000)->kind, "text");
  EXPECT_EQ(lesson_kinds(options), 1);
  options.generated = true;
  options.texts[0] = "Too short.";
  EXPECT_EQ(make_lesson(tokenizer, options, 3, 1000).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(make_lesson(tokenizer, options, 0, 20).status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace longkv
