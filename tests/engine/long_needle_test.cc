// Needles in 24,000 tokens with the model that was trained to find them: decode attention that rounds its running
// output to half precision loses their digits at this depth, so this is a test of 32-bit accumulation on a real model.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "engine/session.h"
#include "support/paths.h"
#include "tokenizer/tokenizer.h"

namespace longkv {
namespace {

struct Needle {
  std::string key, value;
};

// The prompt form of models/README.md, the book excerpt as filler.
std::string document(const std::vector<Needle>& needles, size_t bytes) {
  std::ifstream in(std::string(LONGKV_SOURCE_DIR) + "/examples/book/tom_sawyer_3_5.txt");
  std::string book((std::istreambuf_iterator<char>(in)), {});
  std::replace(book.begin(), book.end(), '\n', ' ');
  std::string text = "Some special magic numbers are hidden within the following text. Memorize them.\n";
  const size_t piece = bytes / (needles.size() + 1);
  size_t at = 0;
  for (size_t i = 0; text.size() < bytes; ++i) {
    const size_t sentence = book.find(". ", at + piece);
    const size_t end = sentence == std::string::npos ? book.size() : sentence + 1;
    text += book.substr(at, end - at);
    at = end >= book.size() ? 0 : end;
    if (i < needles.size())
      text += " One of the special magic numbers for " + needles[i].key + " is: " + needles[i].value + ".";
  }
  return text;
}

TEST(LongNeedle, FullAttentionFindsAllAt24KTokens) {
  auto model = LoadedModel::load(test::repo_model("needle-10m-128k-f16.gguf"));
  ASSERT_TRUE(model.ok()) << model.status().message();
  auto tokenizer = Tokenizer::from_metadata((*model)->file().metadata());
  ASSERT_TRUE(tokenizer.ok());
  ThreadPool pool(2);
  SessionOptions options;
  options.context = 32768;
  auto session = Session::create(*model, options, pool);
  ASSERT_TRUE(session.ok());
  const std::vector<Needle> needles = {
      {"amber-anchor", "7391846"}, {"coral-ember", "2058317"}, {"ivory-kestrel", "9460273"}};
  const auto ids = tokenizer->encode(document(needles, 24000), true, false);
  ASSERT_TRUE(ids.ok());
  ASSERT_TRUE((*session)->prefill(*ids).ok());
  for (const Needle& needle : needles) {
    const std::string question = "\nWhat is the special magic number for " + needle.key +
                                 " mentioned in the provided text? The special magic number for " + needle.key +
                                 " mentioned in the provided text is";
    ASSERT_TRUE((*session)->truncate(int64_t(ids->size())).ok());
    const auto question_ids = tokenizer->encode(question, false, false);
    ASSERT_TRUE(question_ids.ok());
    for (int32_t id : *question_ids) ASSERT_TRUE((*session)->decode(id).ok());
    std::vector<int32_t> answer;
    while (answer.size() < needle.value.size() + 1) {
      const auto logits = (*session)->logits();
      answer.push_back(int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin()));
      ASSERT_TRUE((*session)->decode(answer.back()).ok());
    }
    EXPECT_EQ(tokenizer->decode(answer), " " + needle.value);
  }
}

}  // namespace
}  // namespace longkv
