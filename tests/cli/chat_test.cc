// Conversations: what a turn reads, what is kept, and that the text is that of one fresh run over the whole.
#include "chat/chat.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/threads.h"
#include "engine/session.h"
#include "support/paths.h"
#include "support/program.h"
#include "support/tiny_model.h"

namespace longkv::test {
namespace {

using Json = nlohmann::json;

Outcome chat(const std::string& model, const std::string& input, std::initializer_list<std::string> more) {
  ProgramInput typed;
  typed.text = input;
  return longkv_program(join({"chat", "-m", model, "-q", "-t", "1"}, more), typed);
}

// The greedy answer of n letters to `messages`, read as one prompt.
std::string fresh_answer(const std::string& path, const std::vector<ChatMessage>& messages, int n) {
  const auto model = LoadedModel::load(path, {});
  EXPECT_TRUE(model.ok()) << model.status().message();
  const auto tokenizer = Tokenizer::from_metadata((*model)->file().metadata());
  EXPECT_TRUE(tokenizer.ok());
  const auto format = Chat::create((*model)->file().metadata(), *tokenizer);
  EXPECT_TRUE(format.ok()) << format.status().message();
  const auto ids = format->encode(messages, /*generation_prompt=*/true);
  EXPECT_TRUE(ids.ok());
  const auto recipe = load_recipe("full");
  EXPECT_TRUE(recipe.ok());
  ThreadPool pool(1);
  SessionOptions options;
  options.context = 512;
  options.recipe = *recipe;
  const auto session = Session::create(*model, options, pool);
  EXPECT_TRUE(session.ok());
  EXPECT_TRUE((*session)->prefill(*ids).ok());
  std::string text;
  for (int i = 0; i < n; ++i) {
    const auto logits = (*session)->logits();
    const auto id = int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin());
    text += tokenizer->piece(id);
    EXPECT_TRUE((*session)->decode(id).ok());
  }
  return text;
}

TEST(CliChat, ATurnIsAnsweredAsInOneFreshRun) {
  for (const uint64_t seed : {1, 2, 3}) {
    TinyModel model = tiny_chat_model();
    model.seed = seed;
    const std::string path = model.write("chat.gguf");
    const Outcome o =
        chat(path, "hello there\nand again\nonce more\n", {"--temp", "0", "-n", "12", "--sys", "be brief", "--json"});
    ASSERT_TRUE(succeeds(o));
    const std::vector<Json> turns = parsed_lines(o);
    ASSERT_EQ(turns.size(), 3u);
    const auto text = [&](size_t i) { return turns[i]["text"].get<std::string>(); };
    std::vector<ChatMessage> messages = {{"system", "be brief"}, {"user", "hello there"}};
    EXPECT_EQ(text(0), fresh_answer(path, messages, 12));
    messages.insert(messages.end(), {{"assistant", text(0)}, {"user", "and again"}});
    EXPECT_EQ(text(1), fresh_answer(path, messages, 12));
    messages.insert(messages.end(), {{"assistant", text(1)}, {"user", "once more"}});
    EXPECT_EQ(text(2), fresh_answer(path, messages, 12));
    EXPECT_EQ(turns[2]["tokens_held"].get<int>(),
              turns[1]["tokens_held"].get<int>() + turns[2]["tokens_read"].get<int>() + 12);
    EXPECT_EQ(turns[0]["finish"], "length");
  }
}

TEST(CliChat, RunAnswersAsTheFirstTurn) {
  const std::string model = tiny_chat_model().write("chat.gguf");
  const Outcome o = chat(model, "hello there\n", {"--temp", "0", "-n", "12", "--sys", "be brief"});
  ASSERT_TRUE(succeeds(o));
  EXPECT_EQ(o.out.size(), 13u) << o.out;
  EXPECT_EQ(longkv_program({"run", "-m", model, "-q", "-t", "1", "--temp", "0", "-n", "12", "--sys", "be brief", "-p",
                            "hello there"})
                .out,
            o.out);
  const Outcome sampled = chat(model, "hello there\n", {"--temp", "2", "-s", "5", "-n", "12"});
  EXPECT_EQ(
      longkv_program({"run", "-m", model, "-q", "-t", "1", "--temp", "2", "-s", "5", "-n", "12", "-p", "hello there"})
          .out,
      sampled.out);
}

TEST(CliChat, ClearForgetsEverything) {
  const std::string model = tiny_chat_model().write("chat.gguf");
  // Penalties look back on what was said, and a sampler draws on.
  const std::vector<Json> turns = parsed_lines(
      chat(model, "first words\nand more\n/clear\nfirst words\n",
           {"--temp", "1.5", "-s", "9", "-n", "24", "--repeat-penalty", "1.5", "--repeat-last-n", "-1", "--json"}));
  ASSERT_EQ(turns.size(), 3u);
  EXPECT_NE(turns[1]["text"], turns[0]["text"]);
  EXPECT_EQ(turns[2], turns[0]);
}

TEST(CliChat, ATurnThatDoesNotFitIsAnError) {
  const std::string model = tiny_chat_model().write("chat.gguf");
  const Outcome o = chat(model, "hello\n" + std::string(200, 'x') + "\n", {"--temp", "0", "-n", "4", "-c", "100"});
  EXPECT_EQ(o.exit_code, 2);
  EXPECT_EQ(o.out.size(), 5u) << "the first answer stays: " << o.out;
  EXPECT_NE(o.err.find("/clear forgets"), std::string::npos) << o.err;
}

TEST(CliChat, WhatIsTypedMustBeText) {
  const std::string model = tiny_chat_model().write("chat.gguf");
  EXPECT_TRUE(refuses(chat(model, "caf\xe9\n", {"-n", "4"}), 2, "the message is not UTF-8"));
  EXPECT_TRUE(refuses(chat(model, std::string("a\0b\n", 4), {"-n", "4"}), 2, "byte 0 at offset 1"));
}

TEST(CliChat, LinesAndEnds) {
  const std::string model = tiny_chat_model().write("chat.gguf");
  const auto out = [&](const std::string& input) {
    const Outcome o = chat(model, input, {"--temp", "0", "-n", "4"});
    EXPECT_TRUE(succeeds(o)) << input;
    return o.out;
  };
  const std::string one = out("hello\n");
  EXPECT_EQ(out("hello"), one) << "a last line without a line break counts";
  EXPECT_EQ(out("hello\r\n"), one);
  EXPECT_EQ(out("\n\nhello\n/quit\nmore\n"), one);
  EXPECT_EQ(out(""), "");
}

TEST(CliChat, ControlTokensInAMessageStayText) {
  const std::string model = tiny_chat_model().write("chat.gguf");
  const std::vector<Json> turns =
      parsed_lines(chat(model, "<|im_end|>\n/clear\nabcdefghij\n", {"--temp", "0", "-n", "4", "--json"}));
  ASSERT_EQ(turns.size(), 2u);
  EXPECT_EQ(turns[0]["tokens_read"], turns[1]["tokens_read"]) << "ten characters, ten tokens";
}

TEST(CliChat, AnUnknownTemplateNamesTheFlag) {
  TinyModel model;
  model.chat_template = "{{ messages | hyphenate }}";
  const std::string path = model.write("unknown.gguf");
  EXPECT_TRUE(refuses(chat(path, "hello\n", {"-n", "4"}), 1, "--chat-template"));
  EXPECT_TRUE(succeeds(chat(path, "hello\n", {"-n", "4", "--chat-template", "chatml"})));
  EXPECT_TRUE(refuses(chat(path, "hello\n", {"-n", "4", "--chat-template", "gemma"}), 1, "<start_of_turn>"));
  EXPECT_TRUE(succeeds(longkv_program({"run", "-m", path, "-p", "hello", "-n", "4", "--raw"})));
}

}  // namespace
}  // namespace longkv::test
