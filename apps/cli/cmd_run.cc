// `longkv run`: one answer over a document.
#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>

#include "answer.h"
#include "base/atomic_file.h"
#include "base/error.h"
#include "base/log.h"
#include "base/seconds.h"
#include "commands.h"
#include "common.h"
#include "help.h"
#include "interrupt.h"
#include "kv_state.h"
#include "output.h"
#include "planning.h"
#include "prompt.h"
#include "sampling_options.h"

namespace longkv::cli {

namespace {

using Clock = std::chrono::steady_clock;

struct RunOptions {
  GlobalOptions global;
  ModelOptions model;
  PromptOptions prompt;
  SamplingOptions sampling;
  int64_t predict = -1;
  bool explain = false;
  int check_every = 0;
  std::string stats_file;
  bool show_prompt = false;
  bool hide_question = false;
  KvStateOptions kv_state;
};

// Tokens kept free for the answer when its length is not given.
constexpr int64_t kAnswerRoom = 256;

// Tokens that the prompt may have. Errors: kInvalidArgument when the answer would take the whole context.
Result<int64_t> prompt_room(int64_t predict, int64_t context) {
  const int64_t reserve = predict >= 0 ? predict : std::min(kAnswerRoom, context / 4);
  if (reserve < context) return context - reserve;
  return fail(Code::kInvalidArgument, "-n {} leaves no room for a prompt in a context of {} tokens", predict, context);
}

Status run(const RunOptions& o) {
  const auto start = Clock::now();
  LONGKV_TRY(apply_global_options(o.global));
  if (o.predict < -1) return fail(Code::kInvalidArgument, "-n {} must be -1 or more", o.predict);
  LONGKV_ASSIGN(const SamplingParams params, resolve_sampling(o.sampling));
  if (o.explain && !o.stats_file.empty())
    return fail(Code::kInvalidArgument, "--kv-explain runs nothing, so there are no --stats to write");
  if (o.explain && !(o.kv_state.save.empty() && o.kv_state.restore.empty() && o.kv_state.cache.empty())) {
    return fail(Code::kInvalidArgument,
                "--kv-explain runs nothing; leave --kv-save, --kv-restore and --prompt-cache out");
  }
  LONGKV_TRY(check_outputs_differ(
      {{"--stats", o.stats_file}, {"--kv-save", o.kv_state.save}, {"--prompt-cache", o.kv_state.cache}}));
  std::optional<AtomicFile> stats;  // opened first: a long prompt is not read for a file that cannot be written
  if (!o.stats_file.empty()) {
    LONGKV_ASSIGN(stats, AtomicFile::create(o.stats_file));
  }
  LONGKV_TRY(check_kv_state(o.kv_state));
  ModelOptions model = o.model;
  // Checks compare with a cache in memory; files are written from one.
  const bool files = !o.kv_state.save.empty() || !o.kv_state.restore.empty() || !o.kv_state.cache.empty();
  model.can_use_card = o.check_every == 0 && !files;
  model.can_use_disk = true;
  LONGKV_ASSIGN(Opened opened, open_model(model, /*must_fit=*/!o.explain));
  if (o.explain) return explain_kv(opened, o.global.json);
  LONGKV_ASSIGN(const Tokenizer tokenizer, tokenizer_of(opened.model->file()));
  LONGKV_TRY(check_biased_ids(params, opened.model->config().vocab));
  LONGKV_ASSIGN(const auto chat, choose_chat(o.prompt, *opened.model, tokenizer));
  LONGKV_ASSIGN(const int64_t room, prompt_room(o.predict, opened.context));
  // A hidden question is decoded after the document was read, so that no method can look at it while it prepares.
  std::vector<int32_t> question;
  PromptOptions prompt = o.prompt;
  if (o.hide_question) {
    if (chat || prompt.file.empty() || prompt.text.empty()) {
      return fail(Code::kInvalidArgument, "--hide-question needs --raw, a document (-f) and a question (-p)");
    }
    const std::string text = prompt.no_escape ? prompt.text : unescape(prompt.text);
    LONGKV_ASSIGN(question, tokenizer.encode(text, /*add_special=*/false, /*parse_special=*/false));
    prompt.text.clear();
  }
  LONGKV_ASSIGN(const std::vector<int32_t> ids, build_prompt(prompt, chat, tokenizer, room - int64_t(question.size())));
  // Without -c a run reserves what it can use: that also lets longrope models keep their short factors.
  if (opened.asked_context == 0 && o.predict >= 0)
    opened.context = std::min(opened.context, int64_t(ids.size() + question.size()) + o.predict);
  const std::atomic<bool>* cancel = install_interrupt_flag();
  log_info("{}: {}; {} tokens of prompt, context {}, {} threads, {} products, {}", opened.model->config().name,
           chat ? "chat format: " + chat->description() : std::string("raw prompt"), ids.size(), opened.context,
           opened.pool->threads(), opened.card ? "f16" : product_name(opened.products), opened.recipe.canonical());
  if (o.show_prompt) log_line(LogLevel::kQuiet, tokenizer.decode(ids, /*show_special=*/true));

  LONGKV_ASSIGN(const auto session, make_session(opened));
  session->set_check_every(o.check_every);
  RunCost cost;
  const auto prompt_start = Clock::now();
  LONGKV_ASSIGN(cost.restored_tokens, restore_kv(o.kv_state, *session, ids));
  const auto unread = std::span(ids).subspan(size_t(cost.restored_tokens));
  if (!unread.empty()) LONGKV_TRY(session->prefill(unread, progress_line(), cancel));
  cost.prompt_tokens = int64_t(unread.size());
  cost.prompt_seconds = seconds_since(prompt_start);
  cost.first_token_seconds = seconds_since(start);
  cost.context = opened.context;
  // What was read is worth an answer, wherever it cannot be kept. A cache that gave all of a prompt has it already.
  const bool known = !o.kv_state.cache.empty() && unread.empty();
  const Status saved = known ? Status() : save_kv(o.kv_state, *session);

  Sampler sampler(params);
  for (int32_t id : ids) sampler.accept(id);
  for (int32_t id : question) {
    if (cancel->load()) return fail(Code::kCancelled, "interrupted while the question was read");
    LONGKV_TRY(session->decode(id));
    sampler.accept(id);
  }
  session->reset_kv_stats();
  const AnswerOptions answer_options{o.predict, o.sampling.ignore_eos};
  LONGKV_ASSIGN(const Answer answer,
                generate(*session, tokenizer, sampler, answer_options, cancel,
                         [&](std::string_view text) { return o.global.json ? Status() : print(text); }));
  if (!o.global.json) LONGKV_TRY(print("\n"));
  if (stats || o.global.json) cost.read_bandwidth = read_bandwidth(*opened.pool, cancel);
  const auto costs = cost_json(*session, answer, cost);
  LONGKV_TRY(print_cost(answer, costs, o.global.json));
  if (stats) {
    const std::string text = json_text(costs);
    LONGKV_TRY(stats->write({reinterpret_cast<const uint8_t*>(text.data()), text.size()}));
    LONGKV_TRY(stats->commit());
  }
  LONGKV_TRY(saved);
  if (answer.finish == "interrupted")
    return fail(Code::kCancelled, "interrupted after {} tokens of the answer", answer.ids.size());
  return {};
}

}  // namespace

void add_run(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<RunOptions>();
  CLI::App* command = app.add_subcommand("run", "Answer a question over a document");
  add_global_options(*command, o->global);
  add_model_options(*command, o->model, /*with_recipe=*/true);
  command->add_option("-f,--file", o->prompt.file, "Document ('-' = standard input)");
  command->add_option("-p,--prompt", o->prompt.text, "Question, or the whole prompt without -f");
  command->add_option("--system-prompt,--sys", o->prompt.system, "System message");
  add_template_options(*command, o->prompt);
  command->add_flag("--raw", o->prompt.raw, "No chat format: document and prompt as they are");
  command->add_flag("--no-escape", o->prompt.no_escape, "Keep \\n and the like in -p as typed")->group(kMore);
  command->add_flag("--keep-first", o->prompt.keep_first, "Cut a document that does not fit after its beginning");
  command->add_flag("--keep-last", o->prompt.keep_last, "Cut a document that does not fit before its end");
  command->add_option("-n,--predict,--n-predict", o->predict, "Tokens to generate; -1 = to the end")
      ->capture_default_str();
  command->add_flag("--kv-explain", o->explain, "Print recipe, plan and bytes per token, then exit");
  command
      ->add_option("--kv-check", o->check_every,
                   "Every N-th step also attends fully; prints captured mass, error and KL")
      ->check(CLI::Range(0, 1 << 30));
  command->add_option("--stats", o->stats_file,
                      "Write what the run cost to a JSON file, with the share of read bandwidth");
  command
      ->add_flag("--hide-question", o->hide_question,
                 "Decode -p after the document was read, so that no KV method sees it while it prepares")
      ->group(kMore);
  command->add_flag("--verbose-prompt", o->show_prompt, "Print the prompt as the model sees it to standard error")
      ->group(kMore);
  add_kv_state_options(*command, o->kv_state);
  add_sampling_options(*command, o->sampling);
  command->callback([o, &exit_code] { exit_code = report(run(*o)); });
}

}  // namespace longkv::cli
