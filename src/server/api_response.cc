#include "server/api_response.h"

#include <cmath>
#include <ctime>
#include <utility>

#include "base/version.h"

namespace longkv::server {

namespace {

using Json = nlohmann::ordered_json;

double per_second(double n, double ms) { return ms > 0 ? n / ms * 1000 : 0.0; }

// Log probabilities of minus infinity have no JSON; OpenAI writes this.
double finite(double logprob) { return std::isfinite(logprob) ? logprob : -9999.0; }

Json bytes_of(const std::string& text) {
  Json bytes = Json::array();
  for (const char c : text) bytes.push_back(static_cast<unsigned char>(c));
  return bytes;
}

Json chance_json(const TokenChance& chance) {
  return {{"token", chance.bytes}, {"logprob", finite(chance.logprob)}, {"bytes", bytes_of(chance.bytes)}};
}

}  // namespace

std::string to_text(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }
std::string to_text(const nlohmann::json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string sse(const std::string& data) { return "data: " + data + "\n\n"; }

Json timings_json(const Timings& t) {
  const double read = double(t.prompt_tokens - t.cached_tokens), answered = double(t.answer_tokens);
  Json j;
  j["cache_n"] = t.cached_tokens;
  if (t.cached_tokens > 0) j["cache_from"] = t.from_cache ? "cache" : "slot";
  j["prompt_n"] = t.prompt_tokens - t.cached_tokens;
  j["prompt_ms"] = t.prompt_ms;
  j["prompt_per_token_ms"] = read > 0 ? t.prompt_ms / read : 0.0;
  j["prompt_per_second"] = per_second(read, t.prompt_ms);
  j["predicted_n"] = t.answer_tokens;
  j["predicted_ms"] = t.answer_ms;
  j["predicted_per_token_ms"] = answered > 0 ? t.answer_ms / answered : 0.0;
  j["predicted_per_second"] = per_second(answered, t.answer_ms);
  j["queue_ms"] = t.queue_ms;
  j["kv"] = {{"recipe", t.recipe},
             {"slot", t.slot},
             {"bytes_held", t.kv_bytes_held},
             {"bytes_read_per_token", t.kv_bytes_per_token},
             {"index_bytes_read_per_token", t.index_bytes_per_token}};
  if (t.captured_mass >= 0) j["kv"]["captured_mass"] = t.captured_mass;
  return j;
}

AnswerWriter::AnswerWriter(const ApiRequest& request, const std::string& model)
    : request_(request), model_(model), created_(int64_t(std::time(nullptr))) {
  if (!request.tools.empty()) tool_text_.emplace(request.tools);
}

const char* AnswerWriter::finish_reason() const {
  return !calls_.empty() ? "tool_calls" : finished_->finish == Finish::kStop ? "stop" : "length";
}

Json AnswerWriter::envelope(bool chunk) const {
  const bool chat = request_.route == Route::kChat;
  Json j;
  j["id"] = request_.generate.id;
  j["object"] = !chat ? "text_completion" : chunk ? "chat.completion.chunk" : "chat.completion";
  j["created"] = created_;
  j["model"] = model_;
  j["system_fingerprint"] = std::string("longkv-") + version();
  j["choices"] = Json::array();
  return j;
}

Json AnswerWriter::logprobs(const std::vector<TokenReport>& reports) const {
  Json j;
  if (request_.route != Route::kCompletions) {
    j["content"] = Json::array();
    for (const TokenReport& r : reports) {
      Json token = chance_json(r.chosen);
      token["top_logprobs"] = Json::array();
      for (const TokenChance& c : r.top) token["top_logprobs"].push_back(chance_json(c));
      j["content"].push_back(std::move(token));
    }
    return j;
  }
  for (const char* name : {"tokens", "token_logprobs", "top_logprobs", "text_offset"}) j[name] = Json::array();
  size_t offset = 0;
  for (const TokenReport& r : reports) {
    j["tokens"].push_back(r.chosen.bytes);
    const bool known = !std::isnan(r.chosen.logprob);
    j["token_logprobs"].push_back(known ? Json(finite(r.chosen.logprob)) : Json());
    Json top = Json::object();
    for (const TokenChance& c : r.top) top[c.bytes] = finite(c.logprob);
    j["top_logprobs"].push_back(known ? std::move(top) : Json());
    j["text_offset"].push_back(offset);
    offset += r.chosen.bytes.size();
  }
  return j;
}

Json AnswerWriter::choice(const TextPiece& piece, const char* finish) const {
  Json j;
  j["index"] = 0;
  if (request_.route == Route::kChat) {
    j["delta"] = Json::object();
    if (!piece.text.empty()) j["delta"]["content"] = piece.text;
  } else {
    j["text"] = piece.text;
  }
  j["logprobs"] = request_.generate.logprobs >= 0 && !piece.reports.empty() ? logprobs(piece.reports) : Json();
  j["finish_reason"] = finish != nullptr ? Json(finish) : Json();
  return j;
}

Json AnswerWriter::usage() const {
  const Timings& t = finished_->timings;
  return {{"prompt_tokens", t.prompt_tokens},
          {"completion_tokens", t.answer_tokens},
          {"total_tokens", t.prompt_tokens + t.answer_tokens},
          {"prompt_tokens_details", {{"cached_tokens", t.cached_tokens}}}};
}

// llama-server's own shape.
Json AnswerWriter::native(const TextPiece& piece, bool last) const {
  Json j;
  j["index"] = 0;
  j["content"] = piece.text;
  j["tokens"] = request_.return_tokens ? Json(piece.ids) : Json::array();
  j["stop"] = last;
  if (request_.generate.logprobs >= 0) j["completion_probabilities"] = logprobs(piece.reports)["content"];
  if (!last) return j;
  const Timings& t = finished_->timings;
  j["id_slot"] = t.slot;
  j["model"] = model_;
  j["tokens_predicted"] = t.answer_tokens;
  j["tokens_evaluated"] = t.prompt_tokens;
  j["tokens_cached"] = t.cached_tokens;
  j["truncated"] = false;
  j["stop_type"] = finished_->finish == Finish::kLength ? "limit" : finished_->stop.empty() ? "eos" : "word";
  j["stopping_word"] = finished_->stop;
  j["timings"] = timings_json(t);
  return j;
}

std::string AnswerWriter::message(Json json) {
  if (request_.timings_per_token && tokens_ > 0 && !json.contains("timings")) {
    const double ms =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - first_token_).count();
    json["timings"] = {
        {"predicted_n", tokens_}, {"predicted_ms", ms}, {"predicted_per_second", per_second(double(tokens_ - 1), ms)}};
  }
  return sse(to_text(json));
}

std::string AnswerWriter::stream_begin() {
  if (request_.route != Route::kChat) return request_.echo ? stream(TextPiece{request_.prompt, {}, {}}) : "";
  Json j = envelope(true);
  Json first = choice({}, nullptr);
  first["delta"] = {{"role", "assistant"}, {"content", ""}};
  j["choices"].push_back(std::move(first));
  return message(std::move(j));
}

std::string AnswerWriter::stream(const Event& event) {
  if (const auto* progress = std::get_if<PromptProgress>(&event)) {
    if (!request_.return_progress) return "";
    Json j = request_.route == Route::kNative ? native({}, false) : envelope(true);
    if (request_.route != Route::kNative) j["choices"].push_back(choice({}, nullptr));
    j["prompt_progress"] = {{"total", progress->total},
                            {"cache", progress->cached},
                            {"processed", progress->done},
                            {"time_ms", progress->ms}};
    return message(std::move(j));
  }
  if (const auto* piece = std::get_if<TextPiece>(&event)) {
    if (tokens_ == 0) first_token_ = std::chrono::steady_clock::now();
    tokens_ += int64_t(piece->ids.size());
    if (request_.route == Route::kNative) return message(native(*piece, false));
    Json j = envelope(true);
    TextPiece shown = *piece;
    if (tool_text_) shown.text = tool_text_->push(piece->text);
    j["choices"].push_back(choice(shown, nullptr));
    return message(std::move(j));
  }
  if (const auto* finished = std::get_if<Finished>(&event)) {
    finished_ = *finished;
    take_calls();
    return last_messages();
  }
  if (const auto* error = std::get_if<Status>(&event)) {
    error_ = *error;
    return sse(to_text(api_error(*error).body()));
  }
  return "";
}

void AnswerWriter::take_calls() {
  if (tool_text_) calls_ = tool_text_->finish(held_text_);
}

Json AnswerWriter::calls_json(const std::vector<ToolCall>& calls, bool chunk) const {
  Json list = Json::array();
  for (size_t i = 0; i < calls.size(); ++i) {
    Json call;
    if (chunk) call["index"] = i;
    call["id"] = "call_" + request_.generate.id.substr(request_.generate.id.find('-') + 1, 16) + std::to_string(i);
    call["type"] = "function";
    call["function"] = {{"name", calls[i].name}, {"arguments", calls[i].arguments}};
    list.push_back(std::move(call));
  }
  return list;
}

std::string AnswerWriter::last_messages() {
  if (request_.route == Route::kNative) return message(native({}, true));
  Json j = envelope(true);
  TextPiece held;
  held.text = held_text_;
  Json last_choice = choice(held, finish_reason());
  if (!calls_.empty()) last_choice["delta"]["tool_calls"] = calls_json(calls_, /*chunk=*/true);
  j["choices"].push_back(std::move(last_choice));
  j["timings"] = timings_json(finished_->timings);
  std::string out = message(std::move(j));
  if (request_.include_usage) {
    Json last = envelope(true);
    last["usage"] = usage();
    last["timings"] = timings_json(finished_->timings);
    out += message(std::move(last));
  }
  return out + sse("[DONE]");
}

void AnswerWriter::add(const Event& event) {
  if (const auto* piece = std::get_if<TextPiece>(&event)) {
    all_.text += piece->text;
    all_.ids.insert(all_.ids.end(), piece->ids.begin(), piece->ids.end());
    all_.reports.insert(all_.reports.end(), piece->reports.begin(), piece->reports.end());
  } else if (const auto* prompt = std::get_if<PromptReports>(&event)) {
    prompt_reports_ = prompt->reports;
  } else if (const auto* finished = std::get_if<Finished>(&event)) {
    finished_ = *finished;
    if (tool_text_) {
      all_.text = tool_text_->push(all_.text);
      take_calls();
      all_.text += held_text_;
    }
  } else if (const auto* error = std::get_if<Status>(&event)) {
    error_ = *error;
  }
}

std::string AnswerWriter::whole() const {
  if (request_.route == Route::kNative) {
    Json j = native(all_, true);
    if (request_.echo) j["content"] = request_.prompt + all_.text;
    return to_text(j);
  }
  Json j = envelope(false);
  Json one = choice(all_, finish_reason());
  if (request_.route == Route::kChat) {
    one.erase("delta");
    one["message"] = {{"role", "assistant"}, {"content", all_.text}};
    if (!calls_.empty()) {
      if (all_.text.empty()) one["message"]["content"] = nullptr;
      one["message"]["tool_calls"] = calls_json(calls_, /*chunk=*/false);
    }
  } else if (request_.echo) {
    one["text"] = request_.prompt + all_.text;
    std::vector<TokenReport> reports = prompt_reports_;
    reports.insert(reports.end(), all_.reports.begin(), all_.reports.end());
    if (!reports.empty()) one["logprobs"] = logprobs(reports);
  }
  j["choices"].push_back(std::move(one));
  j["usage"] = usage();
  j["timings"] = timings_json(finished_->timings);
  return to_text(j);
}

}  // namespace longkv::server
