// `longkv kv save | restore | info`: KV states that outlive a run.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <sstream>

#include "answer.h"
#include "base/cpu.h"
#include "base/error.h"
#include "base/log.h"
#include "base/seconds.h"
#include "card.h"
#include "commands.h"
#include "common.h"
#include "engine/kv_file.h"
#include "help.h"
#include "interrupt.h"
#include "kv_state.h"
#include "output.h"
#include "prompt.h"
#include "sampling_options.h"

namespace longkv::cli {

namespace {

using Clock = std::chrono::steady_clock;

struct KvOptions {
  GlobalOptions global;
  ModelOptions model;
  PromptOptions prompt;
  SamplingOptions sampling;
  KvStateOptions state;
  std::string file;
  int64_t predict = -1;
};

// What a chat format puts around a user's text.
struct Frame {
  std::vector<int32_t> before, after;
};

// Found by two texts that have nothing in common: what their conversations share at both ends is the format.
Result<Frame> user_frame(const Chat& chat, const std::string& system) {
  std::vector<ChatMessage> messages;
  if (!system.empty()) messages.push_back({"system", system});
  messages.push_back({"user", "a"});
  LONGKV_ASSIGN(const std::vector<int32_t> a, chat.encode(messages, /*generation_prompt=*/true));
  messages.back().content = "1";
  LONGKV_ASSIGN(const std::vector<int32_t> b, chat.encode(messages, /*generation_prompt=*/true));
  const auto first = std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first;
  const auto last = std::mismatch(a.rbegin(), a.rend() - (first - a.begin()), b.rbegin(), b.rend()).first.base();
  return Frame{{a.begin(), first}, {last, a.end()}};
}

// The recipe that a file was saved under.
std::string recipe_of(const KvFileInfo& info) {
  std::istringstream lines(info.fingerprint);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("kv: ")) return line.substr(4);
  }
  return "full";
}

Status save(const KvOptions& o) {
  LONGKV_TRY(apply_global_options(o.global));
  KvStateOptions state = o.state;
  state.save = o.file;
  LONGKV_TRY(check_kv_state(state));
  LONGKV_ASSIGN(Opened opened, open_model(o.model));
  LONGKV_ASSIGN(const Tokenizer tokenizer, tokenizer_of(opened.model->file()));
  LONGKV_ASSIGN(const auto chat, choose_chat(o.prompt, *opened.model, tokenizer));
  LONGKV_ASSIGN(const std::string document, read_text_file(o.prompt.file));
  std::vector<int32_t> ids;
  if (chat) {
    LONGKV_ASSIGN(const Frame frame, user_frame(*chat, o.prompt.system));
    LONGKV_ASSIGN(ids, tokenizer.encode(document, /*add_special=*/false, /*parse_special=*/false));
    ids.insert(ids.begin(), frame.before.begin(), frame.before.end());
  } else {
    LONGKV_ASSIGN(ids, tokenizer.encode(document, /*add_special=*/true, /*parse_special=*/false));
  }
  if (opened.asked_context == 0) opened.context = std::min(opened.context, std::max<int64_t>(1, int64_t(ids.size())));
  if (int64_t(ids.size()) > opened.context) {
    return fail(Code::kInvalidArgument, "the document has {} tokens and the context is {}; use a larger -c", ids.size(),
                opened.context);
  }
  const std::atomic<bool>* cancel = install_interrupt_flag();
  log_info("{}: {} tokens, {}", opened.model->config().name, ids.size(), opened.recipe.canonical());
  LONGKV_ASSIGN(const auto session, make_session(opened));
  LONGKV_TRY(session->prefill(ids, progress_line(), cancel));
  LONGKV_TRY(save_kv(state, *session));
  if (!o.global.json) return {};
  std::error_code error;
  const auto bytes = std::filesystem::file_size(o.file, error);
  nlohmann::ordered_json j;
  j["file"] = o.file;
  j["kv"] = opened.recipe.canonical();
  j["tokens"] = session->tokens();
  j["bytes"] = error ? 0 : int64_t(bytes);
  return print(json_text(j));
}

Status restore(const KvOptions& o) {
  const auto start = Clock::now();
  LONGKV_TRY(apply_global_options(o.global));
  if (o.predict < -1) return fail(Code::kInvalidArgument, "-n {} must be -1 or more", o.predict);
  LONGKV_ASSIGN(const SamplingParams params, resolve_sampling(o.sampling));
  LONGKV_ASSIGN(const std::shared_ptr<KvFile> file, KvFile::open(o.file));
  LONGKV_ASSIGN(const KvFileInfo info, read_kv_info(*file));
  ModelOptions model = o.model;
  if (!model.kv && model.kv_config.empty()) model.kv = recipe_of(info);
  LONGKV_ASSIGN(Opened opened, open_model(model, /*must_fit=*/false));
  LONGKV_ASSIGN(const Tokenizer tokenizer, tokenizer_of(opened.model->file()));
  LONGKV_TRY(check_biased_ids(params, opened.model->config().vocab));
  LONGKV_ASSIGN(const auto chat, choose_chat(o.prompt, *opened.model, tokenizer));
  const std::string text = o.prompt.no_escape ? o.prompt.text : unescape(o.prompt.text);
  LONGKV_TRY(check_utf8(text, "-p"));
  LONGKV_ASSIGN(std::vector<int32_t> ids, tokenizer.encode((chat ? "\n\n" : "") + text, /*add_special=*/false,
                                                           /*parse_special=*/false));
  if (chat) {
    LONGKV_ASSIGN(const Frame frame, user_frame(*chat, o.prompt.system));
    ids.insert(ids.end(), frame.after.begin(), frame.after.end());
  }
  // Without -c a context for what is held, the question and the answer, and not below that of the saved session: models
  // whose RoPE depends on the context then turn alike.
  const auto needed = int64_t(info.ids.size() + ids.size());
  if (opened.asked_context == 0) {
    const int64_t answer = o.predict >= 0 ? o.predict : 256;
    opened.context = std::clamp<int64_t>(needed + answer, 1, std::max(opened.model->config().context, needed + 1));
    opened.context = std::max(opened.context, std::clamp<int64_t>(info.context, 1, int64_t(1) << 31));
  }
  const std::atomic<bool>* cancel = install_interrupt_flag();
  LONGKV_ASSIGN(const auto session, make_session(opened));
  const auto restore_start = Clock::now();
  LONGKV_ASSIGN(const KvRestored restored, restore_session(*session, file, {.verify = !o.state.no_verify}));
  log_info("restored {} tokens in {:.3f} s: {:.1f} MB mapped, {:.1f} MB copied", restored.tokens,
           seconds_since(restore_start), double(restored.bytes_mapped) / 1e6, double(restored.bytes_copied) / 1e6);
  RunCost cost;
  cost.restored_tokens = restored.tokens;
  const auto prompt_start = Clock::now();
  LONGKV_TRY(session->prefill(ids, progress_line(), cancel));
  cost.prompt_tokens = int64_t(ids.size());
  cost.prompt_seconds = seconds_since(prompt_start);
  cost.first_token_seconds = seconds_since(start);
  cost.context = opened.context;
  Sampler sampler(params);
  for (const int32_t id : session->ids()) sampler.accept(id);
  session->kv().reset_stats();
  LONGKV_ASSIGN(const Answer answer,
                generate(*session, tokenizer, sampler, AnswerOptions{o.predict, o.sampling.ignore_eos}, cancel,
                         [&](std::string_view part) { return o.global.json ? Status() : print(part); }));
  if (!o.global.json) LONGKV_TRY(print("\n"));
  const auto costs = cost_json(*session, answer, cost);
  LONGKV_TRY(print_cost(answer, costs, o.global.json));
  if (answer.finish == "interrupted") {
    return fail(Code::kCancelled, "interrupted after {} tokens of the answer", answer.ids.size());
  }
  return {};
}

Status info(const KvOptions& o) {
  LONGKV_TRY(apply_global_options(o.global));
  LONGKV_ASSIGN(const std::shared_ptr<KvFile> file, KvFile::open(o.file));
  LONGKV_ASSIGN(const KvFileInfo info, read_kv_info(*file));
  uint64_t pages = 0, values = 0, stored = 0;
  for (const KvFile::Segment& segment : file->segments()) {
    (segment.entry.kind == uint16_t(KvSegmentKind::kPages) ? pages : values) += segment.entry.size;
    stored += segment.entry.stored;
  }
  if (!o.state.no_verify) {
    ThreadPool pool(o.model.threads > 0 ? o.model.threads : default_threads());
    LONGKV_TRY(file->verify(pool));
  }
  if (o.global.json) {
    nlohmann::ordered_json j;
    j["file"] = o.file;
    j["format"] = kKvFileVersion;
    j["bytes"] = file->bytes();
    j["tokens"] = info.ids.size();
    j["context"] = info.context;
    j["segments"] = file->segments().size();
    j["row_bytes"] = pages;
    j["other_bytes"] = values;
    j["stored_bytes"] = stored;
    j["verified"] = !o.state.no_verify;
    j["settings"] = info.fingerprint;
    return print(json_text(j));
  }
  std::string settings;
  for (const char c : info.fingerprint) settings += c == '\n' || (c >= ' ' && c <= '~') ? c : '?';
  return print(
      fmt::format("{}: KV file, format {}, {} bytes\n{} tokens, saved with a context of {}\n{} segments: {} bytes "
                  "of rows and summaries, {} of other state, {} stored\n{}\n{}",
                  o.file, kKvFileVersion, file->bytes(), info.ids.size(), info.context, file->segments().size(), pages,
                  values, stored, o.state.no_verify ? "sums not checked" : "all sums match", settings));
}

void add_flags(CLI::App& command, KvOptions& o, bool saving) {
  if (saving) {
    command.add_flag("--compress", o.state.compress, "zstd: smaller, but restored by decoding instead of mapping");
  } else {
    command.add_flag("--no-verify", o.state.no_verify,
                     "Do not check the sums of rows: starts without reading them all");
  }
}

}  // namespace

void add_kv(CLI::App& app, int& exit_code) {
  CLI::App* kv = app.add_subcommand("kv", "Save what was read to a file, and go on from it later");
  kv->require_subcommand(1);
  auto o = std::make_shared<KvOptions>();

  CLI::App* command = kv->add_subcommand("save", "Read a document and save its KV state");
  add_global_options(*command, o->global);
  add_model_options(*command, o->model, /*with_recipe=*/true);
  hide_card_options(*command);
  command->add_option("-f,--file", o->prompt.file, "Document ('-' = standard input)")->required();
  command->add_option("-o,--output", o->file, "KV file to write")->required();
  command->add_option("--system-prompt,--sys", o->prompt.system, "System message");
  command->add_option("--chat-template", o->prompt.chat_template, "Chat format by name");
  command->add_flag("--raw", o->prompt.raw, "No chat format");
  add_flags(*command, *o, /*saving=*/true);
  command->callback([o, &exit_code] { exit_code = report(save(*o)); });

  command = kv->add_subcommand("restore", "Answer a question over a saved state");
  add_global_options(*command, o->global);
  add_model_options(*command, o->model, /*with_recipe=*/true);
  hide_card_options(*command);
  command->add_option("-i,--input", o->file, "KV file")->required();
  command->add_option("-p,--prompt", o->prompt.text, "Question")->required();
  command->add_option("-n,--predict,--n-predict", o->predict, "Tokens to generate; -1 = to the end")
      ->capture_default_str();
  command->add_option("--chat-template", o->prompt.chat_template, "Chat format by name");
  command->add_flag("--raw", o->prompt.raw, "No chat format: the question follows the document as it is");
  command->add_flag("--no-escape", o->prompt.no_escape, "Keep \\n and the like in -p as typed")->group(kMore);
  add_flags(*command, *o, /*saving=*/false);
  add_sampling_options(*command, o->sampling);
  command->callback([o, &exit_code] { exit_code = report(restore(*o)); });

  command = kv->add_subcommand("info", "Show and check what a KV file holds");
  add_global_options(*command, o->global);
  command->add_option("FILE", o->file, "KV file")->required();
  command->add_option("-t,--threads", o->model.threads, "Threads that check the sums");
  add_flags(*command, *o, /*saving=*/false);
  command->callback([o, &exit_code] { exit_code = report(info(*o)); });
}

}  // namespace longkv::cli
