#include "server/metrics.h"

#include <fmt/format.h>

#include <algorithm>

namespace longkv::server {

void Histogram::add(double seconds) {
  const auto bound = std::lower_bound(kBounds.begin(), kBounds.end(), seconds);
  if (bound != kBounds.end()) ++counts_[size_t(bound - kBounds.begin())];
  ++total_;
  sum_ += seconds;
}

std::string Histogram::text(const std::string& name, const std::string& help) const {
  std::string out = fmt::format("# HELP {} {}\n# TYPE {} histogram\n", name, help, name);
  int64_t sum = 0;
  for (size_t i = 0; i < kBounds.size(); ++i) {
    sum += counts_[i];
    out += fmt::format("{}_bucket{{le=\"{}\"}} {}\n", name, kBounds[i], sum);
  }
  return out +
         fmt::format("{}_bucket{{le=\"+Inf\"}} {}\n{}_sum {}\n{}_count {}\n", name, total_, name, sum_, name, total_);
}

std::string prometheus_text(const Counters& c) {
  std::string out;
  const auto metric = [&](const char* type, const std::string& name, const char* help, double value) {
    out += fmt::format("# HELP {} {}\n# TYPE {} {}\n{} {}\n", name, help, name, type, name, value);
  };
  const auto counter = [&](const std::string& name, const char* help, double value) {
    metric("counter", name, help, value);
  };
  const auto gauge = [&](const std::string& name, const char* help, double value) {
    metric("gauge", name, help, value);
  };
  const double read_tokens = double(c.prompt_tokens - c.cached_tokens);
  const double usage = c.token_capacity > 0 ? double(c.tokens_held) / double(c.token_capacity) : 0.0;

  // llama-server's names.
  counter("llamacpp:prompt_tokens_total", "Prompt tokens processed.", read_tokens);
  counter("llamacpp:prompt_seconds_total", "Prompt process time.", c.prompt_seconds);
  counter("llamacpp:tokens_predicted_total", "Generated tokens.", double(c.answer_tokens));
  counter("llamacpp:tokens_predicted_seconds_total", "Generation time.", c.answer_seconds);
  counter("llamacpp:n_decode_total", "Decode steps.", double(c.steps));
  counter("llamacpp:n_tokens_max", "Largest number of tokens of a sequence.", double(c.longest));
  gauge("llamacpp:n_busy_slots_per_decode", "Slots per decode step.",
        c.steps > 0 ? double(c.slot_steps) / double(c.steps) : 0.0);
  gauge("llamacpp:prompt_tokens_seconds", "Prompt tokens per second.",
        c.prompt_seconds > 0 ? read_tokens / c.prompt_seconds : 0.0);
  gauge("llamacpp:predicted_tokens_seconds", "Generated tokens per second.",
        c.answer_seconds > 0 ? double(c.answer_tokens) / c.answer_seconds : 0.0);
  gauge("llamacpp:requests_processing", "Requests in slots.", c.busy);
  gauge("llamacpp:requests_deferred", "Requests that wait for a slot.", c.waiting);

  // vLLM's names.
  gauge("vllm:num_requests_running", "Requests in slots.", c.busy);
  gauge("vllm:num_requests_waiting", "Requests that wait for a slot.", c.waiting);
  gauge("vllm:kv_cache_usage_perc", "Tokens held, of those that all slots can hold (0 to 1).", usage);
  counter("vllm:prompt_tokens_total", "Prompt tokens asked for.", double(c.prompt_tokens));
  counter("vllm:generation_tokens_total", "Generated tokens.", double(c.answer_tokens));
  counter("vllm:prefix_cache_queries_total", "Prompt tokens looked for among those held.", double(c.prompt_tokens));
  counter("vllm:prefix_cache_hits_total", "Prompt tokens found among those held.", double(c.cached_tokens));
  out += c.first_token.text("vllm:time_to_first_token_seconds", "From arrival to the first token.");
  out += c.between_tokens.text("vllm:inter_token_latency_seconds", "Between two tokens of an answer.");
  out += c.request.text("vllm:e2e_request_latency_seconds", "From arrival to the end of the answer.");

  // What neither has.
  gauge("longkv:slots", "Sequences that can run at once.", c.slots);
  out += "# HELP longkv:kv_bytes KV bytes held, by tier.\n# TYPE longkv:kv_bytes gauge\n";
  const PrefixCacheStats& p = c.prefixes;
  out += fmt::format(
      "longkv:kv_bytes{{tier=\"cpu\"}} {}\nlongkv:kv_bytes{{tier=\"cpu_cache\"}} {}\n"
      "longkv:kv_bytes{{tier=\"disk\"}} {}\n",
      c.kv_bytes_held, p.bytes_ram, p.bytes_disk);
  counter("longkv:kv_bytes_read_total", "K and V bytes read by decoding.", double(c.kv_bytes_read));
  counter("longkv:index_bytes_read_total", "Bytes of summaries read by decoding.", double(c.index_bytes_read));
  gauge("longkv:kv_bytes_read_per_token", "K, V and summary bytes read per generated token.",
        c.answer_tokens > 0 ? double(c.kv_bytes_read + c.index_bytes_read) / double(c.answer_tokens) : 0.0);
  counter("longkv:select_seconds_total", "Time spent choosing rows.", c.select_seconds);
  counter("longkv:attend_seconds_total", "Time spent attending to rows.", c.attend_seconds);
  counter("longkv:prefix_hit_tokens_total", "Prompt tokens that were held already.", double(c.cached_tokens));
  counter("longkv:prefix_cache_hit_tokens_total", "Of these, tokens that the prefix cache held, not a slot.",
          double(c.stored_tokens));
  counter("longkv:prefix_cache_stored_total", "Beginnings stored.", double(p.stored));
  counter("longkv:prefix_cache_ignored_files_total", "Files of the folder that are of no use.",
          double(p.ignored_files));
  const auto tiers = [&](const char* type, const char* name, const char* help, int64_t ram, int64_t disk) {
    out += fmt::format("# HELP {0} {1}\n# TYPE {0} {2}\n{0}{{tier=\"cpu_cache\"}} {3}\n{0}{{tier=\"disk\"}} {4}\n",
                       name, help, type, ram, disk);
  };
  tiers("gauge", "longkv:prefix_cache_entries", "Beginnings held.", p.entries_ram, p.entries_disk);
  tiers("counter", "longkv:prefix_cache_evicted_total", "Beginnings that left.", p.evicted_ram, p.evicted_disk);
  counter("longkv:captured_mass_sum", "Captured attention mass of checked answers, summed.", c.captured_mass_sum);
  counter("longkv:captured_mass_count", "Answers in which steps were checked.", double(c.captured_mass_count));
  out += "# HELP longkv:requests_total Requests by how they ended.\n# TYPE longkv:requests_total counter\n";
  const std::pair<const char*, int64_t> ends[] = {{"stop", c.finished_stop},  {"length", c.finished_length},
                                                  {"cancelled", c.cancelled}, {"timeout", c.timed_out},
                                                  {"failed", c.failed},       {"refused", c.refused}};
  for (const auto& [end, n] : ends) out += fmt::format("longkv:requests_total{{end=\"{}\"}} {}\n", end, n);
  return out;
}

}  // namespace longkv::server
