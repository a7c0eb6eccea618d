// Calls of tools in answers.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "server/api_response.h"
#include "server/tool_calls.h"

namespace longkv::server {
namespace {

struct Taken {
  std::string shown, rest;
  std::vector<ToolCall> calls;
};

// In pieces of `step` bytes, as tokens cut a text anywhere.
Taken take(const std::string& text, size_t step) {
  ToolText tools({"weather", "time"});
  Taken out;
  for (size_t at = 0; at < text.size(); at += step) out.shown += tools.push(text.substr(at, step));
  out.calls = tools.finish(out.rest);
  return out;
}

TEST(ToolCalls, AsTheFamiliesWriteThem) {
  const std::string call = R"({"name": "weather", "arguments": {"city": "Bonn }", "days": [1, 2]}})";
  const std::string arguments = R"({"city":"Bonn }","days":[1,2]})";
  const std::string other = R"({"name":"time","parameters":{}})";
  for (size_t step : {1u, 3u, 7u, 1000u}) {
    const Taken one = take("Let me look.\n<tool_call>\n" + call + "\n</tool_call>", step);
    EXPECT_EQ(one.shown, "Let me look.\n");
    ASSERT_EQ(one.calls.size(), 1u);
    EXPECT_EQ(one.calls[0].name, "weather");
    EXPECT_EQ(one.calls[0].arguments, arguments);
    EXPECT_EQ(one.rest, "");
    const Taken two = take("<tool_call>" + call + "</tool_call>\n<tool_call>" + other + "</tool_call>", step);
    ASSERT_EQ(two.calls.size(), 2u);
    EXPECT_EQ(two.calls[1].arguments, "{}");
    EXPECT_EQ(take("[TOOL_CALLS] [" + call + ", " + other + "]", step).calls.size(), 2u);
    EXPECT_EQ(take(" " + other, step).calls.size(), 1u);
    EXPECT_EQ(take("<|python_tag|>" + other + "; " + call, step).calls.size(), 2u);
    EXPECT_EQ(take(R"({"name":"weather","arguments":"{\"city\":\"Rom\"}"})", step).calls.at(0).arguments,
              R"({"city":"Rom"})");
  }
}

TEST(ToolCalls, InAnswers) {
  ApiRequest request;
  request.generate.id = "chatcmpl-0123456789abcdef0123";
  request.tools = {"weather"};
  Finished end;
  end.timings.answer_tokens = 3;
  const auto piece = [](const char* text) { return TextPiece{text, {1}, {}}; };
  const std::vector<Event> events = {piece("Wait. "), piece("<tool_"), piece("call>{\"name\":\"weather\","),
                                     piece("\"arguments\":{\"city\":\"Bonn\"}}</tool_call>"), end};
  AnswerWriter whole(request, "m"), stream(request, "m");
  std::string out;
  for (const Event& e : events) whole.add(e), out += stream.stream(e);
  const auto choice = nlohmann::json::parse(whole.whole())["choices"][0];
  EXPECT_EQ(choice["finish_reason"], "tool_calls");
  EXPECT_EQ(choice["message"]["content"], "Wait. ");
  EXPECT_EQ(choice["message"]["tool_calls"][0]["function"]["arguments"], "{\"city\":\"Bonn\"}");
  std::string text;
  nlohmann::json calls, finish;
  for (size_t at = 0, to; (to = out.find("\n\n", at)) != std::string::npos; at = to + 2) {
    if (out.compare(at, 7, "data: [") == 0) continue;
    const auto c = nlohmann::json::parse(out.substr(at + 6, to - at - 6))["choices"][0];
    text += c["delta"].value("content", "");
    if (c["delta"].contains("tool_calls")) calls = c["delta"]["tool_calls"];
    if (!c["finish_reason"].is_null()) finish = c["finish_reason"];
  }
  EXPECT_EQ(text, "Wait. ");
  EXPECT_EQ(finish, "tool_calls");
  EXPECT_EQ(calls[0]["function"]["name"], "weather");
  EXPECT_EQ(calls[0]["id"], choice["message"]["tool_calls"][0]["id"]);
}

TEST(ToolCalls, WhatIsNoCallIsText) {
  for (const std::string text :
       {"Plain text, <tool_ and [TOOL as they are.", "{\"a\": 1} is an object", R"({"name":"rm","arguments":{}})",
        R"(<tool_call>{"name":"weather","arguments":[1]}</tool_call>)", "<tool_call>{\"name\":\"weather\"",
        "[TOOL_CALLS]", "<tool_call>", "", "  ", "[TOOL_CALLS] {\"name\":\"time\"}", R"({"name":"time"} and more)"}) {
    for (size_t step : {1u, 5u, 1000u}) {
      const Taken t = take(text, step);
      EXPECT_TRUE(t.calls.empty()) << text;
      EXPECT_EQ(t.shown + t.rest, text) << step;
    }
  }
  EXPECT_TRUE(take("<tool_call>" + std::string(100000, '{'), 100000).calls.empty());
  const std::string list = "[TOOL_CALLS][" + std::string(100000, '[');
  EXPECT_EQ(take(list, 1000).rest, list);
}

}  // namespace
}  // namespace longkv::server
