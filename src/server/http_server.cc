#include "server/http_server.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <optional>
#include <regex>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "server/api_response.h"
#include "server/http_listener.h"
#include "server/http_routes.h"
#include "server/openapi.h"
#include "server/ui.h"

namespace longkv::server {

namespace {

using httplib::Request;
using httplib::Response;

// How long stop() waits for answers to end.
constexpr auto kFarewell = std::chrono::seconds(2);
constexpr const char* kSlotPath = "/slots/([0-9]{1,6})";

// As long for a wrong key as for the right one.
bool equal_in_constant_time(const std::string& given, const std::string& key) {
  unsigned char difference = given.size() == key.size() ? 0 : 1;
  for (size_t i = 0; i < key.size(); ++i) {
    difference |= static_cast<unsigned char>(key[i] ^ (given.empty() ? 0 : given[i % given.size()]));
  }
  return difference == 0;
}

std::string host_name(const std::string& host) {
  if (host.starts_with('[')) return host.substr(0, host.find(']') + 1);
  return host.substr(0, host.find(':'));
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "[::1]" || host == "::1" || host.starts_with("127.");
}

// What is wrong with the head of a request whose body has not been read: its end must be known, and small enough,
// before anybody waits for it. (RFC 9112, sections 3.2 and 6.)
std::optional<ApiError> framing_error(const Request& request, size_t body_bytes) {
  const auto bad = [](const char* what) { return ApiError{400, "invalid_request_error", what}; };
  const size_t lengths = request.get_header_value_count("Content-Length");
  const size_t codings = request.get_header_value_count("Transfer-Encoding");
  if (lengths > 1) return bad("Content-Length is given more than once");
  if (lengths + codings > 1) return bad("the body must have one Content-Length or be chunked");
  if (codings == 1 && request.get_header_value("Transfer-Encoding") != "chunked") {
    return bad("Transfer-Encoding must be chunked");
  }
  if (lengths == 1) {
    const std::string length = request.get_header_value("Content-Length");
    if (length.empty() || length.find_first_not_of("0123456789") != std::string::npos) {
      return bad("Content-Length must be a number of bytes");
    }
    if (length.size() > 18 || std::stoull(length) > body_bytes) {
      return ApiError{413, "invalid_request_error", fmt::format("the body is larger than {} bytes", body_bytes)};
    }
  }
  const size_t hosts = request.get_header_value_count("Host");
  if (hosts > 1 || (hosts == 0 && request.version != "HTTP/1.0")) return bad("a request names its host once");
  return std::nullopt;
}

}  // namespace

struct HttpServer::Impl {
  Impl(Service& s, const HttpOptions& o)
      : options(o),
        listener(o.limits,
                 o.threads > 0 ? o.threads : s.options().scheduler.slots + int(s.options().scheduler.queue) + 16),
        routes{.service = s, .options = options, .stopping = listener.stopping()} {
    set_up();
  }

  void set_up();
  bool may_enter(const Request& request, Response& response) const;
  void allow_origin(const Request& request, Response& response) const;
  void route(const char* method, const char* path, httplib::Server::Handler handler);
  std::optional<ApiError> route_error(const std::string& method, const std::string& target, Response& response) const;

  HttpOptions options;
  Listener listener;
  HttpRoutes routes;
  std::map<std::string, std::string> methods;  // by path
  int port = 0;
  std::atomic<bool> ended{false};  // serve() returned
};

void HttpServer::Impl::route(const char* method, const char* path, httplib::Server::Handler handler) {
  methods[path] = method;
  std::string(method) == "GET" ? listener.Get(path, std::move(handler)) : listener.Post(path, std::move(handler));
}

void HttpServer::Impl::set_up() {
  const auto bind = [this](void (HttpRoutes::*member)(const Request&, Response&)) {
    return [this, member](const Request& request, Response& response) { (routes.*member)(request, response); };
  };
  for (const char* path : {"/health", "/v1/health"}) route("GET", path, bind(&HttpRoutes::health));
  for (const char* path : {"/v1/models", "/models"}) route("GET", path, bind(&HttpRoutes::models));
  for (const char* path : {"/v1/chat/completions", "/chat/completions"}) route("POST", path, bind(&HttpRoutes::chat));
  for (const char* path : {"/v1/completions", "/completions"}) route("POST", path, bind(&HttpRoutes::completions));
  route("POST", "/completion", bind(&HttpRoutes::native));
  route("POST", "/tokenize", bind(&HttpRoutes::tokenize));
  route("POST", "/detokenize", bind(&HttpRoutes::detokenize));
  route("POST", "/apply-template", bind(&HttpRoutes::apply_template));
  route("GET", "/props", bind(&HttpRoutes::props));
  route("GET", "/slots", bind(&HttpRoutes::slots));
  listener.Post(kSlotPath, bind(&HttpRoutes::slot_action));
  route("GET", "/cache", bind(&HttpRoutes::cache));
  route("GET", "/metrics", bind(&HttpRoutes::metrics));
  for (const char* path : {"/v1/embeddings", "/embeddings", "/v1/rerank", "/rerank", "/infill", "/v1/messages",
                           "/v1/responses", "/lora-adapters", "/v1/audio/transcriptions"})
    route("POST", path, bind(&HttpRoutes::not_implemented));
  route("GET", "/openapi.json", [api = openapi_json(routes.service)](const Request&, Response& response) {
    response.set_content(api, "application/json");
  });
  for (const UiFile& file : ui_files()) {
    if (!options.ui && file.path != std::string_view("/openapi.yaml")) continue;
    route("GET", file.path, [&file](const Request&, Response& response) {
      response.set_header("Content-Security-Policy",
                          "default-src 'self'; img-src 'self' data:; style-src 'self'; base-uri 'none'; form-action "
                          "'none'; frame-ancestors 'none'");
      response.set_content(file.data, file.size, file.type);
    });
  }

  listener.set_pre_routing_handler([this](const Request& request, Response& response) {
    response.set_header("X-Content-Type-Options", "nosniff");
    response.set_header("Cache-Control", "no-store");
    allow_origin(request, response);
    bool enters = may_enter(request, response);
    if (enters) {
      if (const auto error = route_error(request.method, request.path, response)) {
        answer_error(response, *error);
        enters = false;
      }
    }
    // The library reads no body of a GET: what follows on the connection would be taken for a request.
    const bool body = request.get_header_value("Content-Length") != "0" || request.has_header("Transfer-Encoding");
    if (body && request.method != "POST") Connection::current()->close_after_answer();
    if (!enters) {
      // The body was not read.
      Connection::current()->close_after_answer();
      return httplib::Server::HandlerResponse::Handled;
    }
    return httplib::Server::HandlerResponse::Unhandled;
  });
  listener.Options(".*", [](const Request&, Response& response) { response.status = 204; });
  listener.set_exception_handler([](const Request&, Response& response, const std::exception_ptr& e) {
    std::string what = "unknown";
    try {
      std::rethrow_exception(e);
    } catch (const std::bad_alloc&) {
      return answer_error(response, {503, "unavailable_error", "the server has no memory for this request"});
    } catch (const std::exception& found) {
      what = found.what();
    } catch (...) {
    }
    log_info("internal error: {}", what);
    answer_error(response, {500, "server_error", "internal error"});
  });
  // What the library refuses by itself has no body yet.
  listener.set_error_handler([this](const Request& request, Response& response) {
    if (!response.body.empty()) return;
    if (Connection* connection = Connection::current()) connection->close_after_answer();
    ApiError error{response.status, "invalid_request_error", "the request cannot be read"};
    const auto unserved = request.path.empty() ? route_error(request.method, request.target, response) : std::nullopt;
    if (response.status == 400 && request.version.starts_with("HTTP/1.") && unserved) {
      error = *unserved;  // a method that the library does not know ends in the first line
    } else if (response.status == 413) {
      error.message = fmt::format("the body is larger than {} bytes", options.limits.body_bytes);
    } else if (response.status == 414) {
      error.message = "the address is too long";
    }
    answer_error(response, error);
  });
}

// A path that is not there, or a method that it does not serve: told before a body is waited for.
std::optional<ApiError> HttpServer::Impl::route_error(const std::string& method, const std::string& target,
                                                      Response& response) const {
  if (method == "OPTIONS") return {};
  static const std::regex kSlot(kSlotPath);
  const std::string path = target.substr(0, std::min<size_t>(target.find('?'), 200));
  const auto found = methods.find(path);
  const bool slot = path.size() < 20 && std::regex_match(path, kSlot);
  if (found == methods.end() && !slot) return ApiError{404, "not_found_error", fmt::format("there is no {}", path)};
  const std::string served = slot ? "POST" : found->second;
  if (method == served || (method == "HEAD" && served == "GET")) return {};
  response.set_header("Allow", served == "GET" ? "GET, HEAD, OPTIONS" : "POST, OPTIONS");
  return ApiError{405, "invalid_request_error", fmt::format("{} does not serve {}", path, method.substr(0, 20))};
}

void HttpServer::Impl::allow_origin(const Request& request, Response& response) const {
  const std::string origin = request.get_header_value("Origin");
  if (origin.empty() || options.origins.empty()) return;
  const bool any = std::ranges::find(options.origins, "*") != options.origins.end();
  if (!any && std::ranges::find(options.origins, origin) == options.origins.end()) return;
  response.set_header("Access-Control-Allow-Origin", any ? "*" : origin);
  response.set_header("Vary", "Origin");
  response.set_header("Access-Control-Allow-Methods", "GET, POST, OPTIONS");
  response.set_header("Access-Control-Allow-Headers", "Authorization, Content-Type, X-Api-Key");
}

// Pages of other sites must not use a server that listens for its own machine only, whatever name they found for it.
bool HttpServer::Impl::may_enter(const Request& request, Response& response) const {
  if (const auto error = framing_error(request, options.limits.body_bytes)) {
    answer_error(response, *error);
    return false;
  }
  const std::string host = request.get_header_value("Host"), origin = request.get_header_value("Origin");
  if (is_loopback(options.host) && !host.empty() && !is_loopback(host_name(host))) {
    answer_error(response, {403, "permission_error", "the Host header names another machine than this one"});
    return false;
  }
  const bool own = origin.empty() || origin == "http://" + host || origin == "https://" + host;
  if (!own && !response.has_header("Access-Control-Allow-Origin")) {
    answer_error(response,
                 {403, "permission_error", "pages of this origin may not call the server; see --cors-origins"});
    return false;
  }
  if (request.has_header("Longkv-Packed")) {
    answer_error(response, {415, "invalid_request_error", "compressed bodies are not supported"});
    return false;
  }
  if (options.api_keys.empty() || request.method == "OPTIONS") return true;
  const bool open = request.path == "/health" || request.path == "/v1/health" ||
                    (request.path != "/openapi.yaml" &&
                     std::ranges::any_of(ui_files(), [&](const UiFile& f) { return request.path == f.path; }));
  if (open) return true;
  std::string given = request.get_header_value("Authorization");
  given = given.starts_with("Bearer ") ? given.substr(7) : request.get_header_value("X-Api-Key");
  bool right = false;
  for (const std::string& key : options.api_keys) right |= equal_in_constant_time(given, key);
  if (!right) answer_error(response, {401, "authentication_error", "the API key is missing or wrong"});
  return right;
}

HttpServer::HttpServer(Service& service, const HttpOptions& options)
    : impl_(std::make_unique<Impl>(service, options)) {}
HttpServer::~HttpServer() = default;

Status HttpServer::bind() {
  const HttpOptions& o = impl_->options;
  errno = 0;
  if (o.port == 0) {
    impl_->port = impl_->listener.bind_to_any_port(o.host);
    if (impl_->port > 0) return {};
  } else if (impl_->listener.bind_to_port(o.host, o.port)) {
    impl_->port = o.port;
    return {};
  }
  if (errno == EADDRINUSE || errno == EACCES) {
    return fail(Code::kIo, "cannot listen on {} port {}: {}; choose another with --port", o.host, o.port,
                std::strerror(errno));
  }
  return fail(Code::kIo, "cannot listen on {}: this machine has no such address; choose another with --host", o.host);
}

int HttpServer::port() const { return impl_->port; }

void HttpServer::serve() {
  if (!impl_->listener.stopping()) impl_->listener.listen_after_bind();
  impl_->ended = true;
}

void HttpServer::stop() {
  impl_->listener.say_stopping();
  // The library forgets a stop that comes before it accepts.
  while (!impl_->ended && !impl_->listener.is_running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  // The library cuts streams off; their clients are told first, those that read.
  const auto end = std::chrono::steady_clock::now() + kFarewell;
  while (impl_->routes.running_requests > 0 && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  impl_->listener.stop();
}

}  // namespace longkv::server
