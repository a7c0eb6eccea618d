// JSON of clients to requests. Names are OpenAI's, beside them llama-server's and a few of longkv.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "server/api_error.h"
#include "server/fields.h"
#include "server/request.h"
#include "server/service.h"

namespace longkv::server {

enum class Route { kChat, kCompletions, kNative };

// A request and how its answer is to be written.
struct ApiRequest {
  Route route = Route::kChat;
  GenerateRequest generate;
  bool stream = false;
  bool include_usage = false;    // a last chunk with the usage
  bool return_progress = false;  // prompt_progress while the prompt is read
  bool timings_per_token = false;
  bool return_tokens = false;
  bool echo = false;
  std::string prompt;              // text, for echo
  std::vector<std::string> tools;  // names of the tools that an answer may call; empty: calls are text
};

class JsonSchema;

// A conversation, and the call that its answer must be; null: anything.
struct Conversation {
  Service::ChatInput input;
  std::shared_ptr<const JsonSchema> call;
};

// What is wrong, or the request.
std::variant<ApiError, ApiRequest> read_request(const Service& service, Route route, const std::string& body);

// The conversation of a body: messages, tools, tool_choice, chat_template_kwargs, add_generation_prompt. Mistakes go to
// `fields`.
Conversation read_conversation(const Service& service, Fields& fields);
// Names of the tools of a conversation.
std::vector<std::string> tool_names(const nlohmann::ordered_json& tools);

// The error for a prompt that leaves no room for an answer; nullopt where it fits.
std::optional<ApiError> check_length(const Service& service, int64_t tokens);

}  // namespace longkv::server
