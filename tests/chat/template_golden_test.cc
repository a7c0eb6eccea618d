// Templates of many models against what Transformers makes of them (tests/golden/templates/generate.py), and every
// construct of the language by itself.
#include <gtest/gtest.h>
#include <xxhash.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "chat/template.h"
#include "gguf/gguf.h"
#include "support/paths.h"

namespace longkv {
namespace {

using Json = nlohmann::ordered_json;

std::string read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

std::string joined(const std::vector<ChatPiece>& pieces) {
  std::string text;
  for (const ChatPiece& piece : pieces) text += piece.text;
  return text;
}

// 2026-02-03 04:05:06 local time, as in generate.py.
std::time_t fixed_time() {
  std::tm parts{};
  parts.tm_year = 126, parts.tm_mon = 1, parts.tm_mday = 3, parts.tm_hour = 4, parts.tm_min = 5, parts.tm_sec = 6;
  parts.tm_isdst = -1;
  return std::mktime(&parts);
}

Result<std::vector<ChatPiece>> render(const ChatTemplate& chat_template, const Json& given) {
  TemplateInput input;
  input.messages = &given["messages"];
  input.tools = &given["tools"];
  Json variables = given["variables"];
  Json documents;
  if (variables.contains("documents")) {
    documents = variables["documents"];
    variables.erase("documents");
  }
  input.documents = &documents;
  input.variables = &variables;
  input.add_generation_prompt = given["add_generation_prompt"];
  input.bos_token = "<BOS>";
  input.eos_token = "<EOS>";
  input.now = fixed_time();
  return chat_template.render(input);
}

std::string hash_line(const std::string& text) {
  char hex[17];
  std::snprintf(hex, sizeof hex, "%016llx", static_cast<unsigned long long>(XXH3_64bits(text.data(), text.size())));
  return std::to_string(text.size()) + " " + hex;
}

// The text of a template by its name in renders.txt; empty when it is not on this machine.
std::string template_text(const std::string& name) {
  const size_t colon = name.find(":tokenizer.");
  if (colon == std::string::npos) {
    const std::string path = test::fetched_model("templates/" + name);
    return path.empty() ? std::string() : read(path);
  }
  const std::string path = test::fetched_model(name.substr(0, colon));
  if (path.empty()) return {};
  const auto file = GgufFile::open(path);
  if (!file.ok()) return {};
  const auto text = file->metadata().string(name.substr(colon + 1));
  return text.ok() ? std::string(*text) : std::string();
}

TEST(ChatTemplateGolden, TemplatesOfManyModels) {
  const Json conversations = Json::parse(read(test::golden("templates/conversations.json")));
  std::istringstream lines(read(test::golden("templates/renders.txt")));
  std::string line;
  ASSERT_TRUE(std::getline(lines, line)) << "no goldens";
  int compared = 0, templates = 0, missing = 0;
  std::optional<ChatTemplate> current;
  std::string name;
  auto conversation = conversations.end();
  while (std::getline(lines, line)) {
    if (line.starts_with("T ")) {
      ASSERT_TRUE(conversation == conversations.end()) << "renders.txt is cut before " << line;
      current.reset();
      name = line.substr(line.find(' ', line.find(' ', 2) + 1) + 1);
      conversation = conversations.begin();
      const std::string text = template_text(name);
      if (text.empty() || !line.starts_with("T " + hash_line(text) + " ")) {
        ++missing;
        continue;
      }
      auto parsed = ChatTemplate::parse(text);
      // All of those recorded compile; one that does not would have a line "C ...".
      ASSERT_TRUE(parsed.ok()) << name << ": " << parsed.status().message();
      current = std::move(*parsed);
      ++templates;
      continue;
    }
    ASSERT_TRUE(conversation != conversations.end()) << line;
    const std::string where = name + ", conversation " + conversation.key();
    const Json& given = conversation.value();
    ++conversation;
    if (!current) continue;
    ++compared;
    const auto pieces = render(*current, given);
    if (!line.starts_with("E ")) {
      EXPECT_TRUE(pieces.ok()) << where << ": " << pieces.status().message();
      if (pieces.ok()) {
        EXPECT_EQ(hash_line(joined(*pieces)), line) << where << "\n" << joined(*pieces);
      }
      continue;
    }
    EXPECT_FALSE(pieces.ok()) << where << ": expected " << line;
    // "E 12 TemplateError reason": the same line and reason wherever the template itself raises the error.
    std::istringstream words(line.substr(2));
    std::string at, kind, reason;
    words >> at >> kind;
    std::getline(words, reason);
    for (size_t i = reason.find("\\n"); i != std::string::npos; i = reason.find("\\n", i + 1))
      reason.replace(i, 2, "\n");
    if (kind == "TemplateError" && !pieces.ok()) {
      EXPECT_EQ(pieces.status().message(), "chat template, line " + at + ":" + reason) << where;
    }
  }
  if (templates == 0) GTEST_SKIP() << "no chat templates here; scripts/fetch_models --vocab fetches them";
  RecordProperty("compared", compared);
  std::printf("%d templates, %d renderings compared; %d templates are not on this machine\n", templates, compared,
              missing);
}

TEST(ChatTemplateGolden, Constructs) {
  const Json all = Json::parse(read(test::golden("templates/constructs.json")));
  const Json values = Json::parse(read(test::golden("templates/values.json")));
  ASSERT_GT(all.size(), 100u);
  for (size_t i = 1; i < all.size(); ++i) {
    const Json& c = all[i];
    const std::string source = c["source"];
    const auto parsed = ChatTemplate::parse(source);
    Status status = parsed.status();
    std::string text;
    if (parsed.ok()) {
      Json given = values;
      given["add_generation_prompt"] = true;
      const auto pieces = render(*parsed, given);
      status = pieces.status();
      if (pieces.ok()) text = joined(*pieces);
    }
    if (c.contains("text")) {
      EXPECT_TRUE(status.ok()) << source << "\n" << status.message();
      if (status.ok()) {
        EXPECT_EQ(text, c["text"].get<std::string>()) << source;
      }
    } else {
      EXPECT_FALSE(status.ok()) << source << "\n" << text;
      const std::string at = "chat template, line " + std::to_string(c["line"].get<int>()) + ": ";
      EXPECT_TRUE(status.message().starts_with(at)) << source << "\n" << status.message();
      if (c["error"] == "TemplateError") {
        EXPECT_EQ(status.message(), at + c["message"].get<std::string>());
      }
    }
  }
}

}  // namespace
}  // namespace longkv
