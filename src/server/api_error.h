// An error as clients of OpenAI's interface expect it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "longkv/status.h"

namespace longkv::server {

struct ApiError {
  int status = 400;  // of HTTP
  std::string type = "invalid_request_error";
  std::string message;
  std::string param{};                              // the field that is wrong; empty: none
  nlohmann::json extra = nlohmann::json::object();  // further members

  nlohmann::json body() const {
    nlohmann::json error = {{"code", status}, {"message", message}, {"type", type}};
    if (!param.empty()) error["param"] = param;
    error.update(extra);
    return {{"error", std::move(error)}};
  }
};

// What an error of the engine is to a client: its request's fault only where the code says so.
inline ApiError api_error(const Status& status) {
  switch (status.code()) {
    case Code::kCorrupt:  // a file that the client named
    case Code::kInvalidArgument: return {400, "invalid_request_error", status.message()};
    case Code::kUnsupported: return {501, "not_supported_error", status.message()};
    case Code::kOutOfMemory: return {503, "unavailable_error", status.message()};
    case Code::kCancelled: return {504, "timeout_error", status.message()};
    default: return {500, "server_error", status.message()};
  }
}

}  // namespace longkv::server
