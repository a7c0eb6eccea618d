// What a client asks for, after its JSON was read: tokens and settings, nothing of HTTP.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kv/recipe.h"
#include "sample/params.h"

namespace longkv::server {

class JsonSchema;

// Whether rows that a slot still holds may serve a new prompt that begins alike.
enum class Reuse {
  kExact,  // where the answer is the same bit for bit; see Slot::reusable()
  kAny,    // also rows of decoded tokens, and caches whose rows depend on the prompt that they were read with
  kNone,
};

struct GenerateRequest {
  std::string id;            // of the answer and of log lines
  std::vector<int32_t> ids;  // prompt; not empty
  SamplingParams sampling;
  int64_t max_tokens = -1;  // -1: to the end of the context
  std::vector<std::string> stops;
  bool ignore_eos = false;
  int logprobs = -1;                         // alternatives reported for each token, 0 to 20; -1: none
  std::shared_ptr<const JsonSchema> schema;  // the answer must match; null: free text
  std::shared_ptr<const Recipe> recipe;      // null: the server's
  Reuse reuse = Reuse::kExact;
  std::string salt;              // rows are shared among requests of one salt only
  int slot = -1;                 // -1: any
  bool prompt_logprobs = false;  // also of the prompt's tokens; nothing is reused then
  int check_every = 0;           // every n-th token is also computed with full attention; 0: never
  bool show_special = false;
  std::optional<std::chrono::steady_clock::time_point> deadline;
};

}  // namespace longkv::server
