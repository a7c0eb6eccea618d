// Jinja chat templates as model files carry them, run as Hugging Face Transformers runs them (apply_chat_template):
// Jinja2's immutable sandbox with trim_blocks and lstrip_blocks. docs/chat-templates.md says what is supported.
//
//   LONGKV_ASSIGN(const ChatTemplate chat_template, ChatTemplate::parse(text));      // once for a model
//   TemplateInput input;
//   input.messages = &messages;                      // [{"role": "user", "content": "..."}, ...]
//   input.add_generation_prompt = true;
//   LONGKV_ASSIGN(const auto pieces, chat_template.render(input));                   // for every request
//
// A rendering is a list of pieces, each either written by the template (literal) or taken from messages, tools or
// variables. Only literal pieces may be searched for special tokens: Tokenizer::encode_parts does that, and Chat
// (chat/chat.h) puts both together with one BOS.
#pragma once

#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chat/format.h"
#include "chat/jinja/interpreter.h"
#include "longkv/status.h"

namespace longkv {

struct TemplateInput {
  // Keys keep their order, which tojson shows: parse requests as ordered_json. All pointers may be null except
  // messages, an array of objects. As in Transformers, keys of messages with the value null count as absent, and text
  // under reasoning_content, thinking or reasoning is found under the first two names.
  const nlohmann::ordered_json* messages = nullptr;
  const nlohmann::ordered_json* tools = nullptr;      // array of objects {"type": "function", "function": {...}}
  const nlohmann::ordered_json* documents = nullptr;  // array of objects
  const nlohmann::ordered_json* variables = nullptr;  // object: more names for the template (enable_thinking ...)
  bool add_generation_prompt = false;
  // Texts of the vocabulary's tokens; a name that is absent here is undefined for the template.
  std::optional<std::string> bos_token, eos_token;
  std::time_t now = 0;  // for strftime_now; 0: the present
  jinja::Limits limits;
};

// What a template does with parts of a request, found by rendering small conversations. A caller that gets these in
// another form than the template reads should change the form first.
struct TemplateAbilities {
  bool tools = false;             // lists the tools of a request
  bool tool_calls = false;        // writes tool calls of earlier answers
  bool argument_objects = false;  // reads arguments of tool calls as objects; otherwise as text that holds JSON
  bool content_parts = false;     // reads content that is a list of {"type": "text", "text": ...}
  bool system_role = false;       // has a system message
};

// Immutable after parse(), cheap to copy, safe to use from several threads.
class ChatTemplate {
 public:
  // Errors: kInvalidArgument "chat template, line 3: reason".
  static Result<ChatTemplate> parse(std::string_view source);

  // Errors: kInvalidArgument: raise_exception and every other failure as "chat template, line 3: reason"; messages,
  // tools or variables of another shape than described above; text that is not UTF-8. Never another format instead.
  Result<std::vector<ChatPiece>> render(const TemplateInput& input) const;

  const TemplateAbilities& abilities() const { return abilities_; }
  const std::string& source() const { return source_; }
  // Whether a text that the template itself may write contains `text`.
  bool literal_contains(std::string_view text) const;

 private:
  ChatTemplate() = default;
  void probe();

  std::string source_;
  std::shared_ptr<const jinja::Program> program_;
  TemplateAbilities abilities_;
};

// Messages in the forms that `abilities` asks for: arguments of tool calls as objects or as text, lists of text parts
// joined to one text where lists are not read. Errors: kInvalidArgument for parts that are no text where the template
// cannot take them.
Result<nlohmann::ordered_json> adapt_messages(const nlohmann::ordered_json& messages,
                                              const TemplateAbilities& abilities);

}  // namespace longkv
