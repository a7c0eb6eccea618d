// Every route of a running server: what it answers, whole and as a stream.
#include <sys/stat.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <thread>

#include "harness.h"

namespace longkv::server {
namespace {

TEST(Routes, ChatCompletion) {
  TestServer server;
  const json j = server.post("/v1/chat/completions", chat("hello", {{"max_tokens", 12}})).parsed();
  EXPECT_EQ(j["object"], "chat.completion");
  EXPECT_EQ(j["model"], "tiny");
  EXPECT_EQ(j["choices"][0]["message"]["role"], "assistant");
  EXPECT_EQ(j["choices"][0]["message"]["content"].get<std::string>().size(), 12u);  // a letter a token
  EXPECT_EQ(j["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(j["usage"]["completion_tokens"], 12);
  EXPECT_EQ(j["usage"]["total_tokens"], j["usage"]["prompt_tokens"].get<int>() + 12);
  EXPECT_EQ(j["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
  EXPECT_EQ(server.post("/chat/completions", chat("hello", {{"max_tokens", 12}})).parsed()["choices"], j["choices"]);
}

TEST(Routes, AStreamIsTheWholeAnswerInPieces) {
  TestServer server;
  const json more = {{"max_tokens", 20}, {"logprobs", true}, {"top_logprobs", 3}};
  const json whole = server.post("/v1/chat/completions", chat("stream", more)).parsed();
  json streamed = chat("stream", more);
  streamed["stream"] = true;
  streamed["stream_options"] = {{"include_usage", true}};
  streamed["return_progress"] = true;
  const Reply reply = server.post("/v1/chat/completions", streamed);
  EXPECT_NE(reply.head.find("text/event-stream"), std::string::npos);
  const auto messages = reply.messages();
  ASSERT_GT(messages.size(), 5u);
  EXPECT_EQ(messages.back(), "[DONE]");
  std::string text, finish;
  json logprobs = json::array(), usage;
  int64_t progress = -1;
  for (size_t i = 0; i + 1 < messages.size(); ++i) {
    const json m = json::parse(messages[i]);
    EXPECT_EQ(m["object"], "chat.completion.chunk");
    if (i == 0) {
      EXPECT_EQ(m["choices"][0]["delta"]["role"], "assistant");
    }
    if (m.contains("usage")) usage = m["usage"];
    if (m.contains("prompt_progress")) {
      EXPECT_EQ(text, "");
      EXPECT_GE(m["prompt_progress"]["processed"].get<int64_t>(), progress);
      progress = m["prompt_progress"]["processed"];
      if (progress == m["prompt_progress"]["total"]) progress = 1 << 30;
    }
    for (const json& c : m["choices"]) {
      EXPECT_TRUE(finish.empty()) << "something follows the end";
      text += c["delta"].value("content", "");
      if (!c["finish_reason"].is_null()) finish = c["finish_reason"];
      if (!c["logprobs"].is_null())
        for (const json& t : c["logprobs"]["content"]) logprobs.push_back(t);
    }
  }
  EXPECT_EQ(progress, 1 << 30) << "the prompt's last progress says that all is read";
  EXPECT_EQ(json(text), whole["choices"][0]["message"]["content"]);
  EXPECT_EQ(finish, "length");
  EXPECT_EQ(logprobs, whole["choices"][0]["logprobs"]["content"]);
  EXPECT_EQ(usage["completion_tokens"], 20);
  double sum = 0;
  for (const json& t : logprobs[0]["top_logprobs"]) sum += std::exp(t["logprob"].get<double>());
  EXPECT_LE(sum, 1.0 + 1e-9);
  EXPECT_EQ(logprobs[0]["top_logprobs"][0]["token"], logprobs[0]["token"]) << "greedy takes the likeliest";
}

TEST(Routes, CompletionsAndTheirOwnNames) {
  TestServer server;
  const json j = server.post("/v1/completions", completion("abc")).parsed();
  EXPECT_EQ(j["object"], "text_completion");
  EXPECT_EQ(j["choices"][0]["text"].get<std::string>().size(), 16u) << "OpenAI's default length";
  const json echoed =
      server.post("/v1/completions", completion("abc", {{"echo", true}, {"logprobs", 2}, {"max_tokens", 2}}))
          .parsed()["choices"][0];
  EXPECT_EQ(echoed["text"], "abc" + j["choices"][0]["text"].get<std::string>().substr(0, 2));
  EXPECT_EQ(echoed["logprobs"]["tokens"].size(), 5u);
  EXPECT_TRUE(echoed["logprobs"]["token_logprobs"][0].is_null());
  EXPECT_LT(echoed["logprobs"]["token_logprobs"][1].get<double>(), 0);
  EXPECT_EQ(echoed["logprobs"]["top_logprobs"][4].size(), 2u);
  // As on the command line, below 0 is greedy too.
  EXPECT_EQ(server.post("/v1/completions", completion("abc", {{"temperature", -1}})).parsed()["choices"], j["choices"]);
  // Token ids are the same prompt.
  const json ids = server.post("/tokenize", json{{"content", "abc"}}).parsed()["tokens"];
  EXPECT_EQ(
      server.post("/v1/completions", json{{"prompt", json::array({ids})}, {"temperature", 0}}).parsed()["choices"],
      j["choices"]);
  const json native =
      server.post("/completion", completion("abc", {{"n_predict", 16}, {"return_tokens", true}, {"n_probs", 1}}))
          .parsed();
  EXPECT_EQ(native["content"], j["choices"][0]["text"]);
  EXPECT_EQ(native["tokens"].size(), 16u);
  EXPECT_EQ(native["stop_type"], "limit");
  EXPECT_EQ(native["completion_probabilities"].size(), 16u);
  EXPECT_EQ(server.post("/completion", json{{"prompt", {"ab", ids[2]}}, {"n_predict", 16}, {"temperature", 0}})
                .parsed()["content"],
            native["content"])
      << "text and ids mixed";
}

TEST(Routes, TheServersLimitOfAnAnswer) {
  TestServer server([](ServiceOptions& s, HttpOptions&) { s.max_tokens = 5; });
  const auto length = [&](const char* path, json body) {
    const json j = server.post(path, body).parsed();
    EXPECT_EQ(j["choices"][0]["finish_reason"], "length") << j;
    return j["usage"]["completion_tokens"].get<int64_t>();
  };
  EXPECT_EQ(length("/v1/completions", completion("abc")), 5);
  EXPECT_EQ(length("/v1/completions", completion("abc", {{"max_tokens", 6}})), 5);
  EXPECT_EQ(length("/v1/completions", completion("abc", {{"max_tokens", 3}})), 3);
  EXPECT_EQ(length("/v1/completions", completion("abc", {{"n_predict", -1}})), 5);
  EXPECT_EQ(length("/v1/completions", completion("abc", {{"max_tokens", 0}})), 0);
  EXPECT_EQ(length("/v1/chat/completions", chat("abc", {{"ignore_eos", true}})), 5);
}

TEST(Routes, StopStringsAcrossTokensAreNeverShown) {
  TestServer server;
  const std::string text =
      server.post("/v1/completions", completion("abc", {{"max_tokens", 40}})).parsed()["choices"][0]["text"];
  ASSERT_EQ(text.size(), 40u);
  for (const size_t at : {1u, 7u, 20u}) {
    const std::string stop = text.substr(at, 3);
    const size_t first = text.find(stop);
    const json more = {{"max_tokens", 40}, {"stop", {"never", stop}}};
    const json j = server.post("/v1/completions", completion("abc", more)).parsed()["choices"][0];
    EXPECT_EQ(j["text"], text.substr(0, first));
    EXPECT_EQ(j["finish_reason"], "stop");
    json streamed = completion("abc", more);
    streamed["stream"] = true;
    std::string all;
    for (const std::string& m : server.post("/v1/completions", streamed).messages()) {
      if (m != "[DONE]") all += json::parse(m)["choices"][0]["text"].get<std::string>();
    }
    EXPECT_EQ(all, text.substr(0, first));
  }
}

TEST(Routes, TokenizeDetokenizeTemplate) {
  TestServer server;
  const json tokens =
      server.post("/tokenize", json{{"content", "<|im_start|>é"}, {"with_pieces", true}}).parsed()["tokens"];
  ASSERT_EQ(tokens.size(), 3u);
  EXPECT_EQ(tokens[0]["piece"], "<|im_start|>");
  EXPECT_EQ(tokens[1]["piece"], json::array({0xc3})) << "half a character comes as bytes";
  const json plain = server.post("/tokenize", json{{"content", "<|im_start|>é"}, {"parse_special", false}}).parsed();
  EXPECT_GT(plain["tokens"].size(), 3u);
  EXPECT_EQ(server.post("/detokenize", plain).parsed()["content"], "<|im_start|>é");
  const std::string prompt =
      server.post("/apply-template", json{{"messages", chat("hi")["messages"]}}).parsed()["prompt"];
  EXPECT_NE(prompt.find("<|im_start|>user\nhi<|im_end|>"), std::string::npos);
  EXPECT_TRUE(prompt.ends_with("<|im_start|>assistant\n"));
}

TEST(Routes, WhatIsKnown) {
  TestServer server;
  EXPECT_EQ(server.get("/v1/health").parsed()["status"], "ok");
  const json models = server.get("/v1/models").parsed();
  EXPECT_EQ(models["data"][0]["id"], "tiny");
  EXPECT_EQ(models["data"][0]["meta"]["n_ctx"], 512);
  const json props = server.get("/props").parsed();
  EXPECT_EQ(props["total_slots"], 2);
  EXPECT_EQ(props["kv"], json::array({"full", "quest"}));
  server.post("/v1/completions", completion("abc"));
  // Counted a moment after the answer.
  ASSERT_TRUE(server.until_slots(all_idle, 5));
  const std::string metrics = server.get("/metrics").body;
  for (const char* line : {"llamacpp:tokens_predicted_total 16\n", "vllm:generation_tokens_total 16\n",
                           "longkv:requests_total{end=\"length\"} 1\n", "llamacpp:requests_processing 0\n"})
    EXPECT_NE(metrics.find(line), std::string::npos) << line << metrics;
  const json slots = server.get("/slots").parsed();
  EXPECT_EQ(slots.size(), 2u);
  EXPECT_TRUE(all_idle(slots));
  EXPECT_EQ(server.get("/slots?fail_on_no_slot=1").status, 200);
  EXPECT_NE(server.get("/").body.find("<html"), std::string::npos);
}

// Every path of the description is served, and what is served is described.
TEST(Routes, TheDescriptionIsTrue) {
  TestServer server;
  const json spec = server.get("/openapi.json").parsed();
  EXPECT_EQ(spec["info"]["version"], "0.1.0") << "a quoted number is a text";
  EXPECT_NE(server.get("/openapi.yaml").body.find("openapi: 3.1.0"), std::string::npos);
  ASSERT_GT(spec["paths"].size(), 10u);
  for (const auto& [path, methods] : spec["paths"].items()) {
    std::string address = path;
    if (const size_t at = address.find("{id}"); at != std::string::npos) address.replace(at, 4, "0");
    for (const auto& [method, operation] : methods.items()) {
      const Reply reply = method == "get" ? server.get(address) : server.post_text(address, "{}");
      EXPECT_TRUE(method == "get" ? reply.status == 200 : reply.status == 400) << method << " " << path << reply.status;
      for (const char* other : {"GET", "POST", "PUT", "DELETE", "PATCH", "TRACE", "QUERY"}) {
        if (method == (other == std::string("GET") ? "get" : other == std::string("POST") ? "post" : "")) continue;
        const Reply refused = server.send(request_text(other, address, "{}"));
        EXPECT_EQ(refused.status, 405) << other << path;
        EXPECT_NE(refused.head.find(method == "get" ? "Allow: GET, HEAD, OPTIONS" : "Allow: POST, OPTIONS"),
                  std::string::npos)
            << refused.head;
      }
    }
  }
  // A field of the description that the server does not know would be refused by name.
  const json& schemas = spec["components"]["schemas"];
  ASSERT_GT(schemas["CompletionFields"]["properties"].size(), 40u);
  for (const auto& [name, schema] : schemas["CompletionFields"]["properties"].items()) {
    json body = completion("abc", {{"max_tokens", 1}});
    if (!body.contains(name)) body[name] = json();
    EXPECT_EQ(server.post("/v1/completions", body).status, 200) << name;
    EXPECT_EQ(server.post("/completion", body).status, 200) << name;
  }
  for (const auto& [name, schema] : schemas["ChatRequest"]["properties"].items()) {
    json body = chat("abc", {{"max_tokens", 1}});
    if (!body.contains(name)) body[name] = json();
    EXPECT_EQ(server.post("/v1/chat/completions", body).status, 200) << name;
  }
  // What this server allows.
  EXPECT_EQ(schemas["Recipe"]["enum"].size(), server.service().recipe_names().size() + 1);
  EXPECT_EQ(schemas["TokenId"]["maximum"], server.service().model().config().vocab - 1);
  EXPECT_EQ(schemas["WantedSlot"]["maximum"], 1);
}

TEST(Routes, SlotsCanBeErased) {
  TestServer server;
  server.post("/v1/completions", completion("abc", {{"id_slot", 1}}));
  // What /slots says is copied a moment after an answer's end.
  const auto held = [&] { return server.get("/slots").parsed()[1]["n_tokens"].get<int>(); };
  const auto comes_to_hold = [&](bool some) {
    for (int i = 0; i < 500 && (held() > 0) != some; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return (held() > 0) == some;
  };
  EXPECT_TRUE(comes_to_hold(true));
  EXPECT_GT(server.post_text("/slots/1?action=erase", "").parsed()["n_erased"].get<int>(), 0);
  EXPECT_TRUE(comes_to_hold(false));
  EXPECT_EQ(server.post_text("/slots/7?action=erase", "").status, 400);
  EXPECT_EQ(server.post_text("/slots/0?action=explode", "").status, 400);
}

TEST(Routes, SlotsAreSavedAndRestored) {
  const std::string folder = test::temp_path("slots");
  std::filesystem::create_directories(folder);
  const auto with_folder = [&](ServiceOptions& s, HttpOptions& h) {
    h.slot_folder = folder;
    s.scheduler.session.chunk = 32;
  };
  const std::string prompt(300, 'q');
  json first;
  {
    TestServer server(with_folder);
    first = server.post("/v1/completions", completion(prompt, {{"id_slot", 0}})).parsed();
    const json saved = server.post("/slots/0?action=save", json{{"filename", "book.kv"}}).parsed();
    EXPECT_EQ(saved["n_saved"], 315);
    EXPECT_GT(saved["n_written"].get<int64_t>(), 0);
    for (const char* bad : {"../book.kv", "/etc/passwd", ".hidden", "a/b", "", "a b"})
      EXPECT_EQ(server.post("/slots/0?action=save", json{{"filename", bad}}).status, 400) << bad;
    EXPECT_EQ(server.post("/slots/0?action=save", json{{"filename", 5}}).status, 400);
    EXPECT_EQ(server.post("/slots/0?action=restore", json{{"filename", "absent"}}).status, 404);
    // A file under another recipe is refused, as is one that is none; the slot holds what it held.
    std::ofstream(folder + "/noise.kv") << std::string(5000, 'n');
    EXPECT_EQ(server.post("/slots/0?action=restore", json{{"filename", "noise.kv"}}).status, 409);
    EXPECT_EQ(server.post("/slots/0?action=restore", json{{"filename", "book.kv"}, {"kv", "quest"}}).status, 409);
    const json kept = server.post("/v1/completions", completion(prompt, {{"id_slot", 0}})).parsed();
    EXPECT_EQ(kept["choices"], first["choices"]);
    EXPECT_EQ(kept["usage"]["prompt_tokens_details"]["cached_tokens"], 288);
    EXPECT_EQ(server.post("/slots/1?action=restore", json{{"filename", "book.kv"}, {"kv", "quest"}}).status, 409);
    EXPECT_EQ(server.post("/v1/completions", completion(prompt, {{"id_slot", 1}})).parsed()["choices"],
              first["choices"]);
    std::filesystem::create_directories(folder + "/folder");
    ASSERT_EQ(::mkfifo((folder + "/pipe").c_str(), 0600), 0);
    for (const char* name : {"folder", "pipe"}) {
      EXPECT_EQ(server.post("/slots/0?action=restore", json{{"filename", name}}).status, 409) << name;
      EXPECT_EQ(server.post("/slots/0?action=save", json{{"filename", name}}).status, 409) << name;
    }
    EXPECT_EQ(server.post("/slots/0?action=save&action=erase", json{{"filename", "twice.kv"}}).status, 400);
    // Without a name, one of the slot's; before anything was saved under it there is nothing to restore.
    EXPECT_EQ(server.post_text("/slots/0?action=restore", "").status, 404);
    EXPECT_EQ(server.post_text("/slots/0?action=save", "").parsed()["filename"], "slot-0.kv");
    EXPECT_EQ(server.post_text("/slots/0?action=restore", "").parsed()["n_restored"], 315);
    EXPECT_EQ(server.post_text("/slots/1?action=save", "").parsed()["filename"], "slot-1.kv");
    // Nobody saves what belongs to another key.
    EXPECT_EQ(server.post_text("/slots/0?action=save", "", "X-Api-Key: other\r\n").status, 403);
    std::filesystem::create_symlink("/etc/passwd", folder + "/link");
    EXPECT_EQ(server.post("/slots/0?action=restore", json{{"filename", "link"}}).status, 400);
  }
  TestServer server(with_folder);
  EXPECT_EQ(server.post("/slots/1?action=restore", json{{"filename", "book.kv"}}).parsed()["n_restored"], 315);
  const json again = server.post("/v1/completions", completion(prompt)).parsed();
  EXPECT_EQ(again["choices"], first["choices"]);
  EXPECT_EQ(again["usage"]["prompt_tokens_details"]["cached_tokens"], 288);
  EXPECT_EQ(TestServer().post("/slots/1?action=restore", json{{"filename", "book.kv"}}).status, 501);
}

TEST(Routes, ARecipeOfTheRequest) {
  TestServer server;
  const json full = server.post("/v1/completions", completion("abc")).parsed();
  const json quest = server.post("/v1/completions", completion("abc", {{"kv", "quest"}, {"kv_check", 1}})).parsed();
  EXPECT_NE(quest["timings"]["kv"]["recipe"], full["timings"]["kv"]["recipe"]);
  EXPECT_NEAR(quest["timings"]["kv"]["captured_mass"].get<double>(), 1.0, 1e-6) << "the budget covers this prompt";
  EXPECT_EQ(quest["choices"], full["choices"]);
  const Reply refused = server.post("/v1/completions", completion("abc", {{"kv", "snapkv"}}));
  EXPECT_EQ(refused.status, 400);
  EXPECT_EQ(refused.parsed()["error"]["param"], "kv");
}

}  // namespace
}  // namespace longkv::server
