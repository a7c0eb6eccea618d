#include "server/http_connection.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace longkv::server {

namespace {

thread_local Connection* t_current = nullptr;

using Clock = std::chrono::steady_clock;

constexpr auto kSlice = std::chrono::milliseconds(200);  // between looks at `stopping`
constexpr auto kStopPatience = std::chrono::milliseconds(500);

void name_of(const sockaddr_storage& address, socklen_t length, std::string& ip, int& port) {
  char host[NI_MAXHOST], service[NI_MAXSERV];
  if (::getnameinfo(reinterpret_cast<const sockaddr*>(&address), length, host, sizeof(host), service, sizeof(service),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return;
  ip = host;
  port = std::atoi(service);
}

}  // namespace

Connection* Connection::current() { return t_current; }
void Connection::set_current(Connection* connection) { t_current = connection; }

Connection::Connection(socket_t socket, const HttpLimits& limits, const std::atomic<bool>& stopping)
    : socket_(socket), limits_(limits), stopping_(stopping) {}

bool Connection::wait(short events, Time until) const {
  for (;;) {
    // A server that ends is not held up by clients that neither send nor take.
    if (stopping_) until = std::min(until, Clock::now() + kStopPatience);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    if (left <= 0) return false;
    pollfd p{socket_, events, 0};
    const int n = ::poll(&p, 1, int(std::min<long long>(left, kSlice.count())));
    if (n < 0 && errno != EINTR) return false;
    if (n > 0) return true;
  }
}

bool Connection::wait_for_request() {
  const auto end = Clock::now() + limits_.keep_alive;
  while (at_ == end_ && !wait(POLLIN, std::min(end, Clock::now() + kSlice))) {
    if (stopping_ || Clock::now() >= end) return false;
  }
  left_ = limits_.head_bytes;
  deadline_ = Clock::now() + limits_.head_time;
  return true;
}

void Connection::begin_body() {
  // Chunked bodies need a few bytes for each chunk.
  left_ = limits_.body_bytes + limits_.body_bytes / 8 + 4096;
  deadline_ = Clock::now() + limits_.body_time;
}

bool Connection::alive() const {
  pollfd p{socket_, POLLIN | POLLRDHUP, 0};
  if (::poll(&p, 1, 0) <= 0) return true;
  if ((p.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0) return false;
  char byte;
  return ::recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) != 0;
}

bool Connection::is_readable() const { return at_ < end_ || wait(POLLIN, deadline_); }
bool Connection::is_writable() const { return alive() && wait(POLLOUT, Clock::now() + limits_.write_time); }

ssize_t Connection::read(char* data, size_t size) {
  if (at_ == end_) {
    if (!wait(POLLIN, deadline_)) return -1;
    ssize_t n;
    do {
      n = ::recv(socket_, buffer_, sizeof(buffer_), 0);
    } while (n < 0 && errno == EINTR);
    if (n <= 0) return n;
    at_ = 0;
    end_ = size_t(n);
  }
  if (left_ == 0) {
    close_ = true;
    return -1;
  }
  const size_t n = std::min({size, end_ - at_, left_});
  std::memcpy(data, buffer_ + at_, n);
  at_ += n;
  left_ -= n;
  return ssize_t(n);
}

ssize_t Connection::write(const char* data, size_t size) {
  size_t sent = 0;
  auto until = Clock::now() + limits_.write_time;
  while (sent < size) {
    const ssize_t n = ::send(socket_, data + sent, size - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) {
      sent += size_t(n);
      until = Clock::now() + limits_.write_time;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait(POLLOUT, until)) return -1;
    } else if (errno != EINTR) {
      return -1;
    }
  }
  return ssize_t(size);
}

void Connection::get_remote_ip_and_port(std::string& ip, int& port) const {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (::getpeername(socket_, reinterpret_cast<sockaddr*>(&address), &length) == 0) name_of(address, length, ip, port);
}

void Connection::get_local_ip_and_port(std::string& ip, int& port) const {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &length) == 0) name_of(address, length, ip, port);
}

}  // namespace longkv::server
