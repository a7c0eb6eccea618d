// Calls of tools in answers.
#include "harness.h"
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

// A template that writes tools and calls as `call` says.
std::string tool_template(const std::string& call) {
  return "{% for tool in tools %}{{ tool['function']['name'] }}\n{% endfor %}{% for message in messages %}"
         "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['tool_calls'] %}{% for c in message['tool_calls'] "
         "%}" +
         call +
         "{% endfor %}{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
}

const char* const kHermes =
    "<tool_call>\n{\"name\": \"{{ c['function']['name'] }}\", \"arguments\": {{ c['function']['arguments'] "
    "}}}\n</tool_call>";

json function(const std::string& name, const json& parameters) {
  return {{"type", "function"}, {"function", {{"name", name}, {"parameters", parameters}}}};
}

json some_tools() {
  const json place = {{"type", "object"},
                      {"properties",
                       {{"city", {{"enum", {"bonn", "rome"}}}},
                        {"days", {{"type", "integer"}, {"enum", {1, 2, 3}}}},
                        {"note", {{"type", "string"}, {"maxLength", 4}}}}},
                      {"required", {"city", "days"}},
                      {"additionalProperties", false}};
  return {function("weather", place), {{"type", "function"}, {"function", {{"name", "time"}}}}};
}

// The tiny model writes letters as it likes and knows nothing of JSON: what makes its answers calls is the grammar.
class Demanded : public ::testing::Test {
 protected:
  static std::string model(const std::string& call, const std::string& name) {
    auto tiny = test::tiny_chat_model();
    tiny.chat_template = tool_template(call);
    return tiny.write(name);
  }
  // The one call of an answer, whole and streamed, which must be the same.
  static json call_of(TestServer& server, json body) {
    const Reply reply = server.post("/v1/chat/completions", body);
    EXPECT_EQ(reply.status, 200) << reply.body;
    const json choice = reply.parsed()["choices"][0];
    EXPECT_EQ(choice["finish_reason"], "tool_calls") << choice;
    EXPECT_TRUE(choice["message"]["content"].is_null()) << choice;
    EXPECT_EQ(choice["message"]["tool_calls"].size(), 1u) << choice;
    body["stream"] = true;
    json streamed;
    std::string text, finish;
    for (const std::string& m : server.post("/v1/chat/completions", body).messages()) {
      if (m == "[DONE]") continue;
      const json c = json::parse(m)["choices"][0];
      text += c["delta"].value("content", "");
      if (c["delta"].contains("tool_calls")) streamed = c["delta"]["tool_calls"][0];
      if (!c["finish_reason"].is_null()) finish = c["finish_reason"];
    }
    EXPECT_EQ(text, "");
    EXPECT_EQ(finish, "tool_calls");
    const json call = choice["message"]["tool_calls"][0];
    EXPECT_EQ(streamed["function"], call["function"]);
    EXPECT_EQ(call["type"], "function");
    return call["function"];
  }
};

TEST_F(Demanded, AnAnswerIsACallOfOneOfTheTools) {
  TestServer server({}, model(kHermes, "hermes.gguf"));
  int weather = 0, time = 0;
  for (int seed = 0; seed < 12; ++seed) {
    const json f = call_of(server, chat("x", {{"tools", some_tools()},
                                              {"tool_choice", "required"},
                                              {"temperature", 2},
                                              {"seed", seed},
                                              {"max_tokens", 200}}));
    const json arguments = json::parse(f["arguments"].get<std::string>());
    if (f["name"] == "time") {
      ++time;
      EXPECT_EQ(arguments, json::object());
      continue;
    }
    ++weather;
    EXPECT_EQ(f["name"], "weather");
    EXPECT_TRUE(arguments["city"] == "bonn" || arguments["city"] == "rome") << arguments;
    EXPECT_TRUE(arguments["days"].is_number_integer()) << arguments;
    EXPECT_LE(arguments.value("note", "").size(), 4u) << arguments;
    for (const auto& [name, value] : arguments.items())
      EXPECT_TRUE(name == "city" || name == "days" || name == "note") << name;
  }
  EXPECT_GT(weather, 0);
  EXPECT_GT(time, 0);
}

TEST_F(Demanded, TheToolThatIsNamed) {
  TestServer server({}, model(kHermes, "hermes.gguf"));
  for (const char* name : {"weather", "time"}) {
    for (int seed = 0; seed < 4; ++seed) {
      const json f = call_of(server, chat("x", {{"tools", some_tools()},
                                                {"tool_choice", {{"type", "function"}, {"function", {{"name", name}}}}},
                                                {"temperature", 2},
                                                {"seed", seed},
                                                {"max_tokens", 200}}));
      EXPECT_EQ(f["name"], name);
    }
  }
  // What is cut is no call, and says so.
  const json choice = server
                          .post("/v1/chat/completions",
                                chat("x", {{"tools", some_tools()}, {"tool_choice", "required"}, {"max_tokens", 9}}))
                          .parsed()["choices"][0];
  EXPECT_EQ(choice["finish_reason"], "length");
  EXPECT_FALSE(choice["message"].contains("tool_calls"));
  EXPECT_EQ(choice["message"]["content"], "{\"name\": ");
  // Without a demand the model is free.
  EXPECT_FALSE(server.post("/v1/chat/completions", chat("x", {{"tools", some_tools()}, {"max_tokens", 60}}))
                   .parsed()["choices"][0]["message"]
                   .contains("tool_calls"));
}

// The answer begins as the template writes calls.
TEST_F(Demanded, InTheFormOfTheTemplate) {
  const std::string llama =
      "{{ '<|python_tag|>' if c['builtin'] else '' }}{\"name\": \"{{ c['function']['name'] }}\", \"parameters\": {{ "
      "c['function']['arguments'] }}}";
  const std::string mistral =
      "[TOOL_CALLS] [{\"name\": \"{{ c['function']['name'] }}\", \"arguments\": {{ c['function']['arguments'] }}}]";
  const std::string words = "{{ c['function']['name'] }}({{ c['function']['arguments'] }})";
  const std::tuple<std::string, const char*, const char*> forms[] = {{kHermes, "<tool_call>\n", "arguments"},
                                                                     {llama, "", "parameters"},
                                                                     {mistral, "[TOOL_CALLS] [", "arguments"},
                                                                     {words, "", "arguments"}};
  for (const auto& [call, opening, arguments] : forms) {
    TestServer server({}, model(call, "form.gguf"));
    const json body = {{"messages", chat("x")["messages"]}, {"tools", some_tools()}};
    json demanding = body;
    demanding["tool_choice"] = "required";
    EXPECT_EQ(server.post("/apply-template", demanding).parsed()["prompt"].get<std::string>(),
              server.post("/apply-template", body).parsed()["prompt"].get<std::string>() + opening);
    EXPECT_STREQ(server.service().call_form().arguments, arguments);
    const json more = {
        {"tools", some_tools()}, {"tool_choice", "required"}, {"temperature", 2}, {"seed", 3}, {"max_tokens", 250}};
    EXPECT_EQ(call_of(server, chat("x", more)).size(), 2u);
  }
}

TEST_F(Demanded, WhatCannotBe) {
  TestServer server({}, model(kHermes, "hermes.gguf"));
  TestServer plain;
  const auto refused = [](TestServer& s, const json& more, int status, const std::string& param,
                          const std::string& what) {
    const Reply reply = s.post("/v1/chat/completions", chat("x", more));
    EXPECT_EQ(reply.status, status) << reply.body;
    const json error = reply.parsed()["error"];
    EXPECT_EQ(error["param"], param) << reply.body;
    EXPECT_NE(error["message"].get<std::string>().find(what), std::string::npos) << reply.body;
  };
  const auto named = [](const json& name) { return json{{"type", "function"}, {"function", {{"name", name}}}}; };
  refused(plain, {{"tools", some_tools()}, {"tool_choice", "required"}}, 400, "tools", "chat format");
  refused(plain, {{"tool_choice", "required"}}, 422, "tool_choice", "no 'tools'");
  refused(server, {{"tool_choice", "required"}, {"tools", json::array()}}, 422, "tool_choice", "no 'tools'");
  refused(server, {{"tool_choice", named("time")}}, 422, "tool_choice", "'time', which is not among");
  refused(server, {{"tools", some_tools()}, {"tool_choice", named("rm")}}, 422, "tool_choice",
          "'rm', which is not among");
  for (const json& wrong : {json("any"), json(1), json::array(), json::object(), named(3), json{{"type", "function"}}})
    refused(server, {{"tools", some_tools()}, {"tool_choice", wrong}}, 400, "tool_choice",
            "must be auto, none, required");
  refused(server,
          {{"tools", some_tools()}, {"tool_choice", "required"}, {"response_format", {{"type", "json_object"}}}}, 422,
          "tool_choice", "give one");
  for (const json& choice : {json("required"), named("time")})
    refused(server, {{"tools", some_tools()}, {"tool_choice", choice}, {"stop", {"}"}}}, 422, "stop", "cut the call");
  json many = json::array();
  for (int i = 0; i < 65; ++i) many.push_back(function("f" + std::to_string(i), {{"type", "object"}}));
  refused(server, {{"tools", many}, {"tool_choice", "required"}}, 422, "tools", "of 64 tools at most; found 65");
  // Which of two is called could not be told, and a name that is empty cannot be called.
  for (const json& choice : {json(), json("auto"), json("none"), json("required")}) {
    const json object = {{"type", "object"}};
    refused(server,
            {{"tools", {function("f", object), function("g", object), function("f", object)}}, {"tool_choice", choice}},
            422, "tools", "two functions of the name 'f'");
    refused(server, {{"tools", {function("", object)}}, {"tool_choice", choice}}, 400, "tools", "is empty");
    refused(server, {{"tools", 5}, {"tool_choice", choice}}, 400, "tools", "a list of at most");
  }
  EXPECT_EQ(
      server.post("/v1/chat/completions", chat("x", {{"tools", some_tools()}, {"stop", {"q"}}, {"max_tokens", 2}}))
          .status,
      200);
  refused(server, {{"tools", {function("f", {{"oneOf", json::array()}})}}, {"tool_choice", "required"}}, 400, "tools",
          "'oneOf' is not supported");
  refused(server, {{"tools", {function("f", {{"type", "string"}})}}, {"tool_choice", "required"}}, 422, "tools",
          "no object satisfies it");
  // Only what is demanded must be understood.
  EXPECT_EQ(server
                .post("/v1/chat/completions", chat("x", {{"tools", {function("f", {{"oneOf", json::array()}})}},
                                                         {"tool_choice", "auto"},
                                                         {"max_tokens", 4}}))
                .status,
            200);
}

}  // namespace
}  // namespace longkv::server
