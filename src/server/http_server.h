// HTTP over a Service: routes, keys, limits. OpenAI's routes, llama-server's, and the page.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "longkv/status.h"
#include "server/http_limits.h"
#include "server/service.h"

namespace longkv::server {

struct HttpOptions {
  std::string host = "127.0.0.1";
  int port = 8080;                    // 0: any free one
  std::vector<std::string> api_keys;  // empty: none is asked for
  std::vector<std::string> origins;   // of other pages that may call this server; "*": any
  std::string slot_folder;            // where slots may be saved; empty: nowhere
  bool metrics = true, slots = true, ui = true;
  int threads = 0;                        // connections served at once; 0: slots + waiting requests + 16
  std::chrono::milliseconds ping{30000};  // comment in a stream that is silent for so long
  HttpLimits limits;
};

class HttpServer {
 public:
  HttpServer(Service& service, const HttpOptions& options);
  ~HttpServer();

  // Errors: kIo when the address cannot be had.
  Status bind();
  int port() const;
  // Serves until stop(). Call bind() first.
  void serve();
  // From any thread, once, while serve() runs or is about to; streams end, their requests are cancelled.
  void stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace longkv::server
