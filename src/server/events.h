// What the scheduler tells about a request, and the queue between its thread and the one that writes to the client.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <variant>
#include <vector>

#include "longkv/status.h"

namespace longkv::server {

struct TokenChance {
  int32_t id = 0;
  std::string bytes;
  double logprob = 0;  // natural, of the model's distribution before any sampler
};

struct TokenReport {
  TokenChance chosen;
  std::vector<TokenChance> top;  // descending
};

struct PromptProgress {
  int64_t total = 0;   // tokens of the prompt
  int64_t cached = 0;  // of them held already
  int64_t done = 0;    // of them held now
  double ms = 0;
};

struct TextPiece {
  std::string text;  // whole UTF-8 characters
  std::vector<int32_t> ids;
  std::vector<TokenReport> reports;  // of the tokens whose text is complete with this piece
};

// Of prompt tokens in order. The first token has no probability: its report has no alternatives and logprob NaN.
struct PromptReports {
  std::vector<TokenReport> reports;
};

enum class Finish { kStop, kLength };

struct Timings {
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;
  bool from_cache = false;  // the prefix cache had them, not the slot
  int64_t answer_tokens = 0;
  double queue_ms = 0;
  double prompt_ms = 0;
  double answer_ms = 0;
  double kv_bytes_per_token = 0;  // K and V rows, and
  double index_bytes_per_token = 0;
  double captured_mass = -1;  // of the checked steps; -1: none was checked
  int64_t kv_bytes_held = 0;
  int slot = -1;
  std::string recipe;  // canonical
};

struct Finished {
  Finish finish = Finish::kStop;
  std::string stop;  // the stop string that ended the answer; empty: end of turn, or length
  Timings timings;
};

using Event = std::variant<PromptProgress, PromptReports, TextPiece, Finished, Status>;

// One request's events. The scheduler never waits for the reader.
class EventQueue {
 public:
  void push(Event event);
  // Everything that came, in order; waits up to `timeout` for the first.
  std::vector<Event> take(std::chrono::milliseconds timeout);

  // Tells the scheduler that nobody wants the rest. Read by its thread between and inside pieces of work.
  void cancel() { cancelled_.store(true); }
  const std::atomic<bool>& cancelled() const { return cancelled_; }

 private:
  std::mutex mutex_;
  std::condition_variable ready_;
  std::vector<Event> events_;
  std::atomic<bool> cancelled_{false};
};

}  // namespace longkv::server
