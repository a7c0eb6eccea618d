// Generating an answer token by token, and the table of what it cost.
#pragma once

#include <atomic>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "engine/session.h"
#include "longkv/status.h"
#include "sample/sampler.h"
#include "tokenizer/tokenizer.h"

namespace longkv::cli {

struct Answer {
  std::string text;
  std::vector<int32_t> ids;
  std::string finish;  // "stop" (end of answer), "length" (-n or the context), "interrupted"
  double seconds = 0;
  int64_t timed_steps = 0;  // decode steps that were not also checked against full attention,
  double step_seconds = 0;  // and their time
};

struct AnswerOptions {
  int64_t max_tokens = -1;  // -1: until the answer ends or the context is full
  bool ignore_eos = false;
};

// Samples after the session's last logits. Complete characters go to `on_text` as they appear; its error ends the run.
Result<Answer> generate(Session& session, const Tokenizer& tokenizer, Sampler& sampler, const AnswerOptions& options,
                        const std::atomic<bool>* cancel, const std::function<Status(std::string_view)>& on_text);

// What reading and answering cost.
struct RunCost {
  int64_t prompt_tokens = 0;    // read in this run
  int64_t restored_tokens = 0;  // taken from a KV file
  double prompt_seconds = 0;
  double first_token_seconds = 0;  // from the program's start
  int64_t context = 0;
  double read_bandwidth = 0;  // bytes/s; 0 = not measured
};

nlohmann::ordered_json cost_json(const Session& session, const Answer& answer, const RunCost& cost);
// Several lines for standard error.
std::string cost_text(const nlohmann::ordered_json& cost);
// What follows an answer: all of it with its cost as JSON on standard output, or the cost as text on standard error.
Status print_cost(const Answer& answer, const nlohmann::ordered_json& cost, bool json);

// Prints "reading: tokens, tokens/s, time left" on a terminal in place, elsewhere as a line every few seconds.
PrefillProgress progress_line();

}  // namespace longkv::cli
