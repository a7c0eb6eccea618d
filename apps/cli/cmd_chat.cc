// `longkv chat`: a conversation at the terminal. The cache is kept across turns: only new text is read.
#include <unistd.h>

#include <algorithm>
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
        cancel_(cancel) {
    if (!options_.prompt.system.empty()) messages_.push_back({"system", options_.prompt.system});
  }

  // Reads the user's turn and answers it. A turn that fails leaves the conversation as it was before.
  Status turn(const std::string& text) {
    const Sampler sampler_before = sampler_;
    const int64_t sampled_before = sampled_;
    messages_.push_back({"user", text});
    Answer answer;
    Status status = read_and_answer(answer);
    if (!status.ok()) {
      messages_.pop_back();
      sampler_ = sampler_before;
      sampled_ = sampled_before;
      return status;
    }
    messages_.push_back({"assistant", answer.text});
    if (answer.finish == "interrupted") return fail(Code::kCancelled, "the answer was interrupted and is kept so far");
    return {};
  }

  // Afterwards nothing depends on what was said before.
  Status clear() {
    messages_.clear();
    if (!options_.prompt.system.empty()) messages_.push_back({"system", options_.prompt.system});
    sampler_ = fresh_;
    sampled_ = 0;
    return forget(0);
  }

 private:
  // Cuts the cache to n tokens; where a recipe cannot, to none.
  Status forget(int64_t n) {
    held_text_.clear();
    if (n > 0 && session_.truncate(n).ok()) {
      held_.resize(size_t(n));
      return {};
    }
    held_.clear();
    return session_.truncate(0);
  }

  // After a turn that failed: what was held before it, or nothing where the cache could not go back, as with sliding
  // windows or eviction; the next turn then reads the whole conversation.
  Status take_back(const Status& failed) {
    const auto before = int64_t(held_.size());
    const std::string text = held_text_;
    LONGKV_TRY(forget(std::min(before, session_.tokens())));
    if (before == int64_t(held_.size())) held_text_ = text;
    return failed;
  }

  // Cuts the cache to what the next prompt shares with it.
  Status rewind(const std::vector<ChatPiece>& pieces, ChatContinuation& next) {
    const int64_t before = int64_t(held_.size());
    LONGKV_TRY(forget(next.keep));
    if (int64_t(held_.size()) != next.keep) {
      LONGKV_ASSIGN(next, chat_.follow({}, {}, pieces));
    }
    log_info(
        "the chat template writes earlier turns differently now that they are past: {} of {} tokens are read again",
        before - next.keep, before);
    return {};
  }

  Status read_and_answer(Answer& answer) {
    LONGKV_ASSIGN(const std::vector<ChatPiece> pieces, chat_.pieces(messages_, /*generation_prompt=*/true));
    LONGKV_ASSIGN(ChatContinuation next, chat_.follow(held_, held_text_, pieces));
    const int64_t before = int64_t(held_.size());
    if (next.keep + int64_t(next.ids.size()) >= session_.context()) {
      return fail(
          Code::kInvalidArgument,
          "{} tokens are held, the turn has {} more, and the context is {}; /clear forgets the conversation, -c sets a "
          "larger context",
          next.keep, next.ids.size(), session_.context());
    }
    if (next.keep < before) LONGKV_TRY(rewind(pieces, next));
    const Status read =
        session_.prefill(next.ids, next.ids.size() > 2048 ? progress_line() : PrefillProgress(), cancel_);
    if (!read.ok()) return take_back(read);
    // The sampler has seen what is read again.
    for (size_t i = size_t(std::max<int64_t>(0, sampled_ - next.keep)); i < next.ids.size(); ++i)
      sampler_.accept(next.ids[i]);
    auto generated = generate(session_, tokenizer_, sampler_, {options_.predict, options_.sampling.ignore_eos}, cancel_,
                              [&](std::string_view piece) { return options_.global.json ? Status() : print(piece); });
    if (!generated.ok()) return take_back(generated.status());
    answer = std::move(*generated);
    held_.insert(held_.end(), next.ids.begin(), next.ids.end());
    held_.insert(held_.end(), answer.ids.begin(), answer.ids.end());
    held_.resize(size_t(session_.tokens()));  // the last token of an answer that fills the context is not read
    held_text_ = joined_text(pieces) + answer.text;
    sampled_ = int64_t(held_.size());
    return show(answer, next.ids.size());
  }

  Status show(const Answer& answer, size_t tokens_read) {
    if (options_.global.json) {
      nlohmann::ordered_json j{{"text", answer.text},
                               {"finish", answer.finish},
                               {"tokens_read", tokens_read},
                               {"tokens_held", session_.tokens()}};
      LONGKV_TRY(print(json_text(j, -1)));
    } else {
      LONGKV_TRY(print("\n"));
      if (answer.finish == "length") log_info("(length)");
    }
    log_verbose("read {} tokens, answered {}; {} of {} held", tokens_read, answer.ids.size(), session_.tokens(),
                session_.context());
    return {};
  }

  const ChatOptions& options_;
  const Chat& chat_;
  const Tokenizer& tokenizer_;
  Session& session_;
  const Sampler fresh_;
  Sampler sampler_;
  std::atomic<bool>* cancel_;
  std::vector<ChatMessage> messages_;
  int64_t sampled_ = 0;        // of the conversation's first tokens, those that the sampler has seen
  std::vector<int32_t> held_;  // tokens in the cache
  std::string held_text_;      // and what they were rendered from; empty when unknown
};

Status run_chat(const ChatOptions& o) {
  LONGKV_TRY(apply_global_options(o.global));
  LONGKV_ASSIGN(const SamplingParams params, resolve_sampling(o.sampling));
  ModelOptions model = o.model;
  model.can_use_card = model.can_use_disk = true;
  LONGKV_ASSIGN(Opened opened, open_model(model));
  LONGKV_ASSIGN(const Tokenizer tokenizer, tokenizer_of(opened.model->file()));
  if (!template_chosen(o.prompt) && !opened.model->file().metadata().has("tokenizer.chat_template")) {
    return fail(
        Code::kInvalidArgument,
        "'{}' has no chat template; name a format with --chat-template (chatml, llama3, mistral, gemma, phi3) or "
        "give a Jinja template with --chat-template-file",
        o.model.model);
  }
  LONGKV_TRY(check_biased_ids(params, opened.model->config().vocab));
  LONGKV_ASSIGN(const auto chat, choose_chat(o.prompt, *opened.model, tokenizer));
  LONGKV_ASSIGN(const auto session, make_session(opened));
  std::atomic<bool>* cancel = install_interrupt_flag();
  Conversation conversation(o, *chat, tokenizer, *session, params, cancel);
  log_info(
      "{}: chat format: {}, context {} tokens, {}. /clear forgets, /quit or end of input leaves, Ctrl-C stops an "
      "answer and leaves at the prompt.",
      opened.model->config().name, chat->description(), opened.context, opened.recipe.canonical());
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
  add_template_options(*command, o->prompt);
  command->add_option("-n,--predict,--n-predict", o->predict, "Tokens of an answer at most; -1 = to the end")
      ->capture_default_str();
  add_sampling_options(*command, o->sampling);
  command->callback([o, &exit_code] { exit_code = report(run_chat(*o)); });
}

}  // namespace longkv::cli
