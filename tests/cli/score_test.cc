// `longkv score`: one line of JSON for every line of JSON.
#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "support/paths.h"
#include "support/program.h"
#include "support/tiny_model.h"

namespace longkv::test {
namespace {

using Json = nlohmann::json;

const std::string kText =
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; ";

std::vector<Json> replies(const std::vector<Json>& requests, const Args& more = {}, int code = 0) {
  ProgramInput input;
  for (const Json& r : requests) input.text += (r.is_string() ? r.get<std::string>() : r.dump()) + "\n";
  Args args = {"score", "-q", "-t", "2", "-m", repo_model("needle-10m-128k-f16.gguf")};
  if (std::find(more.begin(), more.end(), "-c") == more.end()) args.insert(args.end(), {"-c", "1K"});
  args.insert(args.end(), more.begin(), more.end());
  const Outcome o = longkv_program(args, input);
  EXPECT_EQ(o.exit_code, code) << o.err;
  return parsed_lines(o);
}

// Of a byte-level model: what follows a prompt in two steps follows it in one.
TEST(CliScore, LikelihoodsAddUp) {
  for (const std::string kv : {"full", "quest:budget=512"}) {
    const std::string a = "and darkness was", b = " upon the face of the deep";
    const auto r = replies({{{"id", "x"}, {"prompt", kText}, {"continuation", a + b}},
                            {{"prompt", kText}, {"continuation", a}},
                            {{"prompt", kText + a}, {"continuation", b}},
                            {{"prompt", ""}, {"continuation", kText + a}},
                            {{"text", kText + a}},
                            {{"prompt", ""}, {"continuation", kText}}},
                           {"--kv", kv});
    ASSERT_EQ(r.size(), 6u);
    EXPECT_EQ(r[0]["id"], "x");
    const auto value = [&](int i) { return r[size_t(i)]["log_likelihood"].get<double>(); };
    EXPECT_EQ(r[0]["tokens"], a.size() + b.size());
    EXPECT_LT(value(0), -1);
    EXPECT_NEAR(value(0), value(1) + value(2), 2e-3 * std::abs(value(0)));
    EXPECT_NEAR(value(3), value(4), 2e-3 * std::abs(value(3)));
    EXPECT_EQ(r[4]["tokens"], kText.size() + a.size());
    EXPECT_NEAR(value(3), value(5) + value(1), 2e-3 * std::abs(value(3)));
  }
}

TEST(CliScore, AGreedyAnswerIsGreedyAndAnotherIsNot) {
  const auto said = replies({{{"prompt", kText}, {"max_tokens", 12}}});
  ASSERT_EQ(said.size(), 1u);
  const std::string text = said[0]["text"];
  ASSERT_GT(text.size(), 4u);
  std::string other = text;
  other[3] = other[3] == 'q' ? 'x' : 'q';
  const std::string stop = text.substr(3, 2);
  const auto r = replies({{{"prompt", kText}, {"continuation", text}},
                          {{"prompt", kText}, {"continuation", other}},
                          {{"prompt", kText}, {"max_tokens", 12}, {"stop", Json::array({stop})}}});
  ASSERT_EQ(r.size(), 3u);
  EXPECT_EQ(r[0]["greedy"], true);
  EXPECT_EQ(r[1]["greedy"], false);
  EXPECT_EQ(r[2]["text"], text.substr(0, text.find(stop)));
  EXPECT_EQ(r[2]["finish"], "stop");
}

// What follows some tokens is scored as it is after these; tokens are counted with the BOS that stands before a text.
TEST(CliScore, TokensAreCountedAndSkipped) {
  const std::string tail = "and darkness was";
  const auto r = replies({{{"count", kText}},
                          {{"count", kText + tail}},
                          {{"prompt", kText}, {"continuation", tail}},
                          {{"text", kText + tail}, {"skip", kText.size() + 1}},
                          {{"text", kText}},
                          {{"text", kText}, {"skip", 1}}});
  ASSERT_EQ(r.size(), 6u);
  EXPECT_EQ(r[0]["tokens"], kText.size() + 1);
  EXPECT_EQ(r[1]["tokens"], kText.size() + tail.size() + 1);
  const auto value = [&](int i) { return r[size_t(i)]["log_likelihood"].get<double>(); };
  EXPECT_EQ(r[3]["tokens"], tail.size());
  EXPECT_NEAR(value(2), value(3), 1e-6 * std::abs(value(2)));
  EXPECT_EQ(r[5]["tokens"], kText.size());
  EXPECT_NEAR(value(4), value(5), 1e-6 * std::abs(value(4)));
  const auto bad = replies({{{"text", kText}, {"skip", 0}},
                            {{"text", kText}, {"skip", kText.size() + 1}},
                            {{"text", kText}, {"skip", "1"}},
                            {{"count", 3}}},
                           {}, 1);
  ASSERT_EQ(bad.size(), 4u);
  for (const Json& b : bad) EXPECT_TRUE(b.contains("error")) << b.dump();
}

// In windows of 64 every token is scored once, the first of a window after the last of the one before.
TEST(CliScore, LongTextsRollInWindows) {
  const std::string text = kText + kText;
  const auto whole = replies({{{"text", text}}}), windows = replies({{{"text", text}}}, {"-c", "64"});
  ASSERT_EQ(whole.size(), 1u);
  ASSERT_EQ(windows.size(), 1u);
  EXPECT_EQ(windows[0]["tokens"], text.size());
  // What windows forget costs likelihood: the second half repeats the first.
  EXPECT_LT(windows[0]["log_likelihood"].get<double>(), whole[0]["log_likelihood"].get<double>() - 10);
}

TEST(CliScore, WhatHasNoLinesIsRefused) {
  const std::string path = TinyModel().write("model.gguf");
  const Outcome o = longkv_program({"score", "-m", path, "-q", "-f", "/dev/zero"});
  EXPECT_TRUE(refuses(o, 2, "a line of more than 67108864 bytes"));
  EXPECT_LT(o.seconds, 10);
  EXPECT_TRUE(refuses(longkv_program({"score", "-m", path, "-q", "-f", std::filesystem::temp_directory_path()}), 1,
                      "it is a directory"));
}

TEST(CliScore, LinesThatMakeNoSenseAreRefusedAndTheOthersAnswered) {
  std::string deep = "{\"id\":";
  for (int i = 0; i < 100000; ++i) deep += "[";
  const std::vector<Json> requests = {"no json",
                                      deep,
                                      "[1]",
                                      Json{{"id", 7}, {"prompt", "a"}},
                                      Json{{"prompt", "a"}, {"continuation", "b"}, {"max_tokens", 3}},
                                      Json{{"prompt", 3}, {"continuation", "b"}},
                                      Json{{"prompt", "a"}, {"continuation", ""}},
                                      Json{{"prompt", "a"}, {"max_tokens", -1}},
                                      Json{{"prompt", std::string(2000, 'a')}, {"continuation", "b"}},
                                      Json{{"prompt", "a"}, {"max_tokens", 4}, {"stop", 3}},
                                      Json{{"prompt", "a"}, {"max_tokens", 4}, {"stops", {"x"}}},
                                      Json{{"prompt", "a"}, {"continuation", "b"}, {"stop", {"x"}}},
                                      Json{{"text", "a"}, {"prompt", "b"}},
                                      R"({"id": 123456789012345678901234567890, "text": "a"})",
                                      Json{{"id", 8}, {"prompt", "a"}, {"continuation", "b"}}};
  const auto r = replies(requests, {}, 1);
  ASSERT_EQ(r.size(), requests.size());
  for (size_t i = 0; i + 1 < r.size(); ++i) {
    EXPECT_TRUE(r[i].contains("error")) << r[i].dump();
    EXPECT_NE(r[i]["error"].get<std::string>().find("line " + std::to_string(i + 1) + ":"), std::string::npos);
  }
  EXPECT_EQ(r[3]["id"], 7);
  EXPECT_NE(r[8]["error"].get<std::string>().find("do not fit the context of 1024"), std::string::npos) << r[8].dump();
  EXPECT_NE(r[10]["error"].get<std::string>().find(
                "\"stops\" is not a key of such a request; known are id, prompt, max_tokens, stop"),
            std::string::npos)
      << r[10].dump();
  EXPECT_NE(r[11]["error"].get<std::string>().find("known are id, prompt, continuation"), std::string::npos);
  EXPECT_NE(r[12]["error"].get<std::string>().find("\"prompt\" is not a key"), std::string::npos);
  EXPECT_NE(r[13]["error"].get<std::string>().find("does not fit 64 bits"), std::string::npos);
  EXPECT_EQ(r.back()["id"], 8);
  EXPECT_EQ(r.back()["tokens"], 1);
}

}  // namespace
}  // namespace longkv::test
