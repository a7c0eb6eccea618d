#include "answer.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <memory>

#include "base/log.h"
#include "base/seconds.h"
#include "output.h"
#include "tokenizer/stream_decoder.h"

namespace longkv::cli {

namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

Result<Answer> generate(Session& session, const Tokenizer& tokenizer, Sampler& sampler, const AnswerOptions& options,
                        const std::atomic<bool>* cancel, const std::function<Status(std::string_view)>& on_text) {
  Answer answer;
  StreamDecoder decoder;
  auto emit = [&](std::string_view text) -> Status {
    if (text.empty()) return {};
    answer.text += text;
    return on_text(text);
  };
  const auto begin = Clock::now();
  answer.finish = "length";
  while (options.max_tokens < 0 || int64_t(answer.ids.size()) < options.max_tokens) {
    const int32_t id = sampler.sample(session.logits());
    if (!options.ignore_eos && tokenizer.is_eog(id)) {
      answer.finish = "stop";
      break;
    }
    sampler.accept(id);
    answer.ids.push_back(id);
    if (!tokenizer.is_control(id)) LONGKV_TRY(emit(decoder.push(tokenizer.piece(id))));
    // The token belongs to the sequence even when nothing follows it, so that a later turn continues after it.
    if (session.tokens() >= session.context()) break;
    const auto step_begin = Clock::now();
    LONGKV_TRY(session.decode(id));
    if (!session.last_step_checked()) {
      ++answer.timed_steps;
      answer.step_seconds += seconds_since(step_begin);
    }
    if (cancel->load()) {
      answer.finish = "interrupted";
      break;
    }
  }
  LONGKV_TRY(emit(decoder.flush()));
  answer.seconds = seconds_since(begin);
  return answer;
}

nlohmann::ordered_json cost_json(const Session& session, const Answer& answer, const RunCost& cost) {
  const KvStats& stats = session.kv_stats();
  nlohmann::ordered_json j;
  j["kv"] = session.kv().recipe().canonical();
  j["prompt_tokens"] = cost.prompt_tokens;
  if (cost.restored_tokens > 0) j["restored_tokens"] = cost.restored_tokens;
  j["prompt_seconds"] = cost.prompt_seconds;
  j["prompt_tokens_per_second"] = cost.prompt_seconds > 0 ? double(cost.prompt_tokens) / cost.prompt_seconds : 0.0;
  j["prompt_attention_seconds"] = session.kv().prefill_stats().seconds_attend;
  j["prompt_density"] = session.kv().prefill_stats().density();
  j["answer_tokens"] = answer.ids.size();
  j["answer_seconds"] = answer.seconds;
  const double rate = answer.step_seconds > 0 ? double(answer.timed_steps) / answer.step_seconds : 0.0;
  j["answer_tokens_per_second"] = rate;
  j["first_token_seconds"] = cost.first_token_seconds;
  j["context"] = cost.context;
  j["tokens_held"] = session.tokens();
  j["kv_bytes_held"] = session.kv_bytes_held();
  if (session.on_card() && session.options().card->host_layers() > 0) {
    j["layers_in_memory"] = session.options().card->host_layers();
    j["streamed_weight_bytes"] = session.options().card->streamed_bytes();
  }
  if (stats.steps > 0) {
    const double steps = double(stats.steps);
    const double kv = double(stats.kv_bytes) / steps, index = double(stats.index_bytes) / steps;
    const auto weights = double(session.model().weights().bytes_per_token());
    const ModelConfig& c = session.model().config();
    j["rows_attended"] = double(stats.rows_attended) / steps / double(c.layers) / double(c.kv_heads);
    j["kv_bytes_per_token"] = kv;
    j["index_bytes_per_token"] = index;
    j["weight_bytes_per_token"] = weights;
    if (const int64_t blocks = stats.blocks_found + stats.blocks_fetched; blocks > 0) {
      j["blocks_found_on_card"] = double(stats.blocks_found) / double(blocks);
      j["bus_bytes_per_token"] = double(stats.bus_bytes) / steps;
    }
    j["gb_per_s"] = (kv + index + weights) * rate / 1e9;
    if (cost.read_bandwidth > 0) {
      j["read_bandwidth_gb_per_s"] = cost.read_bandwidth / 1e9;
      j["bandwidth_share"] = (kv + index + weights) * rate / cost.read_bandwidth;
    }
  }
  if (stats.checked_steps > 0) {
    double mass = 0, error = 0;
    for (size_t l = 0; l < stats.captured_mass.size(); ++l) {
      j["captured_mass_by_layer"].push_back(stats.captured_mass[l] / double(stats.checked_steps));
      j["output_error_by_layer"].push_back(stats.output_error[l] / double(stats.checked_steps));
      mass += stats.captured_mass[l];
      error += stats.output_error[l];
    }
    const double n = double(stats.checked_steps) * double(stats.captured_mass.size());
    j["checked_steps"] = stats.checked_steps;
    j["captured_mass"] = mass / n;
    j["output_error"] = error / n;
    j["kl_divergence"] = session.kl_mean();
  }
  return j;
}

std::string cost_text(const nlohmann::ordered_json& j) {
  auto number = [&](const char* key) { return j.contains(key) ? j[key].get<double>() : 0.0; };
  std::string out = fmt::format("prompt  {:>8.0f} tokens in {:.2f} s, {:.1f} tokens/s", number("prompt_tokens"),
                                number("prompt_seconds"), number("prompt_tokens_per_second"));
  if (number("prompt_density") < 1) {
    out += fmt::format("; {:.1f}% of the attention scores computed", 100 * number("prompt_density"));
  }
  out += "\n";
  out += fmt::format("answer  {:>8.0f} tokens in {:.2f} s, {:.1f} tokens/s\n", number("answer_tokens"),
                     number("answer_seconds"), number("answer_tokens_per_second"));
  if (j.contains("kv_bytes_per_token")) {
    out += fmt::format(
        "read    {:.2f} MB of KV and {:.2f} MB of index a token ({:.0f} rows a KV head), {:.1f} MB of weights; {:.1f} "
        "GB/s",
        number("kv_bytes_per_token") / 1e6, number("index_bytes_per_token") / 1e6, number("rows_attended"),
        number("weight_bytes_per_token") / 1e6, number("gb_per_s"));
    if (j.contains("bandwidth_share")) {
      out += fmt::format(" = {:.0f}% of the {:.1f} GB/s that this machine reads", 100 * number("bandwidth_share"),
                         number("read_bandwidth_gb_per_s"));
    }
    out += "\n";
  }
  if (j.contains("layers_in_memory")) {
    out += fmt::format("card    {:.0f} layers in memory; {:.1f} MB of their weights crossed the bus\n",
                       number("layers_in_memory"), number("streamed_weight_bytes") / 1e6);
  }
  if (j.contains("blocks_found_on_card")) {
    out += fmt::format("card    {:.1f}% of the attended blocks lay there; {:.2f} MB a token fetched from memory\n",
                       100 * number("blocks_found_on_card"), number("bus_bytes_per_token") / 1e6);
  }
  if (j.contains("captured_mass")) {
    out += fmt::format(
        "check   {:.0f} steps: captured attention mass {:.4f}, relative output error {:.4f}, KL divergence {:.2e}\n",
        number("checked_steps"), number("captured_mass"), number("output_error"), number("kl_divergence"));
    for (size_t l = 0; log_level() >= LogLevel::kVerbose && l < j["captured_mass_by_layer"].size(); ++l) {
      out += fmt::format("        layer {}: captured attention mass {:.4f}, relative output error {:.4f}\n", l,
                         j["captured_mass_by_layer"][l].get<double>(), j["output_error_by_layer"][l].get<double>());
    }
  }
  out += fmt::format("held    {:.0f} tokens, {:.1f} MB of KV; context {:.0f}\n", number("tokens_held"),
                     number("kv_bytes_held") / 1e6, number("context"));
  return out;
}

Status print_cost(const Answer& answer, const nlohmann::ordered_json& cost, bool json) {
  if (json) {
    nlohmann::ordered_json j;
    j["text"] = answer.text;
    j["finish"] = answer.finish;
    j["ids"] = answer.ids;
    j["cost"] = cost;
    return print(json_text(j));
  }
  if (log_level() >= LogLevel::kInfo) log_info("\n{}", cost_text(cost));
  return {};
}

PrefillProgress progress_line() {
  if (log_level() < LogLevel::kInfo) return {};
  const bool terminal = ::isatty(STDERR_FILENO) != 0;
  auto begin = Clock::now();
  auto last = begin;
  return [=](int64_t done, int64_t total) mutable {
    const auto now = Clock::now();
    const double pause = terminal ? 0.2 : 5.0;
    const bool finished = done >= total;
    if (std::chrono::duration<double>(now - last).count() < pause && !(finished && terminal)) return;
    last = now;
    const double elapsed = std::chrono::duration<double>(now - begin).count();
    const double rate = elapsed > 0 ? double(done) / elapsed : 0;
    std::fprintf(stderr, "%sreading: %lld of %lld tokens, %.0f tokens/s, %.0f s left%s", terminal ? "\r" : "",
                 static_cast<long long>(done), static_cast<long long>(total), rate,
                 rate > 0 ? double(total - done) / rate : 0.0, terminal ? (finished ? "   \n" : "   ") : "\n");
  };
}

}  // namespace longkv::cli
