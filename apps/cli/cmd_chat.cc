// `longkv chat`: a conversation at the terminal. The cache is kept across turns: only new text is read.
#include <unistd.h>

#include <cstdio>
#include <memory>

#include "answer.h"
#include "base/error.h"
#include "base/log.h"
#include "commands.h"
#include "common.h"
#include "interrupt.h"
#include "line_reader.h"
#include "output.h"
#include "prompt.h"
#include "sampling_options.h"

namespace longkv::cli {

namespace {

struct ChatOptions {
  GlobalOptions global;
  ModelOptions model;
  PromptOptions prompt;
  SamplingOptions sampling;
  int64_t predict = -1;
};

class Conversation {
 public:
  Conversation(const ChatOptions& options, const Chat& chat, const Tokenizer& tokenizer, Session& session,
               const SamplingParams& sampling, std::atomic<bool>* cancel)
      : options_(options),
        chat_(chat),
        tokenizer_(tokenizer),
        session_(session),
        fresh_(sampling),
        sampler_(sampling),
        cancel_(cancel) {}

  // Reads the user's turn and answers it. A turn that fails leaves the conversation as it was before.
  Status turn(const std::string& text) {
    const int64_t before = session_.tokens();
    const int32_t last_before = last_;
    const Sampler sampler_before = sampler_;
    std::vector<int32_t> ids;
    if (before == 0) {
      std::vector<ChatMessage> messages;
      if (!options_.prompt.system.empty()) messages.push_back({"system", options_.prompt.system});
      messages.push_back({"user", text});
      LONGKV_ASSIGN(ids, chat_.encode(messages, /*generation_prompt=*/true));
    } else {
      const ChatMessage message{"user", text};
      LONGKV_ASSIGN(ids, chat_.encode_next(last_, std::span(&message, 1)));
    }
    if (before + int64_t(ids.size()) >= session_.context()) {
      return fail(
          Code::kInvalidArgument,
          "{} tokens are held, the turn has {} more, and the context is {}; /clear forgets the conversation, -c sets a "
          "larger context",
          before, ids.size(), session_.context());
    }
    LONGKV_TRY(session_.prefill(ids, ids.size() > 2048 ? progress_line() : PrefillProgress(), cancel_));
    for (int32_t id : ids) sampler_.accept(id);
    const auto answer =
        generate(session_, tokenizer_, sampler_, {options_.predict, options_.sampling.ignore_eos}, cancel_,
                 [&](std::string_view piece) { return options_.global.json ? Status() : print(piece); });
    if (!answer.ok()) {
      if (!session_.truncate(before).ok()) LONGKV_TRY(session_.truncate(0));
      last_ = last_before;
      sampler_ = sampler_before;
      return answer.status();
    }
    last_ = answer->ids.empty() ? ids.back() : answer->ids.back();
    if (options_.global.json) {
      nlohmann::ordered_json j{{"text", answer->text},
                               {"finish", answer->finish},
                               {"tokens_read", ids.size()},
                               {"tokens_held", session_.tokens()}};
      LONGKV_TRY(print(json_text(j, -1)));
    } else {
      LONGKV_TRY(print("\n"));
      if (answer->finish == "length") log_info("(length)");
    }
    log_verbose("read {} tokens, answered {}; {} of {} held", ids.size(), answer->ids.size(), session_.tokens(),
                session_.context());
    if (answer->finish == "interrupted") return fail(Code::kCancelled, "the answer was interrupted and is kept so far");
    return {};
  }

  // Afterwards nothing depends on what was said before.
  Status clear() {
    last_ = -1;
    sampler_ = fresh_;
    return session_.truncate(0);
  }

 private:
  const ChatOptions& options_;
  const Chat& chat_;
  const Tokenizer& tokenizer_;
  Session& session_;
  const Sampler fresh_;
  Sampler sampler_;
  std::atomic<bool>* cancel_;
  int32_t last_ = -1;  // last token in the cache
};

Status run_chat(const ChatOptions& o) {
  LONGKV_TRY(apply_global_options(o.global));
  LONGKV_ASSIGN(const SamplingParams params, resolve_sampling(o.sampling));
  LONGKV_ASSIGN(Opened opened, open_model(o.model));
  LONGKV_ASSIGN(const Tokenizer tokenizer, Tokenizer::from_metadata(opened.model->file().metadata()));
  if (o.prompt.chat_template.empty() && !opened.model->file().metadata().has("tokenizer.chat_template")) {
    return fail(Code::kInvalidArgument,
                "'{}' has no chat template; name one with --chat-template (chatml, llama3, mistral, gemma, phi3)",
                o.model.model);
  }
  LONGKV_TRY(check_biased_ids(params, opened.model->config().vocab));
  LONGKV_ASSIGN(const auto chat, choose_chat(o.prompt, *opened.model, tokenizer));
  LONGKV_ASSIGN(const auto session, make_session(opened));
  std::atomic<bool>* cancel = install_interrupt_flag();
  Conversation conversation(o, *chat, tokenizer, *session, params, cancel);
  log_info(
      "{}: chat format {}, context {} tokens, {}. /clear forgets, /quit or end of input leaves, Ctrl-C stops an "
      "answer and leaves at the prompt.",
      opened.model->config().name, chat->format().name(), opened.context, opened.recipe.canonical());
  const bool terminal = ::isatty(STDIN_FILENO) != 0;
  LineReader input(STDIN_FILENO);
  for (std::string line;;) {
    if (terminal) std::fprintf(stderr, "> ");
    cancel->store(false);
    LONGKV_ASSIGN(const bool more, input.next(line, cancel));
    if (!more || line == "/quit") return {};
    if (line.empty()) continue;
    if (line == "/clear") {
      LONGKV_TRY(conversation.clear());
      continue;
    }
    Status s = check_utf8(line, "the message");
    if (s.ok()) s = conversation.turn(line);
    if (s.ok()) continue;
    if (s.code() != Code::kInvalidArgument && s.code() != Code::kCancelled) return s;
    if (!terminal) return s;
    report(s);  // a person goes on
  }
}

}  // namespace

void add_chat(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<ChatOptions>();
  CLI::App* command = app.add_subcommand("chat", "Talk with a model; the cache is kept across turns");
  add_global_options(*command, o->global);
  add_model_options(*command, o->model, /*with_recipe=*/true);
  command->add_option("--system-prompt,--sys", o->prompt.system, "System message");
  command->add_option("--chat-template", o->prompt.chat_template, "chatml, llama3, mistral, gemma or phi3");
  command->add_option("-n,--predict,--n-predict", o->predict, "Tokens of an answer at most; -1 = to the end")
      ->capture_default_str();
  add_sampling_options(*command, o->sampling);
  command->callback([o, &exit_code] { exit_code = report(run_chat(*o)); });
}

}  // namespace longkv::cli
