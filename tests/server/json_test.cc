// Answers held to JSON: the acceptor against a JSON library, schemas, and a model that must answer so.
#include <random>

#include "harness.h"
#include "server/json_grammar.h"

namespace longkv::server {
namespace {

bool accepts(const JsonSchema& schema, const std::string& text) {
  JsonAcceptor acceptor(schema);
  return acceptor.push(text) && acceptor.complete();
}

std::shared_ptr<const JsonSchema> compiled(const json& schema) {
  auto result = JsonSchema::compile(schema);
  EXPECT_TRUE(result.ok()) << result.status().message();
  return *result;
}

TEST(JsonGrammar, TakesWhatIsJsonAndNothingElse) {
  const auto any = compiled(json::object());
  for (const char* good : {"{}", "[]", " [1, -2.5e3 ,\n\"x\"] ", "\"\"", "\"\\u00e9\\n\\\\\"", "\"é😀\"", "0", "-0.5",
                           "1e9", "true", "false", "null", "{\"a\":{\"b\":[[],{}]},\"c\":null}", "\"\\ud7ff\""}) {
    // Blanks after the end are not part of an answer.
    std::string text = good;
    while (text.back() == ' ') text.pop_back();
    EXPECT_TRUE(accepts(*any, text)) << good;
    EXPECT_TRUE(json::accept(text)) << good;
  }
  for (const char* bad : {"",
                          "{",
                          "[1,]",
                          "{\"a\"}",
                          "{\"a\":1,}",
                          "{a:1}",
                          "01",
                          "1.",
                          ".5",
                          "-",
                          "1e",
                          "+1",
                          "tru",
                          "'x'",
                          "\"\n\"",
                          "\"\\x\"",
                          "\"\\ud800\"",
                          "\"\xff\"",
                          "\"\xc0\x80\"",
                          "\"\xed\xa0\x80\"",
                          "\"\xf4\x90\x80\x80\"",
                          "[1 2]",
                          "{\"a\" 1}",
                          "nulll",
                          "[}",
                          "1 2"})
    EXPECT_FALSE(accepts(*any, bad)) << bad;
  EXPECT_TRUE(accepts(*JsonSchema::any_object(), "{\"a\":[1]}"));
  EXPECT_FALSE(accepts(*JsonSchema::any_object(), "[1]"));
}

TEST(JsonGrammar, IsBounded) {
  const auto any = compiled(json::object());
  EXPECT_FALSE(JsonAcceptor(*any).push(std::string(100000, '[')));
  EXPECT_FALSE(JsonAcceptor(*any).push("[" + std::string(1000, ' ')));
  EXPECT_FALSE(JsonAcceptor(*any).push(std::string(100, '9')));
  json deep = {{"type", "integer"}};
  for (int i = 0; i < 100; ++i) deep = {{"type", "array"}, {"items", deep}};
  EXPECT_EQ(JsonSchema::compile(deep).status().code(), Code::kInvalidArgument);
  json wide = {{"type", "object"}, {"properties", json::object()}};
  for (int i = 0; i < 100; ++i) wide["properties"][std::to_string(i)] = {{"type", "null"}};
  EXPECT_EQ(JsonSchema::compile(wide).status().code(), Code::kInvalidArgument);
}

// Any text of a random walk through the acceptor is JSON for the library, and every rejected byte breaks it.
TEST(JsonGrammar, RandomWalksAreJson) {
  std::mt19937 random(1);
  const std::string alphabet = "{}[]\",:0123456789.eE+-tfnrualse \n\\x\xc3\xa9";
  const auto object = JsonSchema::any_object();
  int completed = 0;
  for (int walk = 0; walk < 3000; ++walk) {
    JsonAcceptor acceptor(*object);
    std::string text;
    for (int i = 0; i < 400 && !acceptor.closed(); ++i) {
      const char c = alphabet[random() % alphabet.size()];
      if (acceptor.push({&c, 1})) text += c;
    }
    if (!acceptor.closed()) continue;
    ++completed;
    ASSERT_TRUE(json::accept(text)) << text;
  }
  EXPECT_GT(completed, 100);
}

TEST(JsonGrammar, Schemas) {
  const json schema = {
      {"type", "object"},
      {"properties",
       {{"name", {{"type", "string"}, {"minLength", 1}, {"maxLength", 5}}},
        {"age", {{"type", "integer"}}},
        {"tags",
         {{"type", "array"}, {"items", {{"enum", {"red", "green", 7, nullptr}}}}, {"minItems", 1}, {"maxItems", 2}}},
        {"note", {{"type", {"string", "null"}}}}}},
      {"required", {"name", "age"}}};
  const auto s = compiled(schema);
  for (const char* good :
       {R"({"name":"Ada","age":36})", R"({"age":-1,"name":"é😀xyz"})",
        R"({"name":"A","age":0,"tags":["red",7],"note":null})", R"({"name":"A","age":0,"tags":[null],"note":""})"})
    EXPECT_TRUE(accepts(*s, good)) << good;
  for (const char* bad :
       {R"({"name":"Ada"})", R"({"name":"","age":1})", R"({"name":"toolong","age":1})", R"({"name":"A","age":1.5})",
        R"({"name":"A","age":1,"extra":1})", R"({"name":"A","name":"B","age":1})", R"({"name":"A","age":1,"tags":[]})",
        R"({"name":"A","age":1,"tags":["blue"]})", R"({"name":"A","age":1,"tags":[7,7,7]})", R"({"name":null,"age":1})",
        R"({"n\u0061me":"A","age":1})", "[]"})
    EXPECT_FALSE(accepts(*s, bad)) << bad;
  const auto open = compiled({{"type", "object"},
                              {"properties", {{"a", {{"type", "null"}}}}},
                              {"additionalProperties", {{"type", "boolean"}}}});
  EXPECT_TRUE(accepts(*open, R"({"a":null,"b":true,"ab":false})"));
  EXPECT_FALSE(accepts(*open, R"({"a":true})"));
  EXPECT_FALSE(accepts(*open, R"({"b":1})"));
  // A name that came does not come again as one of the others.
  EXPECT_FALSE(accepts(*open, R"({"a":null,"a":true})"));
  EXPECT_TRUE(accepts(*compiled({{"type", "null"}, {"minLength", 3}, {"maxLength", 2}}), "null"));
  EXPECT_TRUE(accepts(*compiled({{"type", "array"}, {"minItems", 1.0}, {"maxItems", 2.0}}), "[1]"));
  // Names that only 'required' has.
  for (const json& more : {json::object(), json{{"properties", json::object()}}}) {
    json schema_of_names = {{"type", "object"}, {"required", {"x"}}};
    schema_of_names.update(more);
    const auto named = compiled(schema_of_names);
    EXPECT_TRUE(accepts(*named, R"({"x":[1,"a"]})")) << schema_of_names;
    EXPECT_FALSE(accepts(*named, R"({})")) << schema_of_names;
    EXPECT_EQ(accepts(*named, R"({"x":1,"y":2})"), more.empty()) << schema_of_names;
  }
  for (const json& wrong : {json{{"type", "thing"}}, json{{"type", json::array()}}, json{{"type", json(8, "null")}},
                            json{{"oneOf", json::array()}}, json{{"enum", json::array()}}, json(5),
                            json{{"required", {1}}}, json{{"minLength", -1}}, json{{"minLength", 1.5}}, json(true)})
    EXPECT_EQ(JsonSchema::compile(wrong).status().code(), Code::kInvalidArgument) << wrong;
}

// A contradiction takes out the type, member or value that it concerns; an error is what leaves nothing.
TEST(JsonGrammar, Contradictions) {
  const json never = {{"type", "array"}, {"minItems", 3}, {"maxItems", 2}};
  const json closed = {{"required", {"x"}}, {"additionalProperties", false}};
  auto objects = closed;
  objects["type"] = "object";
  for (const json& wrong : {never, objects, json{{"type", "string"}, {"minLength", 3}, {"maxLength", 2}},
                            json{{"type", "string"}, {"enum", {1, nullptr}}}, json{{"enum", {1, 2}}, {"const", 3}},
                            json{{"type", "object"}, {"properties", {{"a", never}}}, {"required", {"a"}}},
                            json{{"type", "array"}, {"items", false}, {"minItems", 1}},
                            json{{"type", "object"}, {"additionalProperties", never}, {"required", {"a"}}},
                            json{{"type", "array"}, {"maxItems", 1}, {"const", {1, 2}}}})
    EXPECT_EQ(JsonSchema::compile(wrong).status().code(), Code::kCorrupt) << wrong;
  EXPECT_TRUE(accepts(*compiled(closed), "[]"));
  EXPECT_FALSE(accepts(*compiled(closed), "{}"));
  const auto either = compiled({{"type", {"array", "null"}}, {"minItems", 3}, {"maxItems", 2}});
  EXPECT_TRUE(accepts(*either, "null"));
  EXPECT_FALSE(accepts(*either, "[1,1,1]"));
  EXPECT_TRUE(accepts(*compiled({{"type", "array"}, {"items", never}}), "[]"));
  EXPECT_FALSE(accepts(*compiled({{"type", "array"}, {"items", never}}), "[[1,1,1]]"));
  // Members without a value, among names and among others.
  for (const bool open : {false, true}) {
    const auto members = compiled(
        {{"type", "object"}, {"properties", {{"a", never}, {"ab", json::object()}}}, {"additionalProperties", open}});
    EXPECT_TRUE(accepts(*members, R"({"ab":1})"));
    // Refused at the end of its name: a value for it there is none, and the answer would be stuck.
    EXPECT_FALSE(JsonAcceptor(*members).push(R"({"a")"));
    EXPECT_TRUE(JsonAcceptor(*members).push(R"({"ab")"));
    EXPECT_EQ(accepts(*members, R"({"b":1})"), open);
  }
  const auto some = compiled({{"type", "integer"}, {"enum", {"7", 7.0, 8, 8.5, true}}});
  EXPECT_TRUE(accepts(*some, "7"));
  EXPECT_TRUE(accepts(*some, "8"));
  for (const char* bad : {"7.0", "\"7\"", "8.5", "true", "9"}) EXPECT_FALSE(accepts(*some, bad)) << bad;
  const auto both = compiled({{"enum", {"a", "b", json{{"n", 1}}}}, {"const", {{"n", 1.0}}}});
  EXPECT_FALSE(accepts(*both, "\"a\""));
  EXPECT_TRUE(accepts(*both, R"({"n":1})"));
  const json shape = {{"type", "object"},
                      {"properties", {{"n", {{"type", "integer"}}}}},
                      {"required", {"n"}},
                      {"enum", {{{"n", 1}}, {{"n", 1.5}}, {{"m", 1}}, {{"n", 2}, {"m", 1}}}}};
  EXPECT_TRUE(accepts(*compiled(shape), R"({"n":1})"));
  EXPECT_FALSE(accepts(*compiled(shape), R"({"n":1.5})"));
  EXPECT_FALSE(accepts(*compiled(shape), R"({"m":1})"));
}

TEST(JsonGrammar, CallsOfFunctions) {
  const auto parameters = [](json schema) { return std::make_shared<const json>(std::move(schema)); };
  const json city = {{"type", "object"}, {"properties", {{"city", {{"type", "string"}}}}}, {"required", {"city"}}};
  const std::vector<JsonSchema::Function> functions = {
      {"weather", parameters(city)}, {"weather_now", nullptr}, {"say \"hi\"", parameters(json::object())}};
  const auto call = JsonSchema::call_of(functions, "arguments");
  ASSERT_TRUE(call.ok()) << call.status().message();
  for (const char* good :
       {R"({"name": "weather", "arguments": {"city":"Bonn"}})", R"({"name": "weather_now", "arguments": { }})",
        R"({"name": "say \"hi\"", "arguments": {"x":[1]}})"})
    EXPECT_TRUE(accepts(**call, good)) << good;
  for (const char* bad :
       {R"({"name": "weather", "arguments": {}})", R"({"name": "weather", "arguments": {"city":"Bonn"})",
        R"({"name": "weather", "arguments": {"city":"Bonn"}} )", R"({"name": "weather_now", "arguments": {"a":1}})",
        R"({"name": "time", "arguments": {}})", R"({"name": "weathe", "arguments": {}})", R"({"name": "weather_now"})",
        R"({"name": "say \"hi\"", "arguments": [1]})", R"({"arguments": {}, "name": "weather_now"})", "{}",
        R"({"name": "weather", "parameters": {"city":"Bonn"}})", R"( {"name": "weather_now", "arguments": {}})",
        R"({"name": "weather_now", "arguments":  {}})", R"({"name": "weather_now", "arguments": {} })"})
    EXPECT_FALSE(accepts(**call, bad)) << bad;
  EXPECT_TRUE(
      accepts(**JsonSchema::call_of(functions, "parameters"), R"({"name": "weather", "parameters": {"city":"Bonn"}})"));
  EXPECT_EQ(JsonSchema::call_of({}, "arguments").status().code(), Code::kInvalidArgument);
  EXPECT_EQ(JsonSchema::call_of(std::vector<JsonSchema::Function>(65, functions[1]), "arguments").status().code(),
            Code::kInvalidArgument);
  EXPECT_EQ(JsonSchema::call_of({{"f", parameters({{"oneOf", {}}})}}, "arguments").status().code(),
            Code::kInvalidArgument);
  EXPECT_EQ(JsonSchema::call_of({{"f", parameters({{"type", "string"}})}}, "arguments").status().code(),
            Code::kCorrupt);
  EXPECT_EQ(JsonSchema::call_of({{"f", parameters({{"enum", {1, "a"}}})}}, "arguments").status().code(),
            Code::kCorrupt);
  EXPECT_TRUE(accepts(**JsonSchema::call_of({{"f", parameters({{"enum", {1, {{"a", 2}}}}})}}, "arguments"),
                      R"({"name": "f", "arguments": {"a":2}})"));
}

TEST(JsonGrammar, BlanksInARowEnd) {
  const auto schema = JsonSchema::any_object();
  for (const std::string blank : {" ", "\t", "\n", "\r"}) {
    std::string run;
    for (int i = 0; i < 20; ++i) run += blank;
    EXPECT_TRUE(accepts(*schema, "{" + run + "\"a\"" + run + ":" + run + "1" + run + "}"));
    EXPECT_FALSE(accepts(*schema, "{" + run + blank + "\"a\":1}"));
    EXPECT_FALSE(accepts(*schema, "{\"a\":" + run + blank + "1}"));
  }
}

TEST(JsonGrammar, AModelAnswersInJson) {
  std::string path = test::fetched_model("SmolLM2-135M-Instruct.Q4_1.gguf");
  if (path.empty()) GTEST_SKIP() << "SmolLM2 was not fetched";
  TestServer server({}, path);
  const json schema = {
      {"type", "object"},
      {"properties",
       {{"city", {{"type", "string"}, {"maxLength", 20}}},
        {"people", {{"type", "integer"}}},
        {"capital", {{"type", "boolean"}}},
        {"sights", {{"type", "array"}, {"items", {{"type", "string"}, {"maxLength", 15}}}, {"maxItems", 3}}}}},
      {"required", {"city", "people", "capital", "sights"}}};
  for (const double temperature : {0.0, 1.5}) {
    for (int seed = 0; seed < (temperature > 0 ? 4 : 1); ++seed) {
      json body = chat("Describe a city.", {{"max_tokens", 300}, {"temperature", temperature}, {"seed", seed}});
      body["response_format"] = {{"type", "json_schema"}, {"json_schema", {{"name", "city"}, {"schema", schema}}}};
      const json choice = server.post("/v1/chat/completions", body).parsed()["choices"][0];
      ASSERT_EQ(choice["finish_reason"], "stop") << choice;
      const json answer = json::parse(choice["message"]["content"].get<std::string>(), nullptr, false);
      ASSERT_FALSE(answer.is_discarded()) << choice;
      EXPECT_TRUE(answer["people"].is_number_integer());
      EXPECT_TRUE(answer["capital"].is_boolean());
      EXPECT_LE(answer["sights"].size(), 3u);
    }
  }
  json body =
      chat("Give me a JSON object about a cat.", {{"max_tokens", 200}, {"response_format", {{"type", "json_object"}}}});
  const json choice = server.post("/v1/chat/completions", body).parsed()["choices"][0];
  if (choice["finish_reason"] == "stop") {
    EXPECT_TRUE(json::parse(choice["message"]["content"].get<std::string>(), nullptr, false).is_object()) << choice;
  }
}

}  // namespace
}  // namespace longkv::server
