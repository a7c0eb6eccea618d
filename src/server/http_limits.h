// Limits on what a client may send, and on how slowly.
#pragma once

#include <chrono>
#include <cstddef>

namespace longkv::server {

struct HttpLimits {
  size_t head_bytes = 64 << 10;  // request line and headers
  size_t body_bytes = size_t(64) << 20;
  std::chrono::milliseconds head_time{10000};  // from the first byte waited for
  std::chrono::milliseconds body_time{120000};
  std::chrono::milliseconds write_time{30000};  // for which a client may take nothing
  std::chrono::milliseconds keep_alive{5000};   // between requests
  int requests = 1000;                          // of one connection
};

}  // namespace longkv::server
