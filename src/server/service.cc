#include "server/service.h"

#include <filesystem>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace longkv::server {

Service::Service(std::shared_ptr<const LoadedModel> model, const ServiceOptions& options, Tokenizer tokenizer)
    : model_(std::move(model)), options_(options), tokenizer_(std::move(tokenizer)) {
  if (options_.alias.empty()) options_.alias = std::filesystem::path(options_.model_path).filename().string();
  options_.recipes.insert(
      options_.recipes.begin(),
      {options_.scheduler.session.recipe.name, std::make_shared<const Recipe>(options_.scheduler.session.recipe)});
  for (int32_t id = 0; id < tokenizer_.vocab_size(); ++id) {
    if (tokenizer_.is_eog(id)) eog_.push_back(id);
  }
}

Result<std::unique_ptr<Service>> Service::create(std::shared_ptr<const LoadedModel> model,
                                                 const ServiceOptions& options, ThreadPool& pool) {
  LONGKV_ASSIGN(Tokenizer tokenizer, Tokenizer::from_metadata(model->file().metadata()));
  std::unique_ptr<Service> service(new Service(model, options, std::move(tokenizer)));
  auto chat = Chat::create(model->file().metadata(), service->tokenizer_, options.chat);
  if (chat.ok()) {
    service->chat_.emplace(std::move(chat).value());
  } else {
    if (!options.chat.name.empty() || !options.chat.template_text.empty()) return chat.status();
    service->no_chat_ = chat.status();
    LONGKV_TRY(notice("chat requests will be refused: " + chat.status().message()));
  }
  LONGKV_ASSIGN(service->scheduler_, Scheduler::create(std::move(model), service->tokenizer_, options.scheduler, pool));
  return service;
}

Result<const Chat*> Service::chat() const {
  if (!chat_) return no_chat_;
  return &*chat_;
}

bool Service::takes_tools() const {
  const ChatTemplate* with_tools = chat_ ? chat_->chat_template(/*with_tools=*/true) : nullptr;
  return with_tools != nullptr && with_tools->abilities().tools;
}

Service::CallForm Service::call_form() const {
  const ChatTemplate* own = chat_ ? chat_->chat_template(/*with_tools=*/true) : nullptr;
  const auto writes = [&](std::string_view text) { return own != nullptr && own->literal_contains(text); };
  // Llama 3.
  if (writes("<|python_tag|>") && writes("\"parameters\": ")) return {"", "parameters"};
  // Qwen and Hermes, and Mistral before it took to naming the arguments with a token of their own. Templates that write
  // calls as XML, or as something else that is no JSON, get a plain object.
  if (writes("<tool_call>") && !writes("<function=") && !writes("<arg_key>")) return {"<tool_call>\n"};
  if (writes("[TOOL_CALLS]") && !writes("[ARGS]")) return {"[TOOL_CALLS] ["};
  return {};
}

Result<std::vector<ChatPiece>> Service::render_chat(const ChatInput& in) const {
  LONGKV_ASSIGN(const Chat* chat, this->chat());
  const bool tools = in.tools.is_array() && !in.tools.empty();
  nlohmann::ordered_json messages = in.messages;
  if (const ChatTemplate* own = chat->chat_template(tools)) {
    LONGKV_ASSIGN(messages, adapt_messages(in.messages, own->abilities()));
  }
  TemplateInput input;
  input.messages = &messages;
  if (tools) input.tools = &in.tools;
  if (in.variables.is_object()) input.variables = &in.variables;
  input.add_generation_prompt = in.generation_prompt;
  LONGKV_ASSIGN(std::vector<ChatPiece> pieces, chat->pieces(input));
  if (!in.answer_begins.empty()) pieces.push_back({in.answer_begins, /*literal=*/true});
  return pieces;
}

Result<std::vector<int32_t>> Service::encode_chat(const ChatInput& input) const {
  LONGKV_ASSIGN(const std::vector<ChatPiece> pieces, render_chat(input));
  return chat_->encode_pieces(pieces);
}

Result<std::string> Service::chat_text(const ChatInput& input) const {
  LONGKV_ASSIGN(const std::vector<ChatPiece> pieces, render_chat(input));
  return chat_->text_of(pieces);
}

Result<std::shared_ptr<const Recipe>> Service::find_recipe(const std::string& text) const {
  for (const NamedRecipe& r : options_.recipes) {
    if (r.text == text) return r.recipe;
  }
  const auto parsed = parse_recipe(text);
  for (const NamedRecipe& r : options_.recipes) {
    if (parsed.ok() && *parsed == *r.recipe) return r.recipe;
  }
  std::string known;
  for (const std::string& name : recipe_names()) known += (known.empty() ? "" : "; ") + name;
  return fail(Code::kInvalidArgument, "KV recipe '{}' is not among those that this server allows: {}",
              text.substr(0, 200), known);
}

std::vector<std::string> Service::recipe_names() const {
  std::vector<std::string> names;
  for (const NamedRecipe& r : options_.recipes) names.push_back(r.text);
  return names;
}

}  // namespace longkv::server
