#include "server/http_listener.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string_view>

namespace longkv::server {

namespace {
thread_local bool t_overloaded = false;

// Closing with bytes unread would reset the connection and take the answer with it.
void close_gently(socket_t socket, std::chrono::milliseconds patience) {
  ::shutdown(socket, SHUT_WR);
  const auto end = std::chrono::steady_clock::now() + patience;
  char buffer[65536];
  while (std::chrono::steady_clock::now() < end) {
    pollfd p{socket, POLLIN, 0};
    if (::poll(&p, 1, 10) > 0 && ::recv(socket, buffer, sizeof(buffer), MSG_DONTWAIT) <= 0) break;
  }
  ::close(socket);
}

}  // namespace

bool ConnectionThreads::overloaded() { return t_overloaded; }

ConnectionThreads::ConnectionThreads(int threads) : limit_(size_t(threads)) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
}

void ConnectionThreads::enqueue(std::function<void()> serve) {
  {
    std::lock_guard lock(mutex_);
    if (waiting_.size() < limit_) {
      waiting_.push_back(std::move(serve));
      serve = nullptr;
    }
  }
  if (!serve) return ready_.notify_one();
  t_overloaded = true;
  serve();  // on the thread that accepts: one short message
  t_overloaded = false;
}

void ConnectionThreads::shutdown() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  ready_.notify_all();
  for (std::thread& t : threads_) t.join();
}

void ConnectionThreads::work() {
  for (;;) {
    std::function<void()> serve;
    {
      std::unique_lock lock(mutex_);
      ready_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      serve = std::move(waiting_.front());
      waiting_.pop_front();
    }
    serve();
  }
}

Listener::Listener(const HttpLimits& limits, int threads) : limits_(limits) {
  new_task_queue = [threads] { return new ConnectionThreads(threads); };
  set_payload_max_length(limits.body_bytes);
  set_tcp_nodelay(true);
  set_keep_alive_max_count(size_t(limits.requests));
  set_keep_alive_timeout(time_t(std::chrono::duration_cast<std::chrono::seconds>(limits.keep_alive).count()));
  // The library would let a second process listen on the same port and take every other connection.
  set_socket_options([](socket_t socket) {
    int yes = 1;
    ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  });
}

void Listener::say_stopping() { stopping_ = true; }

bool Listener::process_and_close_socket(socket_t socket) {
  Connection connection(socket, limits_, stopping_);
  if (ConnectionThreads::overloaded()) {
    constexpr std::string_view kBusy =
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: "
        "98\r\n\r\n{\"error\":{\"code\":503,\"message\":\"too many connections; try again\",\"type\":"
        "\"unavailable_error\"}}       ";
    (void)::send(socket, kBusy.data(), kBusy.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  } else {
    Connection::set_current(&connection);
    bool closed = false;
    for (int i = limits_.requests; i > 0 && !closed && !stopping_ && connection.wait_for_request(); --i) {
      const bool last = i == 1;
      const bool good = process_request(connection, last, closed, [&](httplib::Request& request) {
        connection.begin_body();
        // Every body is JSON as it stands: the library shall neither unpack nor take it apart, and not pack answers.
        if (request.has_header("Content-Encoding")) request.headers.emplace("Longkv-Packed", "yes");
        for (const char* name : {"Content-Encoding", "Accept-Encoding", "Content-Type", "Range"})
          request.headers.erase(name);
        request.headers.emplace("Content-Type", "application/json");
        // A request that names no length has no body; the library would wait for the client to leave.
        if (!request.has_header("Content-Length") && !request.has_header("Transfer-Encoding")) {
          request.headers.emplace("Content-Length", "0");
        }
      });
      if (!good || connection.closes()) break;
    }
    Connection::set_current(nullptr);
  }
  close_gently(socket, std::chrono::milliseconds(ConnectionThreads::overloaded() ? 10 : 500));
  return true;
}

}  // namespace longkv::server
