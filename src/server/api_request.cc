#include "server/api_request.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "server/fields.h"
#include "server/json_grammar.h"

namespace longkv::server {

namespace {

using json = nlohmann::ordered_json;

constexpr size_t kMaxText = size_t(1) << 30;
constexpr size_t kMaxStops = 16;
constexpr size_t kMaxStopCharacters = 1024;
constexpr size_t kMaxBias = 4096;

std::string new_id(const char* prefix) {
  static thread_local std::mt19937_64 random(std::random_device{}());
  return fmt::format("{}-{:016x}{:016x}", prefix, random(), random());
}

// OpenAI's map from id to bias, or llama-server's list of pairs; false forbids a token.
void read_bias(const Service& service, Fields& fields, SamplingParams& p) {
  const json* bias = fields.any("logit_bias");
  if (bias == nullptr) return;
  const auto add = [&](int64_t id, const json& value) {
    const bool forbidden = value.is_boolean() && !value.get<bool>();
    if (id < 0 || id >= service.model().config().vocab || !(value.is_number() || forbidden) ||
        (value.is_number() && !std::isfinite(value.get<double>()))) {
      fields.fail("logit_bias", fmt::format("'logit_bias' must give numbers to token ids from 0 to {}",
                                            service.model().config().vocab - 1));
      return;
    }
    // -100 stands for "never" in OpenAI's interface.
    const double number = forbidden ? -100 : value.get<double>();
    p.logit_bias.emplace_back(int32_t(id), number <= -100 ? -std::numeric_limits<float>::infinity() : float(number));
  };
  if (bias->size() > kMaxBias) {
    fields.fail("logit_bias", fmt::format("'logit_bias' has more than {} entries", kMaxBias));
  } else if (bias->is_object()) {
    for (const auto& [key, value] : bias->items()) {
      const bool digits = !key.empty() && key.size() < 10 && key.find_first_not_of("0123456789") == std::string::npos;
      add(digits ? std::stoll(key) : -1, value);
    }
  } else if (bias->is_array()) {
    for (const json& pair : *bias) {
      const bool good = pair.is_array() && pair.size() == 2;
      add(good ? whole_number(pair[0]).value_or(-1) : -1, good ? pair[1] : json());
    }
  } else {
    fields.fail("logit_bias", "'logit_bias' must be an object or a list of pairs");
  }
}

void read_sampling(const Service& service, Fields& fields, GenerateRequest& out) {
  SamplingParams& p = out.sampling;
  const auto number = [&](const char* name, double least, double most, float& value) {
    if (const auto given = fields.number(name, least, most)) value = float(*given);
  };
  number("temperature", -kMostTemperature, kMostTemperature, p.temperature);
  number("top_p", 0, 1, p.top_p);
  number("min_p", 0, 1, p.min_p);
  number("typical_p", 0, 1, p.typical);
  number("repeat_penalty", 0.01, 100, p.repeat_penalty);
  number("presence_penalty", -100, 100, p.presence_penalty);
  number("frequency_penalty", -100, 100, p.frequency_penalty);
  if (const auto k = fields.integer("top_k", 0, INT32_MAX)) p.top_k = *k;
  if (const auto n = fields.integer("repeat_last_n", -1, INT32_MAX)) p.repeat_last_n = *n;
  const auto seed = fields.integer("seed", std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
  p.seed = seed && *seed != -1 ? uint64_t(*seed) : service.options().seed.value_or(std::random_device{}());
  if (const json* samplers = fields.any("samplers")) {
    std::string text;
    if (samplers->is_string()) text = samplers->get<std::string>();
    bool names = samplers->is_string() || samplers->is_array();
    for (const json& s : samplers->is_array() ? *samplers : json::array()) {
      names &= s.is_string();
      if (s.is_string()) text += (text.empty() ? "" : ";") + s.get<std::string>();
    }
    if (!names) {
      fields.fail("samplers", "'samplers' must be names of samplers, as a list or divided by ';'");
    } else {
      const auto stages = parse_sampler_stages(text.substr(0, 1024));
      stages.ok() ? void(p.stages = *stages) : fields.fail("samplers", stages.status().message());
    }
  }
  read_bias(service, fields, p);
  out.ignore_eos = fields.boolean("ignore_eos").value_or(false);
  if (out.ignore_eos) {
    for (const int32_t id : service.eog_tokens()) {
      p.logit_bias.emplace_back(id, -std::numeric_limits<float>::infinity());
    }
  }
}

void read_stops(Fields& fields, GenerateRequest& out) {
  const json* stop = fields.any("stop");
  if (stop == nullptr) return;
  const json list = stop->is_array() ? *stop : json::array({*stop});
  for (const json& s : list) {
    if (!s.is_string() || utf8_characters(s.get_ref<const std::string&>()) > kMaxStopCharacters ||
        list.size() > kMaxStops) {
      fields.fail("stop",
                  fmt::format("'stop' must be a string or a list of at most {} strings of at most {} characters",
                              kMaxStops, kMaxStopCharacters));
      return;
    }
    if (!s.get_ref<const std::string&>().empty()) out.stops.push_back(s.get<std::string>());
  }
}

void read_format(Fields& fields, GenerateRequest& out) {
  const auto compile = [&](const json& schema, const char* name) {
    auto compiled = JsonSchema::compile(nlohmann::json(schema));
    if (compiled.ok()) {
      out.schema = std::move(compiled).value();
    } else if (compiled.status().code() == Code::kCorrupt) {
      fields.contradicts(name, compiled.status().message());
    } else {
      fields.fail(name, compiled.status().message());
    }
  };
  if (const json* format = fields.any("response_format")) {
    const std::string type = format->is_object()
                                 ? format->value("type", json()).is_string() ? (*format)["type"].get<std::string>() : ""
                                 : "";
    if (type == "json_object") {
      format->contains("schema") ? compile((*format)["schema"], "response_format")
                                 : void(out.schema = JsonSchema::any_object());
    } else if (type == "json_schema") {
      const json* inner = format->contains("json_schema") ? &(*format)["json_schema"] : nullptr;
      if (inner == nullptr || !inner->is_object() || !inner->contains("schema")) {
        fields.fail("response_format", "'response_format.json_schema.schema' is missing");
      } else {
        compile((*inner)["schema"], "response_format");
      }
    } else if (type != "text") {
      fields.fail("response_format", "'response_format.type' must be text, json_object or json_schema");
    }
  }
  if (const json* schema = fields.any("json_schema")) compile(*schema, "json_schema");
  if (const auto grammar = fields.text("grammar", kMaxText); grammar && !grammar->empty())
    fields.fail("grammar", "'grammar' is not supported; use response_format with json_object or json_schema");
}

// What longkv adds, and how rows may be shared.
void read_kv(const Service& service, Fields& fields, GenerateRequest& out) {
  if (const auto kv = fields.text("kv", 4096)) {
    const auto recipe = service.find_recipe(*kv);
    recipe.ok() ? void(out.recipe = *recipe) : fields.fail("kv", recipe.status().message());
  }
  if (!out.recipe) out.recipe = service.options().recipes.front().recipe;
  if (const auto n = fields.integer("kv_check", 0, 1 << 30)) out.check_every = int(*n);
  if (const auto salt = fields.text("cache_salt", 1024)) out.salt += *salt;
  if (const auto reuse = fields.boolean("cache_prompt"); reuse && !*reuse) out.reuse = Reuse::kNone;
  if (const auto reuse = fields.text("kv_reuse", 16)) {
    if (*reuse == "any") {
      out.reuse = Reuse::kAny;
    } else if (*reuse == "none") {
      out.reuse = Reuse::kNone;
    } else if (*reuse != "exact") {
      fields.fail("kv_reuse", "'kv_reuse' must be exact, any or none");
    }
  }
  if (const auto slot = fields.integer("id_slot", -1, service.options().scheduler.slots - 1)) out.slot = int(*slot);
  double seconds = service.options().request_seconds;
  if (const auto given = fields.number("timeout", 0.001, 1e6))
    seconds = seconds > 0 ? std::min(seconds, *given) : *given;
  if (seconds > 0) {
    out.deadline = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                          std::chrono::duration<double>(seconds));
  }
}

// A text, token ids, or for the native route a mix of both; a list of one of these that are lists or texts is that one.
void read_prompt(const Service& service, Fields& fields, ApiRequest& out) {
  const json* prompt = fields.any("prompt");
  if (prompt == nullptr) return fields.fail("prompt", "'prompt' is missing");
  const bool one_of_a_list = prompt->is_array() && prompt->size() == 1 && !prompt->front().is_number();
  if (one_of_a_list) prompt = &prompt->front();
  std::vector<int32_t>& ids = out.generate.ids;
  if (prompt->is_number()) return fields.fail("prompt", "'prompt' must be a string or a list");
  const json list = prompt->is_array() ? *prompt : json::array({*prompt});
  const auto ids_of_it = std::count_if(list.begin(), list.end(), [](const json& part) { return part.is_number(); });
  const bool ids_alone = list.size() > 1 || (one_of_a_list && prompt->is_array());
  if (out.route != Route::kNative && ids_alone && size_t(ids_of_it) < list.size()) {
    return fields.fail("prompt", ids_of_it == 0 ? "one prompt a request is supported; found a list of several"
                                                : "a prompt of texts and ids is supported by /completion only");
  }
  bool first = true;
  for (const json& part : list) {
    const int64_t id = whole_number(part).value_or(-1);
    if (part.is_string()) {
      auto encoded = service.tokenizer().encode(part.get_ref<const std::string&>(), /*add_special=*/first,
                                                /*parse_special=*/true);
      if (!encoded.ok()) return fields.fail("prompt", encoded.status().message());
      ids.insert(ids.end(), encoded->begin(), encoded->end());
    } else if (id >= 0 && id < service.model().config().vocab) {
      ids.push_back(int32_t(id));
    } else {
      return fields.fail("prompt", fmt::format("'prompt' must be a string or a list of token ids from 0 to {}",
                                               service.model().config().vocab - 1));
    }
    first = false;
  }
  if (out.echo) out.prompt = service.tokenizer().decode(ids);
}

void read_chat_prompt(const Service& service, Fields& fields, ApiRequest& out, const Conversation& conversation) {
  if (fields.failed()) return;
  auto ids = service.encode_chat(conversation.input);
  if (!ids.ok()) return fields.fail("messages", ids.status());
  out.generate.ids = std::move(ids).value();
  out.tools = tool_names(conversation.input.tools);
  // Models write the marks of calls as special tokens.
  if (!out.tools.empty()) out.generate.show_special = true;
}

void read_length(const Service& service, Fields& fields, ApiRequest& out) {
  const char* given = nullptr;
  for (const char* name : {"n_predict", "max_tokens", "max_completion_tokens"}) {
    const auto n = fields.integer(name, -1, int64_t(1) << 40);
    if (!n) continue;
    if (given != nullptr && *n != out.generate.max_tokens) {
      fields.contradicts(name, fmt::format("'{}' is {} and '{}' is {}: both mean the length of the answer; give one",
                                           given, out.generate.max_tokens, name, *n));
    }
    given = name;
    out.generate.max_tokens = *n;
  }
  // -1 is llama-server's "to the end". OpenAI's completions stop after 16 tokens unless told otherwise.
  int64_t& length = out.generate.max_tokens;
  if (given == nullptr && out.route == Route::kCompletions) length = 16;
  const int64_t most = service.options().max_tokens;
  if (most >= 0 && (length < 0 || length > most)) length = most;
}

void read_logprobs(Fields& fields, ApiRequest& out) {
  GenerateRequest& g = out.generate;
  if (out.route == Route::kChat) {
    const bool on = fields.boolean("logprobs").value_or(false);
    const auto top = fields.integer("top_logprobs", 0, 20);
    if (on) g.logprobs = int(top.value_or(0));
    if (top && !on) fields.fail("top_logprobs", "'top_logprobs' needs 'logprobs' to be true");
    return;
  }
  if (const auto n = fields.integer("logprobs", 0, 20)) g.logprobs = int(*n);
  if (const auto n = fields.integer("n_probs", 0, 20); n && *n > 0) g.logprobs = int(*n);
  g.prompt_logprobs = out.route == Route::kCompletions && out.echo && g.logprobs >= 0;
}

}  // namespace

std::optional<ApiError> check_length(const Service& service, int64_t tokens) {
  const int64_t context = service.context();
  if (tokens < context) return {};
  return ApiError{.type = "exceed_context_size_error",
                  .message = fmt::format("the prompt has {} tokens; a sequence of this server holds {} (prompt and "
                                         "answer); shorten it or start the server with a larger --ctx-size",
                                         tokens, context),
                  .extra = {{"n_prompt_tokens", tokens}, {"n_ctx", context}}};
}

std::variant<ApiError, ApiRequest> read_request(const Service& service, Route route, const std::string& body) {
  json parsed;
  if (auto error = parse_body(body, parsed)) return *error;
  Fields fields(parsed);
  ApiRequest out;
  out.route = route;
  GenerateRequest& g = out.generate;
  g.id = new_id(route == Route::kChat ? "chatcmpl" : "cmpl");
  g.sampling = service.options().sampling;
  (void)fields.text("model", kMaxText);
  fields.ignore({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                 "reasoning_effort", "verbosity", "stream_id", "n_keep", "n_discard", "t_max_prompt_ms",
                 "add_special"});
  out.stream = fields.boolean("stream").value_or(false);
  if (const json* options = fields.any("stream_options")) {
    if (!options->is_object()) {
      fields.fail("stream_options", "'stream_options' must be an object");
    } else {
      Fields inner(*options);
      out.include_usage = inner.boolean("include_usage").value_or(false);
      inner.ignore({"include_obfuscation"});
      if (inner.finish()) fields.fail("stream_options", inner.finish()->message);
    }
    if (!out.stream) fields.fail("stream_options", "'stream_options' needs 'stream' to be true");
  }
  fields.must_be("n", 1, "one answer a request is supported; send several requests");
  fields.must_be("best_of", 1, "one answer a request is supported");
  fields.must_be("suffix", "", "text after the answer is not supported");
  fields.must_be("modalities", json::array({"text"}), "only text is supported");
  fields.must_be("functions", json::array(), "write functions as 'tools'");
  fields.must_be("function_call", "none", "write functions as 'tools' and this as 'tool_choice'");
  if (route != Route::kChat) {
    fields.must_be("tools", json::array(), "a completion calls no tools; use /v1/chat/completions");
    fields.must_be("tool_choice", "none", "a completion calls no tools; use /v1/chat/completions");
    fields.ignore({"parallel_tool_calls"});  // says nothing without tools
  }
  const Conversation conversation = route == Route::kChat ? read_conversation(service, fields) : Conversation();
  out.return_progress = fields.boolean("return_progress").value_or(false);
  out.timings_per_token = fields.boolean("timings_per_token").value_or(false);
  out.return_tokens = fields.boolean("return_tokens").value_or(false);
  if (route != Route::kChat) out.echo = fields.boolean("echo").value_or(false);
  read_sampling(service, fields, g);
  read_length(service, fields, out);
  read_stops(fields, g);
  read_format(fields, g);
  if (conversation.call && g.schema)
    fields.contradicts("tool_choice", "'tool_choice' demands a call, and an answer's format is given too; give one");
  if (g.schema && !g.stops.empty()) {
    fields.contradicts("stop", "'stop' would cut the JSON that the answer's format asks for; leave one of the two out");
  } else if (conversation.call && !g.stops.empty()) {
    fields.contradicts("stop", "'stop' would cut the call that 'tool_choice' demands; leave one of the two out");
  }
  if (conversation.call) g.schema = conversation.call;
  read_logprobs(fields, out);
  read_kv(service, fields, g);
  g.show_special = fields.boolean("special").value_or(false);
  // Everything cheap was checked; only now is a long text worth its tokens.
  const bool chat = route == Route::kChat;
  if (fields.any(chat ? "prompt" : "messages"))
    fields.fail(chat ? "prompt" : "messages", chat ? "chat takes 'messages'" : "completions take 'prompt'");
  fields.ignore({chat ? "messages" : "prompt"});
  if (const auto& error = fields.finish()) return *error;
  chat ? read_chat_prompt(service, fields, out, conversation) : read_prompt(service, fields, out);
  if (const auto& error = fields.finish()) return *error;
  if (const Status s = validate(g.sampling); !s.ok()) return api_error(s);
  if (g.ids.empty()) return ApiError{.message = "the prompt has no tokens", .param = "prompt"};
  if (auto error = check_length(service, int64_t(g.ids.size()))) return *error;
  return out;
}

}  // namespace longkv::server
