// Clients that leave, do not read, or come in crowds.
#include <filesystem>
#include <random>

#include "harness.h"
#include "server/http_connection.h"

namespace longkv::server {
namespace {

std::string smol() { return test::fetched_model("SmolLM2-135M-Instruct.Q4_1.gguf"); }

bool has_text(const std::string& s) { return s.find("\"content\":\"") != std::string::npos; }

TEST(Streams, AClientThatLeavesFreesItsSlotWithinASecond) {
  if (smol().empty()) GTEST_SKIP() << "SmolLM2 was not fetched";
  TestServer server({}, smol());
  std::string text;
  for (int i = 0; i < 2500; ++i) text += "word ";
  for (const bool stream : {true, false}) {
    // While its prompt is read.
    Wire reader(server.port());
    reader.send(request_text("POST", "/v1/chat/completions", chat(text, {{"stream", stream}}).dump()));
    ASSERT_TRUE(server.until_slots([](const json& s) { return !all_idle(s); }, 5));
    reader.close();
    EXPECT_TRUE(server.until_slots(all_idle, 1.0)) << "reading, stream " << stream;
    // While it is answered.
    Wire listener(server.port());
    listener.send(request_text("POST", "/v1/chat/completions",
                               chat("Count to ten thousand.", {{"stream", stream}, {"ignore_eos", true}}).dump()));
    ASSERT_TRUE(server.until_slots(
        [](const json& s) { return s[0]["state"] == "answering" || s[1]["state"] == "answering"; }, 10));
    listener.close();
    EXPECT_TRUE(server.until_slots(all_idle, 1.0)) << "answering, stream " << stream;
  }
  const std::string metrics = server.get("/metrics").body;
  EXPECT_NE(metrics.find("longkv:requests_total{end=\"cancelled\"} 4\n"), std::string::npos);
}

TEST(Streams, AClientThatDoesNotReadIsLetGo) {
  TestServer server([](ServiceOptions&, HttpOptions& h) { h.limits.write_time = std::chrono::milliseconds(300); });
  std::vector<std::unique_ptr<Wire>> wires;
  for (int i = 0; i < 3; ++i) {
    wires.push_back(std::make_unique<Wire>(server.port()));
    wires.back()->small_buffer();
    wires.back()->send(request_text("POST", "/v1/chat/completions",
                                    chat("a", {{"stream", true}, {"logprobs", true}, {"top_logprobs", 20}}).dump()));
  }
  EXPECT_EQ(server.post("/v1/completions", completion("abc")).status, 200) << "others are served";
  EXPECT_TRUE(server.until_slots(all_idle, 10));
}

// Nothing is saved, put back or forgotten under an answer that runs.
TEST(Streams, ASlotThatAnswersIsLeftAlone) {
  if (smol().empty()) GTEST_SKIP() << "SmolLM2 was not fetched";
  const std::string folder = test::temp_path("busy_slots");
  std::filesystem::create_directories(folder);
  TestServer server([&](ServiceOptions&, HttpOptions& h) { h.slot_folder = folder; }, smol());
  const auto act = [&](const char* action) {
    return server.post_text(std::string("/slots/0?action=") + action, "").status;
  };
  EXPECT_EQ(act("save"), 200);
  Wire wire(server.port());
  wire.send(request_text(
      "POST", "/completion",
      completion("The river", {{"stream", true}, {"ignore_eos", true}, {"n_predict", 3000}, {"id_slot", 0}}).dump()));
  ASSERT_NE(wire.read(has_text, 20).find("data: "), std::string::npos);
  for (const char* action : {"save", "restore", "erase"}) EXPECT_EQ(act(action), 409) << action;
  wire.close();
  ASSERT_TRUE(server.until_slots(all_idle, 5));
  for (const char* action : {"save", "restore", "erase"}) EXPECT_EQ(act(action), 200) << action;
}

// A stream that the end of the server cuts says so, and a client that does not read does not hold the end up.
TEST(Streams, TheEndOfTheServerIsTold) {
  if (smol().empty()) GTEST_SKIP() << "SmolLM2 was not fetched";
  for (const char* path : {"/v1/chat/completions", "/completion"}) {
    TestServer server({}, smol());
    json body = std::string(path) == "/completion" ? completion("The river") : chat("Count to ten thousand.");
    body.update({{"stream", true}, {"ignore_eos", true}, {"max_tokens", 4000}});
    Wire wire(server.port()), stuck(server.port());
    wire.send(request_text("POST", path, body.dump()));
    stuck.small_buffer();
    body["logit_bias"] = json::object();
    stuck.send(request_text("POST", path, body.dump()));
    const std::string first = wire.read(has_text, 20);
    ASSERT_NE(first.find("\"content\":\""), std::string::npos);
    const auto begin = std::chrono::steady_clock::now();
    server.stop();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4));
    const std::string rest = wire.read([](const std::string&) { return false; }, 5);
    const size_t at = rest.rfind("data: {\"error\":");
    ASSERT_NE(at, std::string::npos) << rest.substr(rest.size() < 300 ? 0 : rest.size() - 300);
    const json error = json::parse(rest.substr(at + 6, rest.find("\n\n", at) - at - 6))["error"];
    EXPECT_EQ(error["code"], 503);
    EXPECT_EQ(error["type"], "unavailable_error");
    EXPECT_TRUE(rest.ends_with("0\r\n\r\n")) << "the stream ends as HTTP asks";
  }
}

// Limits are far away here: only the server's end lets a thread go on whose client neither takes nor sends.
TEST(Streams, NobodyIsWaitedForWhenTheServerEnds) {
  for (const bool writes : {true, false}) {
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    std::atomic<bool> stopping{false};
    Connection connection(ends[0], HttpLimits{}, stopping);
    connection.begin_body();
    std::atomic<bool> ended{false};
    std::thread thread([&] {
      std::string bytes(8 << 20, 'x');
      EXPECT_EQ(writes ? connection.write(bytes.data(), bytes.size()) : connection.read(bytes.data(), 1), -1);
      ended = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    EXPECT_FALSE(ended) << "it waits while the server runs";
    stopping = true;
    for (int i = 0; i < 300 && !ended; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    EXPECT_TRUE(ended) << "writes " << writes;
    ::close(ends[1]);  // frees the thread in any case
    thread.join();
    ::close(ends[0]);
  }
}

TEST(Streams, TokensComeAsTheyAreMade) {
  if (smol().empty()) GTEST_SKIP() << "SmolLM2 was not fetched";
  TestServer server({}, smol());
  Wire wire(server.port());
  wire.send(
      request_text("POST", "/v1/chat/completions",
                   chat("Tell me a story.", {{"stream", true}, {"max_tokens", 120}, {"ignore_eos", true}}).dump()));
  const std::string first = wire.read(has_text, 20);
  EXPECT_EQ(first.find("[DONE]"), std::string::npos) << "the answer was not held back until its end";
  EXPECT_NE(wire.read([](const std::string&) { return false; }, 30).find("[DONE]"), std::string::npos);
}

TEST(Streams, SilenceIsFilledWithComments) {
  if (smol().empty()) GTEST_SKIP() << "SmolLM2 was not fetched";
  TestServer server([](ServiceOptions&, HttpOptions& h) { h.ping = std::chrono::milliseconds(20); }, smol());
  std::string text;
  for (int i = 0; i < 600; ++i) text += "word ";
  const Reply reply = server.post("/v1/chat/completions", chat(text, {{"stream", true}, {"max_tokens", 2}}));
  EXPECT_NE(reply.body.find(": ping\n\n"), std::string::npos);
  EXPECT_EQ(reply.messages().back(), "[DONE]");
}

TEST(Streams, ManyRequestsWithEveryKindOfTrouble) {
  TestServer server([](ServiceOptions& s, HttpOptions&) {
    s.scheduler.slots = 3;
    s.scheduler.queue = 16;
  });
  const std::string right = server.post("/v1/completions", completion("right")).parsed()["choices"][0]["text"];
  std::vector<std::thread> clients;
  std::atomic<int> answered{0}, wrong{0};
  for (unsigned t = 0; t < 8; ++t) {
    clients.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 40; ++i) {
        const unsigned kind = random() % 6;
        if (kind == 0) {
          Wire wire(server.port());  // leaves in the middle
          wire.send(request_text("POST", "/v1/chat/completions", chat("leave", {{"stream", true}}).dump()));
          std::this_thread::sleep_for(std::chrono::milliseconds(random() % 20));
        } else if (kind == 1) {
          wrong += server.post_text("/v1/completions", "{\"prompt\":").status != 400;
        } else if (kind == 2) {
          Wire wire(server.port());  // leaves before it asked
          wire.send("POST /v1/completions HT");
        } else if (kind == 3) {
          json body = completion("right", {{"stream", true}});
          std::string text;
          const Reply reply = server.post("/v1/completions", body);
          if (reply.status == 503) continue;
          for (const std::string& m : reply.messages()) {
            if (m != "[DONE]") text += json::parse(m)["choices"][0]["text"].get<std::string>();
          }
          wrong += text != right;
          ++answered;
        } else {
          const Reply reply = server.post("/v1/completions", completion("right"));
          if (reply.status == 503) continue;
          wrong += reply.status != 200 || reply.parsed()["choices"][0]["text"] != right;
          ++answered;
        }
      }
    });
  }
  for (std::thread& c : clients) c.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(answered, 50);
  EXPECT_TRUE(server.until_slots(all_idle, 5));
  EXPECT_EQ(server.post("/v1/completions", completion("right")).parsed()["choices"][0]["text"], right);
}

TEST(Streams, StoppingTheServerEndsStreams) {
  std::optional<Wire> wire;
  {
    TestServer server;
    wire.emplace(server.port());
    wire->send(request_text("POST", "/v1/chat/completions", chat("a", {{"stream", true}, {"max_tokens", 400}}).dump()));
    wire->read([](const std::string& s) { return s.find("data:") != std::string::npos; }, 10);
  }
  wire->read([](const std::string&) { return false; }, 5);
  EXPECT_TRUE(wire->closed());
}

}  // namespace
}  // namespace longkv::server
