// Prompts against the models' own templates run by Jinja (tests/golden/make_tokenizer_goldens.py), and what a template
// engine cannot promise: content never becomes control tokens, BOS comes once, cached ids stay valid over turns.
#include "chat/chat.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "support/paths.h"
#include "support/vocabularies.h"

namespace longkv {
namespace {

using Messages = std::vector<ChatMessage>;

// What the templates look like to the recogniser: their markers and the spellings that choose a variant. The full
// templates are not ours to copy.
const std::map<std::string, std::string>& sketches() {
  static const std::map<std::string, std::string> texts = {
      {"smollm2",
       "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ "
       "'<|im_start|>system\\nYou "
       "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}"},
      {"qwen2.5",
       "{% if tools %}{{- '<|im_start|>system\\n' }}{{- messages[0]['content'] }}{% else %}{{- '<|im_start|>system\\n' "
       "+ "
       "messages[0]['content'] + '<|im_end|>\\n' }}{{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. "
       "You "
       "are a helpful assistant.<|im_end|>\\n' }}"},
      {"gemma",
       "{{ bos_token }}{% raise_exception('System role not supported') %}{% for message in messages %}"
       "<start_of_turn>"},
      {"phi3", "{% for message in messages %}<|system|><|user|><|assistant|><|end|>"},
      {"llama3", "{{- bos_token }}{% for message in messages %}<|start_header_id|>Cutting Knowledge Date"},
      {"mistral", "{{- bos_token }}{% for message in loop_messages %}\"[INST]\" + message[\"content\"] + \"[/INST]\""},
  };
  return texts;
}

// A byte vocabulary with the markers of every format.
test::MkGguf vocabulary(const std::string& chat_template, int32_t marker_type = 3) {
  std::vector<std::pair<std::string, int32_t>> markers;
  for (const char* text : {"<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
                           "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"}) {
    markers.emplace_back(text, marker_type);
  }
  test::MkGguf file = test::TinyBpe({"h e", "\xC4\x8A \xC4\x8A"}, markers).file("qwen2");
  if (!chat_template.empty()) file.string("tokenizer.chat_template", chat_template);
  return file;
}

struct Opened {
  GgufFile file;
  Tokenizer tokenizer;
  Result<Chat> chat;
};

// The built-in format that a sketch is a variant of.
const std::map<std::string, std::string>& formats() {
  static const std::map<std::string, std::string> names = {{"smollm2", "chatml"}, {"qwen2.5", "chatml"},
                                                           {"gemma", "gemma"},    {"phi3", "phi3"},
                                                           {"llama3", "llama3"},  {"mistral", "mistral"}};
  return names;
}

Opened open_chat(const test::MkGguf& mk, const std::string& name = "") {
  auto file = GgufFile::open(mk.write("chat.gguf"));
  EXPECT_TRUE(file.ok()) << file.status().message();
  auto tokenizer = Tokenizer::from_metadata(file->metadata());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  auto chat = Chat::create(file->metadata(), *tokenizer, name);
  return {std::move(*file), std::move(*tokenizer), std::move(chat)};
}

TEST(Chat, RendersWhatTheTemplatesRender) {
  const auto recorded = nlohmann::json::parse(std::ifstream(test::golden("chat_prompts.json")));
  int compared = 0;
  for (const auto& [name, rows] : recorded.items()) {
    const auto opened = open_chat(vocabulary(sketches().at(name)), formats().at(name));
    ASSERT_TRUE(opened.chat.ok()) << opened.chat.status().message();
    for (const auto& row : rows) {
      const bool generate = row["generate"];
      if (name == "phi3" && !generate) continue;  // there the template ends a training sample with EOS
      Messages messages;
      for (const auto& m : row["messages"]) messages.push_back({m["role"], m["content"]});
      const auto text = opened.chat->render(messages, generate);
      if (row["prompt"].is_null()) {
        EXPECT_FALSE(text.ok()) << name;
        continue;
      }
      ASSERT_TRUE(text.ok()) << text.status().message();
      EXPECT_EQ(*text, row["prompt"].get<std::string>()) << name;
      // The ids are those of the whole text: splitting it into literals and content changes nothing.
      const auto ids = opened.chat->encode(messages, generate);
      const auto whole = opened.tokenizer.encode(*text, false, true);
      ASSERT_TRUE(ids.ok() && whole.ok());
      EXPECT_EQ(*ids, *whole) << name;
      ++compared;
    }
  }
  EXPECT_GT(compared, 35);
}

TEST(Chat, SmolLm2UsesItsOwnTemplate) {
  const std::string path = test::fetched_model("SmolLM2-135M-Instruct.Q4_1.gguf");
  if (path.empty()) GTEST_SKIP() << "SmolLM2-135M-Instruct.Q4_1.gguf is absent: run scripts/fetch_models";
  auto file = GgufFile::open(path);
  ASSERT_TRUE(file.ok());
  auto tokenizer = Tokenizer::from_metadata(file->metadata());
  ASSERT_TRUE(tokenizer.ok());
  auto chat = Chat::create(file->metadata(), *tokenizer);
  ASSERT_TRUE(chat.ok()) << chat.status().message();
  const Messages messages = {{"user", "Hello"}};
  EXPECT_EQ(*chat->render(messages, true),
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n");
  const auto ids = chat->encode(messages, true);
  ASSERT_TRUE(ids.ok());
  EXPECT_EQ(*ids, *tokenizer->encode(*chat->render(messages, true), false, true));
  EXPECT_EQ(chat->description(), "template of the file");
}

TEST(Chat, ContentNeverBecomesAControlToken) {
  for (const int32_t type : {3, 4}) {  // control, and files that call their markers user-defined
    for (const auto& [name, sketch] : sketches()) {
      const auto opened = open_chat(vocabulary(sketch, type), formats().at(name));
      ASSERT_TRUE(opened.chat.ok()) << name << ": " << opened.chat.status().message();
      const auto count = [&](const std::string& content) {
        const auto ids = opened.chat->encode(Messages{{"user", content}}, true);
        EXPECT_TRUE(ids.ok());
        return std::count_if(ids->begin(), ids->end(), [&](int32_t id) {
          return opened.tokenizer.is_control(id) || opened.tokenizer.is_user_defined(id);
        });
      };
      std::string attack = "x";
      for (const std::string_view marker : opened.chat->format().markers()) attack += marker;
      attack += "<|bos|><|eos|>";
      EXPECT_EQ(count(attack), count("x")) << name << " type " << type;
    }
  }
}

TEST(Chat, BosComesOnceWhoeverAsksForIt) {
  for (const bool adds : {false, true}) {
    for (const auto& [name, sketch] : sketches()) {
      auto mk = vocabulary(sketch);
      mk.boolean("tokenizer.ggml.add_bos_token", adds);
      const auto opened = open_chat(mk, formats().at(name));
      ASSERT_TRUE(opened.chat.ok());
      const auto ids = *opened.chat->encode(Messages{{"user", "hi"}}, true);
      const bool expected = adds || sketch.find("bos_token") != std::string::npos;
      EXPECT_EQ(std::count(ids.begin(), ids.end(), *opened.tokenizer.bos()), expected ? 1 : 0) << name;
      EXPECT_EQ(ids.front() == *opened.tokenizer.bos(), expected) << name;
    }
  }
}

TEST(Chat, NextTurnContinuesTheCachedIds) {
  for (const auto& [name, sketch] : sketches()) {
    const auto opened = open_chat(vocabulary(sketch), formats().at(name));
    ASSERT_TRUE(opened.chat.ok());
    const Messages first = {{"user", "one"}};
    const Messages next = {{"user", "two\n"}};
    const Messages all = {first[0], {"assistant", "answer"}, next[0]};
    const auto answer = *opened.tokenizer.encode("answer", false, false);
    for (const bool ended : {false, true}) {
      const auto prompt = *opened.chat->pieces(first, true);
      auto ids = *opened.chat->encode_pieces(prompt);
      ids.insert(ids.end(), answer.begin(), answer.end());
      if (ended) ids.push_back(opened.chat->end_of_turn());
      const auto whole = *opened.chat->pieces(all, true);
      const auto next_read = opened.chat->follow(ids, joined_text(prompt) + "answer", whole);
      ASSERT_TRUE(next_read.ok()) << next_read.status().message();
      EXPECT_EQ(next_read->keep, int64_t(ids.size())) << name << " ended " << ended;
      EXPECT_LT(next_read->ids.size(), size_t(60));
      ids.insert(ids.end(), next_read->ids.begin(), next_read->ids.end());
      EXPECT_EQ(ids, *opened.chat->encode(all, true)) << name << " ended " << ended;
    }
  }
}

TEST(Chat, UnknownTemplatesAreRefusedAndCanBeChosen) {
  const std::string go = "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>{{ end }}{{ range .Messages }}";
  const std::string open = "{% for message in messages %}[INST] <<SYS>>{{ message['content'] }}<</SYS>> [/INST]";
  const std::string filter = "{% for message in messages %}{{ message.content | hyphenate }}{% endfor %}";
  for (const std::string& text : {go, open, filter, std::string()}) {
    const auto refused = open_chat(vocabulary(text));
    ASSERT_FALSE(refused.chat.ok()) << text;
    EXPECT_EQ(refused.chat.status().code(), Code::kUnsupported);
    for (const char* word : {"--chat-template", "--chat-template-file", "chatml", "mistral", "phi3"}) {
      EXPECT_NE(refused.chat.status().message().find(word), std::string::npos) << word;
    }
    for (const char* format : {"chatml", "llama3", "mistral", "gemma", "phi3"}) {
      const auto chosen = open_chat(vocabulary(text), format);
      ASSERT_TRUE(chosen.chat.ok()) << chosen.chat.status().message();
      EXPECT_STREQ(chosen.chat->format().name(), format);
    }
  }
  const auto unknown = open_chat(vocabulary(""), "vicuna");
  ASSERT_FALSE(unknown.chat.ok());
  EXPECT_EQ(unknown.chat.status().code(), Code::kInvalidArgument);
}

TEST(Chat, AFormatWhoseTokensAreMissingIsRefused) {
  const auto opened = open_chat(test::TinyBpe({}).file(), "chatml");
  ASSERT_FALSE(opened.chat.ok());
  EXPECT_NE(opened.chat.status().message().find("<|im_start|>"), std::string::npos);
}

TEST(Chat, RolesOutOfPlaceAreErrors) {
  const auto chatml = open_chat(vocabulary(sketches().at("smollm2")), "chatml");
  const auto gemma = open_chat(vocabulary(sketches().at("gemma")), "gemma");
  const auto refused = [](const Opened& opened, const Messages& messages) {
    const auto text = opened.chat->render(messages, true);
    return !text.ok() && text.status().code() == Code::kInvalidArgument;
  };
  EXPECT_TRUE(refused(chatml, {{"user", "a"}, {"system", "late"}}));
  EXPECT_TRUE(refused(chatml, {{"tool", "a"}}));
  EXPECT_TRUE(refused(gemma, {{"user", "a"}, {"user", "b"}}));
  EXPECT_TRUE(refused(gemma, {{"assistant", "a"}}));
  EXPECT_TRUE(refused(gemma, {{"system", "a"}, {"user", "b"}}));
  EXPECT_FALSE(refused(chatml, {{"user", "a"}, {"user", "b"}}));
}

}  // namespace
}  // namespace longkv
