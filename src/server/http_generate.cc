// Routes that generate: hands a request to the scheduler and its events to the client, whole or as a stream.
#include <memory>
#include <utility>

#include "base/error.h"
#include "server/api_response.h"
#include "server/http_connection.h"
#include "server/http_routes.h"

namespace longkv::server {

namespace {

// How soon a client that left is noticed.
constexpr auto kLook = std::chrono::milliseconds(200);

const ApiError kStopping{503, "unavailable_error", "the server is shutting down"};

// A request on its way, cancelled when nobody holds it any more.
struct Running {
  Running(ApiRequest r, const std::string& model, std::atomic<int>& open)
      : request(std::move(r)), writer(request, model), open_(open) {
    ++open_;
  }
  ~Running() {
    if (events) events->cancel();
    --open_;
  }

  ApiRequest request;
  AnswerWriter writer;
  std::shared_ptr<EventQueue> events;
  bool begun = false;
  std::chrono::steady_clock::time_point last_sent = std::chrono::steady_clock::now();

 private:
  std::atomic<int>& open_;
};

}  // namespace

// With a key of its own a client shares rows with the holders of that key only.
std::string HttpRoutes::client_salt(const Request& request) {
  return "\n" + request.get_header_value("Authorization") + "\n" + request.get_header_value("X-Api-Key");
}

void HttpRoutes::generate(Route route, const Request& request, Response& response) {
  auto read = read_request(service, route, request.body);
  if (const auto* error = std::get_if<ApiError>(&read)) return answer_error(response, *error);
  auto running = std::make_shared<Running>(std::move(std::get<ApiRequest>(read)), service.alias(), running_requests);
  running->request.generate.salt += client_salt(request);
  const bool stream = running->request.stream;
  running->events = service.scheduler().submit(running->request.generate);
  if (!running->events)
    return answer_error(response, {503, "unavailable_error", "too many requests wait for a slot; try again later"});

  if (stream) {
    response.set_header("X-Accel-Buffering", "no");
    response.set_chunked_content_provider("text/event-stream", [this, running](size_t, httplib::DataSink& sink) {
      std::string out;
      if (!std::exchange(running->begun, true)) out = running->writer.stream_begin();
      for (const Event& event : running->events->take(out.empty() ? kLook : std::chrono::milliseconds(0)))
        out += running->writer.stream(event);
      const bool cut = stopping && !running->writer.ended();
      if (cut) out += sse(to_text(kStopping.body()));
      const auto now = std::chrono::steady_clock::now();
      if (out.empty() && now - running->last_sent > options.ping) out = ": ping\n\n";
      if (!out.empty()) {
        running->last_sent = now;
        if (!sink.write(out.data(), out.size())) return false;
      }
      if (cut || running->writer.ended()) sink.done();
      return Connection::current() != nullptr && Connection::current()->alive();
    });
    return;
  }
  while (!running->writer.ended()) {
    for (const Event& event : running->events->take(kLook)) running->writer.add(event);
    if (!Connection::current()->alive()) return Connection::current()->close_after_answer();
    if (stopping) return answer_error(response, kStopping);
  }
  if (running->writer.error()) return answer_error(response, api_error(*running->writer.error()));
  response.set_content(running->writer.whole(), "application/json");
}

}  // namespace longkv::server
