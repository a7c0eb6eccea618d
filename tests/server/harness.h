// A running server on a free loopback port, and a client that does exactly what a test wants, good or bad.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "base/log.h"
#include "server/http_server.h"
#include "server/service.h"
#include "support/paths.h"
#include "support/tiny_model.h"

namespace longkv::server {

using nlohmann::json;

struct Reply {
  int status = 0;  // 0: no answer
  std::string head, body;

  json parsed() const {
    json j = json::parse(body, nullptr, false);
    EXPECT_FALSE(j.is_discarded()) << body;
    return j;
  }
  // Data of the stream's messages, in order.
  std::vector<std::string> messages() const {
    std::vector<std::string> out;
    for (size_t at = 0; at < body.size();) {
      const size_t end = body.find("\n\n", at);
      if (end == std::string::npos) break;
      const std::string line = body.substr(at, end - at);
      if (line.starts_with("data: ")) out.push_back(line.substr(6));
      at = end + 2;
    }
    return out;
  }
};

// One connection, byte by byte.
class Wire {
 public:
  explicit Wire(int port) {
    fd_ = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(uint16_t(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = ::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  }
  ~Wire() { close(); }
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  bool connected() const { return connected_; }
  void small_buffer() {
    int bytes = 2048;
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes));
  }

  bool send(const std::string& text) {
    for (size_t at = 0; at < text.size();) {
      const ssize_t n = ::send(fd_, text.data() + at, text.size() - at, MSG_NOSIGNAL);
      if (n <= 0) return false;
      at += size_t(n);
    }
    return true;
  }
  // Reads until `enough` holds, the server closes, or the time is over.
  std::string read(const std::function<bool(const std::string&)>& enough, double seconds = 20) {
    std::string text;
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (!enough(text)) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
      pollfd p{fd_, POLLIN, 0};
      if (left.count() <= 0 || ::poll(&p, 1, int(left.count())) <= 0) break;
      char buffer[65536];
      const ssize_t n = ::recv(fd_, buffer, sizeof(buffer), 0);
      if (n <= 0) {
        closed_ = true;
        break;
      }
      text.append(buffer, size_t(n));
    }
    return text;
  }
  bool closed() const { return closed_; }

 private:
  int fd_ = -1;
  bool connected_ = false, closed_ = false;
};

inline std::string request_text(const std::string& method, const std::string& path, const std::string& body,
                                const std::string& headers = "") {
  std::string text = method + " " + path + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + headers;
  if (method == "POST")
    text += "Content-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) + "\r\n";
  return text + "\r\n" + body;
}

inline Reply parse_reply(const std::string& text) {
  Reply reply;
  const size_t head = text.find("\r\n\r\n");
  if (head == std::string::npos || text.size() < 12) return reply;
  reply.status = std::atoi(text.c_str() + 9);
  reply.head = text.substr(0, head);
  reply.body = text.substr(head + 4);
  if (reply.head.find("Transfer-Encoding: chunked") == std::string::npos) return reply;
  std::string whole;
  for (size_t at = 0; at < reply.body.size();) {
    const size_t line = reply.body.find("\r\n", at);
    if (line == std::string::npos) break;
    const size_t n = std::strtoul(reply.body.substr(at, line - at).c_str(), nullptr, 16);
    if (n == 0) break;
    whole += reply.body.substr(line + 2, n);
    at = line + 2 + n + 2;
  }
  reply.body = whole;
  return reply;
}

class TestServer {
 public:
  using Change = std::function<void(ServiceOptions&, HttpOptions&)>;

  // The tiny model that answers in small letters, unless a path is given.
  explicit TestServer(const Change& change = {}, std::string path = {}) {
    set_log_level(LogLevel::kQuiet);
    if (path.empty()) path = test::tiny_chat_model().write("server.gguf");
    auto model = LoadedModel::load(path);
    EXPECT_TRUE(model.ok()) << model.status().message();
    ServiceOptions o;
    o.model_path = path;
    o.alias = "tiny";
    o.scheduler.slots = 2;
    o.scheduler.queue = 8;
    o.scheduler.session.context = std::min<int64_t>((*model)->config().context, 8192);
    o.scheduler.session.chunk = 256;
    o.scheduler.session.recipe = *parse_recipe("full");
    o.recipes.push_back({"quest", std::make_shared<const Recipe>(*parse_recipe("quest:budget=128,block=16"))});
    HttpOptions h;
    h.port = 0;
    if (change) change(o, h);
    auto made = Service::create(*model, o, pool_);
    EXPECT_TRUE(made.ok()) << made.status().message();
    service_ = std::move(made).value();
    http_ = std::make_unique<HttpServer>(*service_, h);
    const Status bound = http_->bind();
    EXPECT_TRUE(bound.ok()) << bound.message();
    thread_ = std::thread([this] { http_->serve(); });
    // Accepting begins a moment after binding; a first request waits for it.
    for (int i = 0; i < 200 && get("/health").status != 200; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ~TestServer() { stop(); }
  void stop() {
    if (!thread_.joinable()) return;
    http_->stop();
    thread_.join();
  }

  int port() const { return http_->port(); }
  Service& service() { return *service_; }

  Reply send(const std::string& text, double seconds = 60) {
    Wire wire(port());
    wire.send(text);
    return parse_reply(wire.read([](const std::string&) { return false; }, seconds));
  }
  Reply get(const std::string& path, const std::string& headers = "") {
    return send(request_text("GET", path, "", headers));
  }
  Reply post_text(const std::string& path, const std::string& body, const std::string& headers = "") {
    return send(request_text("POST", path, body, headers));
  }
  Reply post(const std::string& path, const json& body) { return post_text(path, body.dump()); }

  // Waits until it holds of /slots; false after `seconds`.
  bool until_slots(const std::function<bool(const json&)>& holds, double seconds) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (std::chrono::steady_clock::now() < end) {
      if (holds(get("/slots").parsed())) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }

 private:
  ThreadPool pool_{2};
  std::unique_ptr<Service> service_;
  std::unique_ptr<HttpServer> http_;
  std::thread thread_;
};

inline bool all_idle(const json& slots) {
  return std::all_of(slots.begin(), slots.end(), [](const json& s) { return s["state"] == "idle"; });
}

inline json chat(const std::string& text, json more = json::object()) {
  json body = {{"messages", json::array({{{"role", "user"}, {"content", text}}})}, {"temperature", 0}};
  body.update(more);
  return body;
}

inline json completion(const std::string& text, json more = json::object()) {
  json body = {{"prompt", text}, {"temperature", 0}};
  body.update(more);
  return body;
}

// Random letters, answered greedily to the asked length.
inline GenerateRequest random_request(int64_t prompt, int64_t answer, uint32_t seed) {
  GenerateRequest r;
  for (int64_t i = 0; i < prompt; ++i) {
    seed = seed * 1664525u + 1013904223u;
    r.ids.push_back(int32_t('a' + (seed >> 16) % 26));
  }
  r.id = "test";
  r.max_tokens = answer;
  r.ignore_eos = true;
  r.sampling.temperature = 0;
  return r;
}

}  // namespace longkv::server
