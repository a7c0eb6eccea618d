// Any bytes on a connection to a running server: request lines, headers, addresses with parameters, bodies, several in
// a row. The server answers or closes within its limits, and goes on.
#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "base/log.h"
#include "server/http_server.h"
#include "server/service.h"
#include "support/tiny_model.h"

namespace {

using namespace longkv;
using namespace longkv::server;

void require(bool condition) {
  if (!condition) std::abort();
}

struct Running {
  ThreadPool pool{1};
  std::unique_ptr<Service> service;
  std::unique_ptr<HttpServer> http;
  std::thread thread;

  Running() {
    set_log_level(LogLevel::kQuiet);
    ServiceOptions s;
    s.model_path = test::tiny_chat_model().write("http_fuzz.gguf");
    auto model = LoadedModel::load(s.model_path);
    require(model.ok());
    s.scheduler.slots = 2;
    s.scheduler.queue = 4;
    s.scheduler.session.context = 256;
    s.scheduler.session.recipe = *parse_recipe("full");
    auto made = Service::create(*model, s, pool);
    require(made.ok());
    service = std::move(made).value();
    HttpOptions h;
    h.port = 0;
    h.threads = 2;
    h.slot_folder = "/nonexistent";  // names are looked at, nothing is written
    h.origins = {"http://localhost:3000"};
    h.limits.body_bytes = 4096;
    for (auto* time : {&h.limits.head_time, &h.limits.body_time, &h.limits.keep_alive})
      *time = std::chrono::milliseconds(50);
    http = std::make_unique<HttpServer>(*service, h);
    require(http->bind().ok());
    thread = std::thread([this] { http->serve(); });
  }
  ~Running() {
    http->stop();
    thread.join();
  }

  // What the server says to these bytes, until it closes the connection. `leaves`: nothing follows, and it is told so.
  std::string say(const std::string& text, bool leaves) const {
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(uint16_t(http->port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    require(fd >= 0 && ::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    for (size_t at = 0; at < text.size();) {
      const ssize_t n = ::send(fd, text.data() + at, text.size() - at, MSG_NOSIGNAL);
      if (n <= 0) break;  // it closed already
      at += size_t(n);
    }
    if (leaves) ::shutdown(fd, SHUT_WR);
    std::string reply;
    for (;;) {
      pollfd p{fd, POLLIN, 0};
      int ready;
      do ready = ::poll(&p, 1, 15000);  // libFuzzer's alarm interrupts it
      while (ready < 0 && errno == EINTR);
      require(ready > 0);
      char buffer[4096];
      const ssize_t n = ::recv(fd, buffer, sizeof(buffer), 0);
      if (n <= 0) break;
      if (reply.size() < 4096) reply.append(buffer, size_t(n));
    }
    ::close(fd);
    return reply;
  }
};

}  // namespace

// The first byte says whether the client stays.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Running server;
  static int runs = 0;
  if (size < 1 || size > 8192) return 0;
  const std::string reply =
      server.say(std::string(reinterpret_cast<const char*>(data) + 1, size - 1), /*leaves=*/data[0] % 8 != 0);
  require(reply.empty() || reply.starts_with("HTTP/1."));
  if (++runs % 64 == 0) {
    // On a busy machine the 50 ms for a request's head pass before its thread runs: a server that lives answers one of
    // these.
    bool healthy = false;
    for (int i = 0; i < 20 && !healthy; ++i) {
      healthy = server.say("GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", false)
                    .starts_with("HTTP/1.1 200");
    }
    require(healthy);
  }
  return 0;
}
