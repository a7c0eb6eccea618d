#include "train/lessons.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

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

TEST(Lessons, TheUsersTextsGoOnWhereTheDocumentEnds) {
  const Tokenizer tokenizer = needle_tokenizer();
  LessonOptions options;
  for (int i = 0; i < 3000; ++i) options.texts.resize(1), options.texts[0] += "Line " + std::to_string(i) + ". ";
  const auto lesson = make_lesson(tokenizer, options, 3, 1000);
  ASSERT_TRUE(lesson.ok()) << lesson.status().message();
  EXPECT_EQ(lesson->kind, "text");
  std::vector<int32_t> all(lesson->document.begin() + 1, lesson->document.end());  // without BOS
  all.insert(all.end(), lesson->questions[0].ids.begin(), lesson->questions[0].ids.end());
  EXPECT_NE(options.texts[0].find(tokenizer.decode(all)), std::string::npos);
  options.texts[0] = "Too short.";
  EXPECT_EQ(make_lesson(tokenizer, options, 3, 1000).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(make_lesson(tokenizer, options, 0, 20).status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace longkv
