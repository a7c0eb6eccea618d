// One connection of a client: its socket with limits on bytes and time that the HTTP library does not set itself.
#pragma once

#include <httplib.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#include "server/http_limits.h"

namespace longkv::server {

class Connection : public httplib::Stream {
 public:
  // `stopping` ends waits for further requests.
  Connection(socket_t socket, const HttpLimits& limits, const std::atomic<bool>& stopping);

  // Waits for the next request's first byte.
  bool wait_for_request();
  // The head was read: the body's limits count from here.
  void begin_body();
  // Ends the connection after the present answer: what is left of the request was not read.
  void close_after_answer() { close_ = true; }
  bool closes() const { return close_; }

  // Whether the client is still there; costs one system call.
  bool alive() const;

  bool is_readable() const override;
  bool is_writable() const override;
  ssize_t read(char* data, size_t size) override;
  ssize_t write(const char* data, size_t size) override;
  void get_remote_ip_and_port(std::string& ip, int& port) const override;
  void get_local_ip_and_port(std::string& ip, int& port) const override;
  socket_t socket() const override { return socket_; }

  // The connection that this thread serves; null outside of a request.
  static Connection* current();
  static void set_current(Connection* connection);

 private:
  using Time = std::chrono::steady_clock::time_point;
  bool wait(short events, Time until) const;

  socket_t socket_;
  HttpLimits limits_;
  const std::atomic<bool>& stopping_;
  size_t left_ = 0;  // bytes that may still be read
  Time deadline_;
  bool close_ = false;
  char buffer_[16384];
  size_t at_ = 0, end_ = 0;
};

}  // namespace longkv::server
