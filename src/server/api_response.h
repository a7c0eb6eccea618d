// Answers as JSON: whole ones, and the pieces of a stream.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "server/api_request.h"
#include "server/events.h"
#include "server/tool_calls.h"

namespace longkv::server {

// JSON as text; bytes that are no UTF-8 become U+FFFD.
std::string to_text(const nlohmann::ordered_json& json);
std::string to_text(const nlohmann::json& json);
// One message of a stream of server-sent events.
std::string sse(const std::string& data);

nlohmann::ordered_json timings_json(const Timings& timings);

// Writes one answer. Events go in as they come; what a stream must send comes out.
class AnswerWriter {
 public:
  AnswerWriter(const ApiRequest& request, const std::string& model);

  // Messages of a stream for an event, the last one included; empty where there is nothing to send.
  std::string stream(const Event& event);
  // What a stream begins with.
  std::string stream_begin();

  // The whole answer, after every event was given to add().
  void add(const Event& event);
  std::string whole() const;

  // The error that ended the answer, if one did.
  const std::optional<Status>& error() const { return error_; }
  bool ended() const { return finished_ || error_; }

 private:
  using Json = nlohmann::ordered_json;
  Json envelope(bool chunk) const;
  Json choice(const TextPiece& piece, const char* finish) const;
  Json logprobs(const std::vector<TokenReport>& reports) const;
  Json usage() const;
  Json native(const TextPiece& piece, bool last) const;
  std::string message(Json json);
  std::string last_messages();
  Json calls_json(const std::vector<ToolCall>& calls, bool chunk) const;
  void take_calls();
  const char* finish_reason() const;

  const ApiRequest& request_;
  std::string model_;
  int64_t created_;
  TextPiece all_;
  std::vector<TokenReport> prompt_reports_;
  std::optional<ToolText> tool_text_;
  std::vector<ToolCall> calls_;
  std::string held_text_;  // of a streamed answer: what looked like a call
  std::optional<Finished> finished_;
  std::optional<Status> error_;
  int64_t tokens_ = 0;
  std::chrono::steady_clock::time_point first_token_;
};

}  // namespace longkv::server
