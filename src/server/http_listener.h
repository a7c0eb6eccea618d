// The library's server with our connections: limits, a bound on connections, no port shared with another process.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "server/http_connection.h"

namespace longkv::server {

// Threads that serve connections. When as many wait as there are threads, further ones are answered 503 at once.
class ConnectionThreads : public httplib::TaskQueue {
 public:
  explicit ConnectionThreads(int threads);
  void enqueue(std::function<void()> serve) override;
  void shutdown() override;
  // Whether the connection that the calling thread was given must be turned away.
  static bool overloaded();

 private:
  void work();

  size_t limit_;
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> waiting_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

class Listener : public httplib::Server {
 public:
  Listener(const HttpLimits& limits, int threads);
  void say_stopping();
  const std::atomic<bool>& stopping() const { return stopping_; }

 private:
  bool process_and_close_socket(socket_t socket) override;

  HttpLimits limits_;
  std::atomic<bool> stopping_{false};
};

}  // namespace longkv::server
