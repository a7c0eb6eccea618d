// `longkv serve`: an HTTP server that OpenAI's clients can use, with a page.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "card.h"
#include "commands.h"
#include "common.h"
#include "engine/prefix_cache.h"
#include "help.h"
#include "interrupt.h"
#include "output.h"
#include "planning.h"
#include "sampling_options.h"
#include "server/http_server.h"
#include "server/service.h"

namespace longkv::cli {

namespace {

struct ServeOptions {
  GlobalOptions global;
  ModelOptions model;
  SamplingOptions sampling;
  server::HttpOptions http;
  std::string alias, key_file, max_body = "64M";
  std::string cache_ram, cache_folder, cache_disk = "16G";
  std::string chat_template, template_file, template_variables;
  std::vector<std::string> keys, allow_kv;
  int slots = 4;
  int queue = 64;
  int64_t predict = -1;
  double prompt_share = 0.5;
  double timeout = 3600;
  double ping = 30;
  bool no_slots = false, no_ui = false;
};

// Prompt tokens that pass a layer together: shorter than elsewhere, so that other answers wait less.
constexpr int64_t kChunk = 256;
// Rows that sliding windows hold on to, so that the answer and the end of a prompt can be cut off again.
constexpr int64_t kWindowSlack = 1024;

// Keys of --api-key, --api-key-file (one a line) and LONGKV_API_KEY.
Result<std::vector<std::string>> read_keys(const ServeOptions& o) {
  std::vector<std::string> keys = o.keys;
  if (const char* key = std::getenv("LONGKV_API_KEY"); key != nullptr && *key != '\0') keys.emplace_back(key);
  if (!o.key_file.empty()) {
    LONGKV_ASSIGN(const std::string text, read_file(o.key_file, 1 << 20));
    std::istringstream lines(text);
    const size_t before = keys.size();
    for (std::string line; std::getline(lines, line);) {
      while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back())) != 0) line.pop_back();
      if (!line.empty()) keys.push_back(line);
    }
    if (keys.size() == before) return fail(Code::kInvalidArgument, "--api-key-file '{}' holds no key", o.key_file);
  }
  if (std::ranges::any_of(keys, [](const std::string& k) { return k.empty(); }))
    return fail(Code::kInvalidArgument, "--api-key is empty");
  return keys;
}

// The format by name or as a template, from the command line or a file; all empty: the model file's own.
Result<ChatChoice> chat_choice(const ServeOptions& o) {
  ChatChoice choice;
  if (!o.chat_template.empty() && !o.template_file.empty())
    return fail(Code::kInvalidArgument, "--chat-template and --chat-template-file contradict each other");
  const bool is_template = o.chat_template.find('{') != std::string::npos;
  (is_template ? choice.template_text : choice.name) = o.chat_template;
  if (!o.template_file.empty()) {
    LONGKV_ASSIGN(choice.template_text, read_text_file(o.template_file));
  }
  if (!o.template_variables.empty()) {
    choice.variables = nlohmann::ordered_json::parse(o.template_variables, nullptr, /*allow_exceptions=*/false);
    if (!choice.variables.is_object())
      return fail(Code::kInvalidArgument, "--chat-template-kwargs must be a JSON object");
  }
  return choice;
}

// Part of the memory that stored beginnings may take where --cache-ram does not say.
constexpr int64_t kCacheShare = 8;

// Where beginnings of prompts are stored.
Result<PrefixCacheOptions> cache_options(const ServeOptions& o) {
  PrefixCacheOptions cache;
  int64_t ram = available_ram_bytes() / kCacheShare;
  if (!o.cache_ram.empty()) {
    LONGKV_ASSIGN(ram, parse_size(o.cache_ram, "--cache-ram"));
  }
  LONGKV_ASSIGN(const int64_t disk, parse_size(o.cache_disk, "--cache-disk"));
  cache.ram_bytes = uint64_t(ram);
  cache.folder = o.cache_folder;
  cache.disk_bytes = o.cache_folder.empty() ? 0 : uint64_t(disk);
  return cache;
}

// A slot's context: what was asked for, or what fits when all slots share the memory.
Result<int64_t> slot_context(const Opened& opened, int slots, int64_t cache_ram) {
  PlanLimits limits;
  LONGKV_ASSIGN(const KvPlan one, plan_for(*opened.model, opened.recipe, 1, opened.chunk, opened.pool->threads(), {}));
  const int64_t shared = one.peak_bytes, ram = one.machine.ram_bytes;
  limits.ram_bytes = std::max<int64_t>(1, shared + std::max<int64_t>(0, ram - shared - cache_ram) / slots);
  LONGKV_ASSIGN(const KvPlan plan, plan_for(*opened.model, opened.recipe, opened.asked_context, opened.chunk,
                                            opened.pool->threads(), limits));
  if (plan.fits()) return plan.context;
  return fail(Code::kOutOfMemory,
              "{} slots of {} tokens do not fit into memory; {} tokens a slot would: use -c {} or fewer slots (-np)",
              slots, plan.context, plan.largest_context, plan.largest_context);
}

Result<std::vector<server::NamedRecipe>> allowed_recipes(const std::vector<std::string>& texts) {
  std::vector<server::NamedRecipe> recipes;
  for (const std::string& text : texts) {
    auto recipe = load_recipe(text);
    if (!recipe.ok()) return recipe.status().with_context("--allow-kv " + text);
    recipes.push_back({text, std::make_shared<const Recipe>(std::move(recipe).value())});
  }
  return recipes;
}

Status serve(ServeOptions o) {
  LONGKV_TRY(apply_global_options(o.global));
  LONGKV_ASSIGN(o.http.api_keys, read_keys(o));
  LONGKV_ASSIGN(const int64_t body, parse_size(o.max_body, "--max-body"));
  if (body < 1024)
    return fail(Code::kInvalidArgument, "--max-body {} leaves no room for a request; at least 1K", o.max_body);
  // Ranges let NaN pass.
  for (const auto& [option, value] :
       {std::pair{"--prompt-share", o.prompt_share}, {"--timeout", o.timeout}, {"--sse-ping-interval", o.ping}}) {
    if (std::isnan(value)) return fail(Code::kInvalidArgument, "{} must be a number", option);
  }
  if (o.sampling.seed < -1) return fail(Code::kInvalidArgument, "--seed {} must be -1 or more", o.sampling.seed);
  for (const std::string& origin : o.http.origins) {
    if (origin != "*" && origin.find("://") == std::string::npos) {
      return fail(Code::kInvalidArgument, "--cors-origins '{}' is no origin; expected one as in http://localhost:3000",
                  origin);
    }
  }
  server::ServiceOptions s;
  LONGKV_ASSIGN(s.recipes, allowed_recipes(o.allow_kv));
  LONGKV_ASSIGN(s.chat, chat_choice(o));
  if (o.sampling.seed != -1) s.seed = uint64_t(o.sampling.seed);
  o.sampling.seed = std::max<int64_t>(o.sampling.seed, 0);
  LONGKV_ASSIGN(s.sampling, resolve_sampling(o.sampling));
  if (!o.http.slot_folder.empty() && !std::filesystem::is_directory(o.http.slot_folder))
    return fail(Code::kInvalidArgument, "--slot-save-path '{}' is not a folder", o.http.slot_folder);
  if (!o.model.chunk) o.model.chunk = kChunk;
  LONGKV_ASSIGN(Opened opened, open_model(o.model));
  LONGKV_TRY(check_biased_ids(s.sampling, opened.model->config().vocab));
  LONGKV_ASSIGN(const PrefixCacheOptions cache, cache_options(o));
  LONGKV_ASSIGN(opened.context, slot_context(opened, o.slots, int64_t(cache.ram_bytes)));
  s.model_path = o.model.model;
  s.alias = o.alias;
  s.request_seconds = o.timeout;
  s.max_tokens = o.predict;
  s.scheduler.slots = o.slots;
  s.scheduler.queue = size_t(o.queue);
  s.scheduler.prompt_share = o.prompt_share;
  s.scheduler.session.context = opened.context;
  s.scheduler.session.recipe = opened.recipe;
  s.scheduler.session.products = opened.products;
  s.scheduler.session.chunk = opened.chunk;
  s.scheduler.session.window_slack = kWindowSlack;
  if (cache.ram_bytes > 0 || !cache.folder.empty()) {
    LONGKV_ASSIGN(s.scheduler.prefixes, PrefixCache::create(cache));
  }
  LONGKV_ASSIGN(const auto service, server::Service::create(opened.model, s, *opened.pool));
  // A recipe that this model cannot have is told now, not to the first client that asks for it.
  for (const server::NamedRecipe& r : s.recipes) {
    SessionOptions session = s.scheduler.session;
    session.recipe = *r.recipe;
    if (auto tried = Session::create(opened.model, session, *opened.pool); !tried.ok())
      return tried.status().with_context("--allow-kv " + r.text);
  }

  o.http.slots = !o.no_slots;
  o.http.ui = !o.no_ui;
  o.http.limits.body_bytes = size_t(body);
  o.http.ping = std::chrono::milliseconds(int64_t(o.ping * 1000));
  server::HttpServer http(*service, o.http);
  LONGKV_TRY(http.bind());
  const std::atomic<bool>* stop = install_interrupt_flag();
  log_info("{}: {} slots of {} tokens each ({} in all), {} threads, {}", service->alias(), o.slots, opened.context,
           o.slots * opened.context, opened.pool->threads(), opened.recipe.canonical());
  if (s.scheduler.prefixes) {
    const PrefixCacheStats held = s.scheduler.prefixes->stats();
    log_info("prefix cache: {} bytes of memory, {} on disk; {} beginnings are stored already", cache.ram_bytes,
             cache.disk_bytes, held.entries_disk);
  }
  const std::string host = o.http.host.find(':') == std::string::npos ? o.http.host : "[" + o.http.host + "]";
  LONGKV_TRY(print(fmt::format("listening on http://{}:{}\n", host, http.port())));
  if (o.http.api_keys.empty() && o.http.host != "127.0.0.1" && o.http.host != "localhost" && o.http.host != "::1")
    LONGKV_TRY(notice("anyone who reaches " + o.http.host + " may use this server; set --api-key"));
  std::atomic<bool> ended{false};
  std::thread accepting([&] {
    http.serve();
    ended = true;
  });
  while (!stop->load() && !ended) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  http.stop();
  accepting.join();
  if (!stop->load()) return fail(Code::kIo, "the server stopped listening");
  if (s.scheduler.prefixes) LONGKV_TRY(s.scheduler.prefixes->flush());
  log_info("stopped");
  return {};
}

}  // namespace

void add_serve(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<ServeOptions>();
  CLI::App* command = app.add_subcommand("serve", "HTTP server with OpenAI's interface and a page");
  add_global_options(*command, o->global);
  add_model_options(*command, o->model, /*with_recipe=*/true);
  hide_card_options(*command);
  command->get_option("--ubatch-size")->default_str(std::to_string(kChunk));
  command->add_option("--host", o->http.host, "Address to listen on; default: this machine only")
      ->capture_default_str();
  command->add_option("--port", o->http.port, "Port; 0 = any free one")
      ->check(CLI::Range(0, 65535))
      ->capture_default_str();
  command->add_option("--parallel,--np", o->slots, "Slots: requests served at once; --ctx-size is for each of them")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  command->add_option("--queue", o->queue, "Requests that may wait for a slot; more are answered 503")
      ->check(CLI::Range(0, 100000))
      ->capture_default_str();
  command
      ->add_option("-n,--predict,--n-predict", o->predict,
                   "Tokens of an answer at most, whatever a request asks for; -1 = to the end")
      ->check(CLI::Range(int64_t(-1), int64_t(1) << 40))
      ->capture_default_str();
  command->add_option("--allow-kv", o->allow_kv, "KV recipe that requests may choose (field 'kv'); may be repeated")
      ->allow_extra_args(false);
  command->add_option("-a,--alias", o->alias, "Model name that clients see; default: the file's name");
  command->add_option("--chat-template", o->chat_template,
                      "Instead of the file's template: chatml, llama3, mistral, gemma, phi3, or a Jinja template");
  command->add_option("--chat-template-file", o->template_file, "A Jinja template from a file")->group(kMore);
  command->add_option("--chat-template-kwargs", o->template_variables, "JSON object: names that the template reads")
      ->group(kMore);
  command->add_option("--api-key", o->keys, "Key that clients must send; may be repeated; also LONGKV_API_KEY")
      ->allow_extra_args(false);
  command->add_option("--api-key-file", o->key_file, "File with one key a line");
  command
      ->add_option("--prompt-share", o->prompt_share,
                   "Prompt reading between two tokens of running answers, in decode steps")
      ->check(CLI::Range(0.1, 1000.0))
      ->capture_default_str()
      ->group(kMore);
  command->add_option("--timeout", o->timeout, "Seconds that a request may take; 0 = no limit")
      ->check(CLI::Range(0.0, 1e9))
      ->capture_default_str()
      ->group(kMore);
  command->add_option("--sse-ping-interval", o->ping, "Seconds of silence in a stream before a comment is sent")
      ->check(CLI::Range(0.1, 1e6))
      ->capture_default_str()
      ->group(kMore);
  command->add_option("--max-body", o->max_body, "Bytes of a request's body (K, M, G allowed)")
      ->capture_default_str()
      ->group(kMore);
  command->add_option("--threads-http", o->http.threads, "Connections served at once; 0 = slots + queue + 16")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str()
      ->group(kMore);
  command->add_option("--cors-origins", o->http.origins, "Origin of another page that may call; may be repeated")
      ->allow_extra_args(false)
      ->group(kMore);
  command->add_option(
      "--cache-ram", o->cache_ram,
      "Memory for stored beginnings of prompts (K, M, G); default: an eighth of what is free; 0 = none");
  command->add_option("--cache-folder", o->cache_folder, "Folder for them too, which outlives the server");
  command->add_option("--cache-disk", o->cache_disk, "Bytes that the folder may take (K, M, G)")->capture_default_str();
  command->add_option("--slot-save-path", o->http.slot_folder, "Folder for POST /slots/N?action=save and restore");
  command->add_flag("--metrics", o->http.metrics, "Serve /metrics for Prometheus");
  command->add_flag("--no-slots", o->no_slots, "Do not serve GET /slots")->group(kMore);
  command->add_flag("--no-ui", o->no_ui, "Do not serve the page")->group(kMore);
  o->http.metrics = false;
  add_sampling_options(*command, o->sampling);
  command->callback([o, &exit_code] { exit_code = report(serve(*o)); });
}

}  // namespace longkv::cli
