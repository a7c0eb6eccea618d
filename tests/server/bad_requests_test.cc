// What is wrong is told to whoever sent it, and the server goes on.
#include "harness.h"

namespace longkv::server {
namespace {

void expect_error(const Reply& reply, int status, const std::string& what) {
  EXPECT_EQ(reply.status, status) << what << reply.body;
  const json j = reply.parsed();
  ASSERT_TRUE(j.contains("error")) << what;
  EXPECT_EQ(j["error"]["code"], status);
  EXPECT_FALSE(j["error"]["message"].get<std::string>().empty());
  EXPECT_FALSE(j["error"]["type"].get<std::string>().empty());
}

TEST(BadRequests, WrongFields) {
  TestServer server;
  const std::pair<const char*, json> wrong[] = {{"temperature", "hot"},
                                                {"temperature", -101},
                                                {"temperature", 101},
                                                {"top_p", 2},
                                                {"top_k", 1.5},
                                                {"max_tokens", "many"},
                                                {"max_tokens", -2},
                                                {"max_tokens", 1e300},
                                                {"stop", 7},
                                                {"stop", json::array({1})},
                                                {"stop", json::array({std::string(5000, 'x')})},
                                                {"stream", "yes"},
                                                {"stream_options", {{"include_usage", true}}},
                                                {"n", 2},
                                                {"best_of", 3},
                                                {"logit_bias", {{"999999", 1}}},
                                                {"logit_bias", {{"x", 1}}},
                                                {"logit_bias", "x"},
                                                {"logit_bias", {{"1", "y"}}},
                                                {"seed", "s"},
                                                {"seed", 18446744073709551615ull},
                                                {"logprobs", 50},
                                                {"response_format", "json"},
                                                {"response_format", {{"type", "xml"}}},
                                                {"response_format", {{"type", "json_schema"}}},
                                                {"response_format", {{"type", 3}}},
                                                {"json_schema", {{"type", "widget"}}},
                                                {"json_schema", {{"$ref", "#"}}},
                                                {"kv", "nonsense"},
                                                {"kv", 3},
                                                {"kv_check", -1},
                                                {"kv_reuse", "maybe"},
                                                {"id_slot", 99},
                                                {"samplers", {"magic"}},
                                                {"samplers", 4},
                                                {"grammar", "root ::= x"},
                                                {"suffix", "tail"},
                                                {"tools", json::array({json::object()})},
                                                {"tool_choice", "required"},
                                                {"tool_choice", {{"type", "function"}, {"function", {{"name", "f"}}}}},
                                                {"function_call", {{"name", "f"}}},
                                                {"timeout", -1},
                                                {"no_such_field", 1},
                                                {"prompt", 5},
                                                {"prompt", {1, -1}},
                                                {"prompt", {1, 99999999}},
                                                {"prompt", {"a", "b"}},
                                                {"prompt", {"a", 7}},
                                                {"prompt", {7, "a"}},
                                                {"prompt", json::array({{7, "a"}})},
                                                {"prompt", json::array({json::array({"a"})})},
                                                {"prompt", json::array()},
                                                {"prompt", ""},
                                                {"messages", json::array()},
                                                {"repeat_penalty", 0},
                                                {"presence_penalty", 1e9},
                                                {"echo", 1}};
  for (const auto& [name, value] : wrong) {
    json body = completion("abc");
    body[name] = value;
    expect_error(server.post("/v1/completions", body), 400, std::string(name) + " " + value.dump().substr(0, 60) + " ");
  }
  const json messages[] = {json(),
                           5,
                           json::array(),
                           {5},
                           json::array({json::object()}),
                           json::array({{{"role", "user"}}}),
                           json::array({{{"role", "alien"}, {"content", "x"}}}),
                           json::array({{{"role", 1}, {"content", "x"}}}),
                           json::array({{{"role", "user"}, {"content", 5}}}),
                           json::array({{{"role", "user"}, {"content", json::array({{{"type", "image_url"}}})}}})};
  for (const json& m : messages)
    expect_error(server.post("/v1/chat/completions", json{{"messages", m}}), 400, m.dump());
  expect_error(server.post("/v1/chat/completions", chat("x", {{"top_logprobs", 3}})), 400, "top_logprobs ");
  expect_error(server.post("/v1/chat/completions", chat("x", {{"tools", json::array({1})}})), 400, "tools ");
  EXPECT_EQ(server.post("/v1/completions", completion("abc")).status, 200);
}

// Whatever ends an answer early would leave less than the JSON that was asked for.
TEST(BadRequests, StopBesideAFormat) {
  TestServer server;
  const json schema = {{"type", "object"}, {"properties", {{"a", {{"type", "string"}}}}}};
  const std::pair<const char*, json> formats[] = {
      {"response_format", {{"type", "json_object"}}},
      {"response_format", {{"type", "json_schema"}, {"json_schema", {{"schema", schema}}}}},
      {"json_schema", schema}};
  for (const auto& [name, value] : formats) {
    for (const char* path : {"/v1/chat/completions", "/v1/completions", "/completion"}) {
      const auto body = [&](const json& stop) {
        json more = {{name, value}, {"stop", stop}, {"max_tokens", 4}};
        return std::string_view(path).find("chat") != std::string_view::npos ? chat("x", more) : completion("x", more);
      };
      for (const json& stop : {json("\""), json::array({"a", "b"})}) {
        const Reply reply = server.post(path, body(stop));
        expect_error(reply, 422, std::string(path) + " " + name + " ");
        EXPECT_EQ(reply.parsed()["error"]["param"], "stop");
      }
      for (const json& none : {json(), json(""), json::array()}) EXPECT_EQ(server.post(path, body(none)).status, 200);
    }
  }
  EXPECT_EQ(
      server.post("/v1/chat/completions", chat("x", {{"response_format", {{"type", "text"}}}, {"stop", "a"}})).status,
      200);
}

// JSON's reader keeps 64 bits of a whole number; the rest would be made up.
TEST(BadRequests, NumbersAreNeverAltered) {
  TestServer server;
  const auto body = [](const std::string& value) {
    return R"({"prompt":"a","max_tokens":200,"json_schema":{"const":)" + value + "}}";
  };
  for (const char* number : {"123456789012345678901234567890", "18446744073709551616", "-9223372036854775809"}) {
    for (const std::string& value : {std::string(number), "[1," + std::string(number) + "]"}) {
      const Reply reply = server.post_text("/v1/completions", body(value));
      expect_error(reply, 422, value);
      EXPECT_NE(reply.body.find(number), std::string::npos) << reply.body;
    }
  }
  for (const char* number : {"18446744073709551615", "-9223372036854775808", "0", "1.5"}) {
    const Reply reply = server.post_text("/v1/completions", body(number));
    ASSERT_EQ(reply.status, 200) << number << reply.body;
    const json answer = json::parse(reply.parsed()["choices"][0]["text"].get<std::string>(), nullptr, false);
    EXPECT_EQ(answer.dump(), number) << reply.body;
  }
  EXPECT_EQ(server.post("/v1/completions", completion("123456789012345678901234567890", {{"max_tokens", 1}})).status,
            200);
}

TEST(BadRequests, SchemasThatContradictThemselves) {
  TestServer server;
  const json schema = {{"type", "object"}, {"required", {"x"}}, {"additionalProperties", false}};
  for (const char* path : {"/v1/completions", "/completion"})
    expect_error(server.post(path, completion("abc", {{"json_schema", schema}})), 422, path);
  const json format = {{"type", "json_schema"}, {"json_schema", {{"name", "n"}, {"schema", schema}}}};
  expect_error(server.post("/v1/chat/completions", chat("abc", {{"response_format", format}})), 422, "chat ");
  json whole = completion("abc", {{"max_tokens", 4}});
  whole["json_schema"] = {{"type", "array"}, {"minItems", 1.0}};
  EXPECT_EQ(server.post("/v1/completions", whole).status, 200);
}

TEST(BadRequests, BodiesThatAreNoJson) {
  TestServer server;
  const std::string bodies[] = {"",
                                "{",
                                "[]",
                                "null",
                                "\"x\"",
                                "{\"prompt\":\"a\"",
                                "{\"prompt\":\"\xff\xfe\"}",
                                "{\"prompt\":\"\\ud800\"}",
                                "{'prompt':1}",
                                std::string(100000, '['),
                                "{\"a\":" + std::string(100000, '{'),
                                std::string("{\"prompt\":\"a\0b\"}", 16),
                                "{\"prompt\":\"a\"} trailing"};
  for (const std::string& body : bodies) {
    for (const char* path :
         {"/v1/completions", "/v1/chat/completions", "/completion", "/tokenize", "/detokenize", "/apply-template"})
      expect_error(server.post_text(path, body), 400, std::string(path) + " " + body.substr(0, 40) + " ");
  }
  expect_error(server.post("/tokenize", json{{"content", 5}}), 400, "tokenize ");
  expect_error(server.post("/detokenize", json{{"tokens", {-1}}}), 400, "detokenize ");
  expect_error(server.post("/detokenize", json{{"tokens", "x"}}), 400, "detokenize ");
  EXPECT_EQ(server.get("/health").status, 200);
}

TEST(BadRequests, APromptOverTheContext) {
  TestServer server;
  for (const bool stream : {false, true}) {
    const Reply reply = server.post("/v1/completions", completion(std::string(512, 'x'), {{"stream", stream}}));
    expect_error(reply, 400, "");
    const json error = reply.parsed()["error"];
    EXPECT_EQ(error["type"], "exceed_context_size_error");
    EXPECT_EQ(error["n_prompt_tokens"], 512);
    EXPECT_EQ(error["n_ctx"], 512);
  }
  // One token less leaves room for the one that the last logits give, and the one after it.
  const json j = server.post("/v1/completions", completion(std::string(511, 'x'), {{"max_tokens", 9}})).parsed();
  EXPECT_EQ(j["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(j["usage"]["completion_tokens"], 2);
}

TEST(BadRequests, PathsAndMethods) {
  TestServer server;
  expect_error(server.get("/nothing"), 404, "");
  expect_error(server.get("/v1/chat/completions"), 405, "");
  expect_error(server.post_text("/health", ""), 405, "");
  expect_error(server.post_text("/v1/embeddings", "{}"), 501, "");
  expect_error(server.get("/" + std::string(9000, 'a')), 414, "");
  EXPECT_EQ(server.get("/../../etc/passwd").status, 404);
  EXPECT_EQ(server.get("/%2e%2e/%2e%2e/etc/passwd").status, 404);
  expect_error(server.send(request_text("TRACE", "/nothing", "")), 404, "");
  expect_error(server.get("/slots?fail_on_no_slot=maybe"), 400, "");
  EXPECT_EQ(server.get("/slots?fail_on_no_slot=0").status, 200);
  // What follows a GET that has a body is not taken for a request.
  const std::string hidden = "GET /slots HTTP/1.1\r\nHost: localhost\r\n\r\n";
  Wire wire(server.port());
  wire.send("GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + std::to_string(hidden.size()) + "\r\n\r\n" +
            hidden);
  const std::string all = wire.read([](const std::string&) { return false; }, 5);
  EXPECT_TRUE(wire.closed());
  EXPECT_EQ(all.find("is_processing"), std::string::npos) << all;
}

TEST(BadRequests, NamesOfOneLengthMustAgree) {
  TestServer server;
  for (const char* path : {"/v1/completions", "/completion"}) {
    const auto with = [&](json more) {
      json body = completion("abc");
      body.update(more);
      return server.post(path, body);
    };
    const Reply refused = with({{"max_tokens", 3}, {"max_completion_tokens", 4}});
    expect_error(refused, 422, path);
    EXPECT_EQ(refused.parsed()["error"]["param"], "max_completion_tokens");
    expect_error(with({{"n_predict", 3}, {"max_tokens", -1}}), 422, path);
    const json same = with({{"n_predict", 3}, {"max_tokens", 3}, {"max_completion_tokens", 3}}).parsed();
    EXPECT_EQ(same["timings"]["predicted_n"], 3);
    EXPECT_EQ(with({{"max_tokens", nullptr}, {"n_predict", 2}}).parsed()["timings"]["predicted_n"], 2);
  }
  // A null is no length: OpenAI's default holds.
  EXPECT_EQ(
      server.post("/v1/completions", completion("abc", {{"max_tokens", nullptr}})).parsed()["timings"]["predicted_n"],
      16);
}

TEST(BadRequests, SizesAndSlowness) {
  TestServer server([](ServiceOptions&, HttpOptions& h) {
    h.limits.body_bytes = 10000;
    h.limits.head_time = std::chrono::milliseconds(300);
    h.limits.body_time = std::chrono::milliseconds(300);
  });
  expect_error(server.post_text("/v1/completions", std::string(20000, ' ')), 413, "");
  // The same without a length: chunks without end.
  Wire chunks(server.port());
  chunks.send("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n");
  for (int i = 0; i < 200 && chunks.send("400\r\n" + std::string(1024, ' ') + "\r\n"); ++i) {
  }
  const Reply reply = parse_reply(chunks.read([](const std::string&) { return false; }, 5));
  EXPECT_TRUE(reply.status == 0 || reply.status >= 400) << reply.status;
  // Headers without end, and a head and a body that never come.
  Wire headers(server.port());
  headers.send("GET /health HTTP/1.1\r\n");
  for (int i = 0; i < 2000 && headers.send("X-" + std::to_string(i) + ": " + std::string(100, 'x') + "\r\n"); ++i) {
  }
  headers.read([](const std::string&) { return false; }, 5);
  EXPECT_TRUE(headers.closed());
  for (const char* text :
       {"GET /heal", "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"}) {
    Wire slow(server.port());
    slow.send(text);
    const auto begin = std::chrono::steady_clock::now();
    slow.read([](const std::string&) { return false; }, 5);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(3)) << text;
    EXPECT_TRUE(slow.closed());
  }
  expect_error(server.post_text("/tokenize", "{}", "Content-Encoding: gzip\r\n"), 415, "");
  EXPECT_EQ(server.get("/health").status, 200);
}

// Heads that leave open where the body ends are answered at once; nobody waits for the body.
TEST(BadRequests, BodiesWithoutAClearEnd) {
  TestServer server;
  const std::string post = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n";
  const std::pair<std::string, int> cases[] = {
      {post + "Content-Length: 1000000000000\r\n", 413},
      {post + "Content-Length: 99999999999999999999\r\n", 413},
      {post + "Content-Length: -1\r\n", 400},
      {post + "Content-Length: abc\r\n", 400},
      {post + "Content-Length: +2\r\n", 400},
      {post + "Content-Length: 2\r\nContent-Length: 3\r\n", 400},
      {post + "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", 400},
      {post + "Transfer-Encoding: gzip\r\n", 400},
      {post, 400},  // no body: no JSON
      {"GET /health HTTP/1.1\r\n", 400},
      {"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n", 400},
      {"GET /health HTTP/1.0\r\n", 200},
  };
  for (const auto& [head, status] : cases) {
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_EQ(server.send(head + "Connection: close\r\n\r\n").status, status) << head;
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5)) << head;
  }
  EXPECT_EQ(server.get("/health").status, 200);
}

TEST(BadRequests, KeysOriginsAndHosts) {
  TestServer server([](ServiceOptions&, HttpOptions& h) {
    h.api_keys = {"secret-1", "secret-2"};
    h.origins = {"http://friend.example"};
  });
  EXPECT_EQ(server.get("/health").status, 200);
  EXPECT_EQ(server.get("/").status, 200);
  expect_error(server.get("/v1/models"), 401, "");
  expect_error(server.get("/openapi.yaml"), 401, "");
  for (const char* wrong : {"Authorization: Bearer secret-3\r\n", "Authorization: Bearer secret-11\r\n",
                            "Authorization: Bearer \r\n", "Authorization: Basic secret-1\r\n", "X-Api-Key: secret\r\n"})
    expect_error(server.get("/v1/models", wrong), 401, wrong);
  EXPECT_EQ(server.get("/v1/models", "Authorization: Bearer secret-2\r\n").status, 200);
  EXPECT_EQ(server.get("/v1/models", "X-Api-Key: secret-1\r\n").status, 200);
  expect_error(server.get("/v1/models", "X-Api-Key: secret-1\r\nOrigin: http://evil.example\r\n"), 403, "");
  const Reply friendly = server.get("/v1/models", "X-Api-Key: secret-1\r\nOrigin: http://friend.example\r\n");
  EXPECT_EQ(friendly.status, 200);
  EXPECT_NE(friendly.head.find("Access-Control-Allow-Origin: http://friend.example"), std::string::npos);
  EXPECT_EQ(server.get("/v1/models", "X-Api-Key: secret-1\r\nOrigin: http://localhost\r\n").status, 200);
  expect_error(server.send("GET /health HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"), 403, "");
  TestServer plain;
  EXPECT_EQ(plain.get("/health").head.find("Access-Control"), std::string::npos);
}

TEST(BadRequests, APortInUse) {
  TestServer server;
  HttpOptions o;
  o.port = server.port();
  HttpServer second(server.service(), o);
  const Status s = second.bind();
  EXPECT_EQ(s.code(), Code::kIo);
  EXPECT_NE(s.message().find("port"), std::string::npos);
  EXPECT_EQ(server.get("/health").status, 200);
}

}  // namespace
}  // namespace longkv::server
