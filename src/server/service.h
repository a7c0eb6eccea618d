// Everything that answers requests, without sockets: model, tokenizer, chat format, recipes that clients may choose,
// and the scheduler.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "chat/chat.h"
#include "server/scheduler.h"
#include "tokenizer/tokenizer.h"

namespace longkv::server {

struct NamedRecipe {
  std::string text;  // as the operator wrote it
  std::shared_ptr<const Recipe> recipe;
};

struct ServiceOptions {
  std::string model_path;
  std::string alias;  // of the model; empty: the file's name
  ChatChoice chat;
  SchedulerOptions scheduler;
  std::vector<NamedRecipe> recipes;  // beside the default one, scheduler.session.recipe
  SamplingParams sampling;           // what requests do not set
  int64_t max_tokens = -1;           // of an answer, whatever a request asks for; -1: to the context's end
  std::optional<uint64_t> seed;      // of requests that set none; absent: a random one for each
  double request_seconds = 0;        // limit of a request from its arrival; 0: none
};

class Service {
 public:
  // Errors: the model's, those of Scheduler::create and Chat::create for a chosen template.
  static Result<std::unique_ptr<Service>> create(std::shared_ptr<const LoadedModel> model,
                                                 const ServiceOptions& options, ThreadPool& pool);

  const LoadedModel& model() const { return *model_; }
  const Tokenizer& tokenizer() const { return tokenizer_; }
  const ServiceOptions& options() const { return options_; }
  const std::string& alias() const { return options_.alias; }
  Scheduler& scheduler() { return *scheduler_; }
  const Scheduler& scheduler() const { return *scheduler_; }
  int64_t context() const { return options_.scheduler.session.context; }

  // A conversation in the model's format. Messages and tools are adapted to what its template reads.
  struct ChatInput {
    nlohmann::ordered_json messages, tools, variables;  // tools and variables may be null
    bool generation_prompt = true;                      // opens the next answer
    std::string answer_begins;                          // written by nobody but the format, after what opens it
  };
  // Errors: kUnsupported where the model has no usable template, those of the template.
  Result<std::vector<ChatPiece>> render_chat(const ChatInput& input) const;
  Result<std::vector<int32_t>> encode_chat(const ChatInput& input) const;
  Result<std::string> chat_text(const ChatInput& input) const;
  // Whether the model's template lists tools.
  bool takes_tools() const;
  // How an answer that must be a call is written, as far as the template tells: what comes before the call's object,
  // and the name of its arguments.
  struct CallForm {
    std::string opening;
    const char* arguments = "arguments";
  };
  CallForm call_form() const;

  // A recipe that clients may choose, by its text or its canonical form. Errors: kInvalidArgument with the list.
  Result<std::shared_ptr<const Recipe>> find_recipe(const std::string& text) const;
  // Texts of all of them, the default one first.
  std::vector<std::string> recipe_names() const;
  // Tokens that end an answer.
  const std::vector<int32_t>& eog_tokens() const { return eog_; }

 private:
  Service(std::shared_ptr<const LoadedModel> model, const ServiceOptions& options, Tokenizer tokenizer);
  Result<const Chat*> chat() const;

  std::shared_ptr<const LoadedModel> model_;
  ServiceOptions options_;
  Tokenizer tokenizer_;
  std::optional<Chat> chat_;
  Status no_chat_;  // why there is none
  std::vector<int32_t> eog_;
  std::unique_ptr<Scheduler> scheduler_;
};

}  // namespace longkv::server
