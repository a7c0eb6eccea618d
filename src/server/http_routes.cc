// Routes that answer from what is known.
#include "server/http_routes.h"

#include <fmt/format.h>

#include <ctime>

#include "base/version.h"
#include "server/api_response.h"
#include "server/fields.h"

namespace longkv::server {

namespace {

using json = nlohmann::ordered_json;
using Json = json;

void answer(httplib::Response& response, const Json& json) {
  response.status = 200;
  response.set_content(to_text(json), "application/json");
}

bool valid_utf8(const std::string& text) {
  try {
    (void)json(text).dump();
    return true;
  } catch (const json::exception&) {
    return false;
  }
}

// A token's text; bytes where it is no text.
Json piece_json(const std::string& piece) {
  if (valid_utf8(piece)) return piece;
  Json bytes = Json::array();
  for (const char c : piece) bytes.push_back(static_cast<unsigned char>(c));
  return bytes;
}

Json sampling_json(const SamplingParams& p) {
  return {{"temperature", p.temperature},
          {"top_k", p.top_k},
          {"top_p", p.top_p},
          {"min_p", p.min_p},
          {"typical_p", p.typical},
          {"repeat_penalty", p.repeat_penalty},
          {"repeat_last_n", p.repeat_last_n},
          {"presence_penalty", p.presence_penalty},
          {"frequency_penalty", p.frequency_penalty}};
}

}  // namespace

void answer_error(httplib::Response& response, const ApiError& error) {
  response.status = error.status;
  if (error.status == 503) response.set_header("Retry-After", "1");
  response.set_content(to_text(error.body()), "application/json");
}

void HttpRoutes::health(const Request&, Response& response) { answer(response, {{"status", "ok"}}); }

void HttpRoutes::models(const Request&, Response& response) {
  const ModelConfig& c = service.model().config();
  Json model = {{"id", service.alias()},
                {"object", "model"},
                {"created", int64_t(std::time(nullptr))},
                {"owned_by", "longkv"},
                {"max_model_len", service.context()},
                {"meta",
                 {{"vocab_type", service.tokenizer().pre_tokenizer()},
                  {"n_vocab", c.vocab},
                  {"n_ctx", service.context()},
                  {"n_ctx_train", c.context},
                  {"n_embd", c.dim},
                  {"kv", service.recipe_names()}}}};
  answer(response, {{"object", "list"}, {"data", Json::array({std::move(model)})}});
}

void HttpRoutes::tokenize(const Request& request, Response& response) {
  json body;
  if (const auto error = parse_body(request.body, body)) return answer_error(response, *error);
  Fields fields(body);
  const auto content = fields.text("content", size_t(1) << 30);
  const bool add_special = fields.boolean("add_special").value_or(false);
  const bool parse_special = fields.boolean("parse_special").value_or(true);
  const bool pieces = fields.boolean("with_pieces").value_or(false);
  if (!content) fields.fail("content", "'content' must be a string");
  if (const auto& error = fields.finish()) return answer_error(response, *error);
  const auto ids = service.tokenizer().encode(*content, add_special, parse_special);
  if (!ids.ok()) return answer_error(response, api_error(ids.status()));
  Json tokens = Json::array();
  for (const int32_t id : *ids) {
    pieces ? tokens.push_back({{"id", id}, {"piece", piece_json(std::string(service.tokenizer().piece(id)))}})
           : tokens.push_back(id);
  }
  answer(response, {{"tokens", std::move(tokens)}});
}

void HttpRoutes::detokenize(const Request& request, Response& response) {
  json body;
  if (const auto error = parse_body(request.body, body)) return answer_error(response, *error);
  Fields fields(body);
  const json* tokens = fields.any("tokens");
  std::vector<int32_t> ids;
  const int64_t vocab = service.model().config().vocab;
  if (tokens == nullptr || !tokens->is_array()) fields.fail("tokens", "'tokens' must be a list of token ids");
  for (const json& id : tokens != nullptr && tokens->is_array() ? *tokens : json::array()) {
    const int64_t number = whole_number(id).value_or(-1);
    if (number < 0 || number >= vocab) {
      fields.fail("tokens", fmt::format("'tokens' must be a list of token ids from 0 to {}", vocab - 1));
      break;
    }
    ids.push_back(int32_t(number));
  }
  if (const auto& error = fields.finish()) return answer_error(response, *error);
  answer(response, {{"content", service.tokenizer().decode(ids, /*show_special=*/true)}});
}

void HttpRoutes::apply_template(const Request& request, Response& response) {
  json body;
  if (const auto error = parse_body(request.body, body)) return answer_error(response, *error);
  Fields fields(body);
  const Service::ChatInput input = read_conversation(service, fields).input;
  (void)fields.text("model", size_t(1) << 30);
  if (const auto& error = fields.finish()) return answer_error(response, *error);
  const auto text = service.chat_text(input);
  if (!text.ok()) return answer_error(response, api_error(text.status()));
  answer(response, {{"prompt", *text}});
}

void HttpRoutes::props(const Request&, Response& response) {
  const ServiceOptions& o = service.options();
  const auto chat_template = service.model().file().metadata().string("tokenizer.chat_template");
  Json settings = sampling_json(o.sampling);
  settings["n_ctx"] = service.context();
  Json j;
  j["default_generation_settings"] = {{"n_ctx", service.context()}, {"params", std::move(settings)}};
  j["total_slots"] = o.scheduler.slots;
  j["model_alias"] = service.alias();
  j["model_path"] = o.model_path;
  j["chat_template"] = chat_template.ok() ? std::string(*chat_template) : std::string();
  const Tokenizer& tokenizer = service.tokenizer();
  j["bos_token"] = tokenizer.bos() ? std::string(tokenizer.piece(*tokenizer.bos())) : std::string();
  j["eos_token"] = tokenizer.eos() ? std::string(tokenizer.piece(*tokenizer.eos())) : std::string();
  j["build_info"] = fmt::format("longkv {} ({}, {})", version(), build_commit(), build_compiler());
  j["n_ctx_train"] = service.model().config().context;
  j["kv"] = service.recipe_names();
  j["queue"] = o.scheduler.queue;
  j["weight_bytes_per_token"] = service.model().weights().bytes_per_token();
  answer(response, j);
}

void HttpRoutes::slots(const Request& request, Response& response) {
  if (!options.slots)
    return answer_error(response, {501, "not_supported_error", "this server was started with --no-slots"});
  const std::string wanted = request.get_param_value("fail_on_no_slot");
  if (!wanted.empty() && wanted != "0" && wanted != "1") {
    return answer_error(response,
                        {400, "invalid_request_error", "'fail_on_no_slot' must be 0 or 1", "fail_on_no_slot"});
  }
  const auto infos = service.scheduler().slots();
  bool idle = false;
  Json list = Json::array();
  for (const SlotInfo& s : infos) {
    idle |= s.state == SlotState::kIdle;
    Json j;
    j["id"] = s.id;
    j["id_task"] = s.request;
    j["state"] = s.state == SlotState::kIdle ? "idle" : s.state == SlotState::kReading ? "reading" : "answering";
    j["is_processing"] = s.state != SlotState::kIdle;
    j["n_ctx"] = s.context;
    j["n_tokens"] = s.held;
    j["prompt"] = {{"total", s.prompt_tokens},
                   {"cache", s.cached},
                   {"processed", s.prompt_done},
                   {"remaining", std::max<int64_t>(0, s.prompt_tokens - s.prompt_done)}};
    j["next_token"] = {{"n_decoded", s.answered}, {"n_remain", s.max_tokens < 0 ? -1 : s.max_tokens - s.answered}};
    j["params"] = sampling_json(s.sampling);
    j["kv"] = {{"recipe", s.recipe}, {"bytes_held", s.kv_bytes}, {"bytes_read_per_token", s.read_per_token}};
    if (s.captured_mass >= 0) j["kv"]["captured_mass"] = s.captured_mass;
    list.push_back(std::move(j));
  }
  if (wanted == "1" && !idle) return answer_error(response, {503, "unavailable_error", "no slot is idle"});
  answer(response, list);
}

// Where KV bytes lie: in slots, and in the tiers of the prefix cache.
void HttpRoutes::cache(const Request&, Response& response) {
  const Counters c = service.scheduler().counters();
  const PrefixCacheStats& p = c.prefixes;
  Json j;
  j["slots"] = {{"bytes", c.kv_bytes_held}, {"tokens", c.tokens_held}};
  j["cpu_cache"] = {{"bytes", p.bytes_ram}, {"entries", p.entries_ram}};
  j["disk"] = {{"bytes", p.bytes_disk}, {"entries", p.entries_disk}};
  j["prompt_tokens"] = c.prompt_tokens;
  j["held_tokens"] = c.cached_tokens;
  answer(response, j);
}

void HttpRoutes::metrics(const Request&, Response& response) {
  if (!options.metrics)
    return answer_error(response, {501, "not_supported_error", "this server was started without --metrics"});
  response.set_content(prometheus_text(service.scheduler().counters()), "text/plain; version=0.0.4");
}

void HttpRoutes::not_implemented(const Request& request, Response& response) {
  answer_error(response, {501, "not_supported_error",
                          request.path.substr(0, 100) + " is not supported; /v1/chat/completions, /v1/completions and "
                                                        "/completion are"});
}

}  // namespace longkv::server
