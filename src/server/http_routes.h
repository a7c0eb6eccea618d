// What each route does.
#pragma once

#include <httplib.h>

#include <atomic>

#include "server/api_request.h"
#include "server/http_server.h"
#include "server/service.h"

namespace longkv::server {

void answer_error(httplib::Response& response, const ApiError& error);

struct HttpRoutes {
  using Request = httplib::Request;
  using Response = httplib::Response;

  void health(const Request& request, Response& response);
  void models(const Request& request, Response& response);
  void chat(const Request& request, Response& response) { generate(Route::kChat, request, response); }
  void completions(const Request& request, Response& response) { generate(Route::kCompletions, request, response); }
  void native(const Request& request, Response& response) { generate(Route::kNative, request, response); }
  void tokenize(const Request& request, Response& response);
  void detokenize(const Request& request, Response& response);
  void apply_template(const Request& request, Response& response);
  void props(const Request& request, Response& response);
  void slots(const Request& request, Response& response);
  void slot_action(const Request& request, Response& response);
  void cache(const Request& request, Response& response);
  void metrics(const Request& request, Response& response);
  void not_implemented(const Request& request, Response& response);

  void generate(Route route, const Request& request, Response& response);
  // What marks rows as this client's: requests with other marks do not share them.
  static std::string client_salt(const Request& request);

  Service& service;
  const HttpOptions& options;
  const std::atomic<bool>& stopping;
  std::atomic<int> running_requests{0};  // that generate
};

}  // namespace longkv::server
