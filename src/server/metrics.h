// Counters of a running server, and their text for Prometheus.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "engine/prefix_cache.h"

namespace longkv::server {

// Cumulative counts of values up to each bound, as Prometheus wants them.
class Histogram {
 public:
  // 1 ms to 1000 s.
  static constexpr std::array<double, 19> kBounds = {0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1,
                                                     2,     5,     10,    20,   50,   100,  200, 500, 1000};
  void add(double seconds);
  std::string text(const std::string& name, const std::string& help) const;

 private:
  std::array<int64_t, kBounds.size()> counts_{};  // not cumulative
  int64_t total_ = 0;
  double sum_ = 0;
};

struct Counters {
  int64_t prompt_tokens = 0;  // asked for, those that were held already included
  int64_t cached_tokens = 0;  // of them held already,
  int64_t stored_tokens = 0;  // ... by the prefix cache, not by a slot
  double prompt_seconds = 0;  // of work
  int64_t answer_tokens = 0;
  double answer_seconds = 0;  // of decode steps, sampling included
  int64_t steps = 0;          // decode steps of any number of slots
  int64_t slot_steps = 0;     // ... times the slots in them
  int64_t longest = 0;        // tokens that a sequence reached
  int64_t finished_stop = 0, finished_length = 0;
  int64_t cancelled = 0, timed_out = 0, failed = 0, refused = 0;
  int64_t kv_bytes_read = 0, index_bytes_read = 0;  // by decoding
  double select_seconds = 0, attend_seconds = 0;
  double captured_mass_sum = 0;  // over answers in which steps were checked
  int64_t captured_mass_count = 0;
  Histogram first_token, between_tokens, request;

  // What is true now.
  int slots = 0, busy = 0, waiting = 0;
  int64_t kv_bytes_held = 0;
  int64_t tokens_held = 0, token_capacity = 0;
  PrefixCacheStats prefixes;
};

std::string prometheus_text(const Counters& counters);

}  // namespace longkv::server
