#include "chat/template.h"

#include "base/error.h"
#include "chat/jinja/convert.h"
#include "chat/jinja/parser.h"

namespace longkv {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kContext = "chat template";

std::vector<ChatPiece> pieces_of(const std::string& text, const std::vector<jinja::UserSpan>& spans) {
  std::vector<ChatPiece> pieces;
  size_t at = 0;
  for (const jinja::UserSpan& span : spans) {
    if (span.begin > at) pieces.push_back({text.substr(at, span.begin - at), true});
    pieces.push_back({text.substr(span.begin, span.end - span.begin), false});
    at = span.end;
  }
  if (at < text.size()) pieces.push_back({text.substr(at), true});
  return pieces;
}

std::string joined(const std::vector<ChatPiece>& pieces) {
  std::string text;
  for (const ChatPiece& piece : pieces) text += piece.text;
  return text;
}

// Text of a list of parts, or the reason why it has none.
Result<std::string> text_of_parts(const Json& parts) {
  std::string text;
  for (const Json& part : parts) {
    if (!part.is_object() || !part.contains("text") || !part["text"].is_string()) {
      return fail(Code::kInvalidArgument,
                  "this model's chat template takes text only, and a message has content of another kind");
    }
    text += part["text"].get_ref<const std::string&>();
  }
  return text;
}

Status adapt_arguments(Json& call, bool as_objects) {
  if (!call.is_object() || !call.contains("function") || !call["function"].is_object()) return {};
  Json& function = call["function"];
  if (!function.contains("arguments")) return {};
  Json& arguments = function["arguments"];
  if (as_objects && arguments.is_string()) {
    Json parsed = Json::parse(arguments.get_ref<const std::string&>(), nullptr, /*allow_exceptions=*/false);
    if (parsed.is_discarded()) {
      return fail(Code::kInvalidArgument, "the arguments of a tool call are not valid JSON: {}",
                  arguments.get_ref<const std::string&>().substr(0, 200));
    }
    arguments = std::move(parsed);
  } else if (!as_objects && arguments.is_structured()) {
    arguments = arguments.dump(-1, ' ', false, Json::error_handler_t::replace);
  }
  return {};
}

}  // namespace

Result<ChatTemplate> ChatTemplate::parse(std::string_view source) {
  ChatTemplate result;
  result.source_ = source;
  Result<jinja::Program> program = jinja::parse_template(source);
  if (!program.ok())
    return Status(program.status().code(), fmt::format("{}, {}", kContext, program.status().message()));
  result.program_ = std::make_shared<const jinja::Program>(std::move(program).value());
  result.probe();
  return result;
}

Result<std::vector<ChatPiece>> ChatTemplate::render(const TemplateInput& input) const {
  if (input.messages == nullptr) return fail(Code::kInvalidArgument, "there are no messages to render");
  jinja::Interpreter interpreter(*program_, input.limits, input.now != 0 ? input.now : std::time(nullptr));
  jinja::Heap& heap = interpreter.heap();
  LONGKV_ASSIGN(const jinja::Value messages, jinja::messages_from_json(heap, *input.messages));
  interpreter.define("messages", messages);
  const std::pair<const char*, const Json*> lists[] = {{"tools", input.tools}, {"documents", input.documents}};
  for (const auto& [name, json] : lists) {
    jinja::Value v = jinja::Value::none();
    if (json != nullptr && !json->is_null()) {
      if (!json->is_array()) return fail(Code::kInvalidArgument, "{} must be a list of objects", name);
      LONGKV_ASSIGN(v, jinja::from_json(heap, *json, name));
    }
    interpreter.define(name, v);
  }
  interpreter.define("add_generation_prompt", jinja::Value::of(input.add_generation_prompt));
  if (input.bos_token) interpreter.define("bos_token", heap.text(*input.bos_token));
  if (input.eos_token) interpreter.define("eos_token", heap.text(*input.eos_token));
  if (input.variables != nullptr && !input.variables->is_null()) {
    if (!input.variables->is_object()) return fail(Code::kInvalidArgument, "template variables must be an object");
    for (const auto& [name, json] : input.variables->get_ref<const Json::object_t&>()) {
      for (const std::string_view taken : {"messages", "tools", "documents", "add_generation_prompt"}) {
        if (name == taken)
          return fail(Code::kInvalidArgument, "the template variable '{}' is set by the request itself", name);
      }
      LONGKV_ASSIGN(const jinja::Value v, jinja::from_json(heap, json, "template variables"));
      interpreter.define(name, v);
    }
  }
  jinja::TextBuilder out;
  const Status status = interpreter.run(out);
  if (!status.ok()) return Status(status.code(), fmt::format("{}, {}", kContext, status.message()));
  return pieces_of(out.text(), out.spans());
}

bool ChatTemplate::literal_contains(std::string_view text) const {
  for (const std::string& s : program_->strings) {
    if (s.find(text) != std::string::npos) return true;
  }
  return false;
}

void ChatTemplate::probe() {
  const auto rendered = [&](const Json& messages, const Json& tools) -> std::string {
    TemplateInput input;
    input.messages = &messages;
    input.tools = &tools;
    input.bos_token = "";
    input.eos_token = "";
    input.limits.steps = 1'000'000;
    input.limits.memory = 64 << 20;
    const auto pieces = render(input);
    return pieces.ok() ? joined(*pieces) : std::string();
  };
  const auto has = [](const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; };
  const Json user = {{"role", "user"}, {"content", "q1"}};
  abilities_.system_role =
      has(rendered(Json::array({{{"role", "system"}, {"content", "sys7"}}, user}), nullptr), "sys7");
  const Json parts = Json::array({{{"type", "text"}, {"text", "part7"}}});
  const std::string with_parts = rendered(Json::array({{{"role", "user"}, {"content", parts}}}), nullptr);
  abilities_.content_parts = has(with_parts, "part7") && !has(with_parts, "'text'") && !has(with_parts, "\"text\"");
  if (!program_->ids.contains("tools") && !program_->ids.contains("tool_calls")) return;
  const Json tools = Json::parse(R"([{"type": "function", "function": {"name": "tool7", "description": "d",
      "parameters": {"type": "object", "properties": {"key7": {"type": "string", "description": "d"}},
      "required": ["key7"]}}}])");
  abilities_.tools = has(rendered(Json::array({user}), tools), "tool7");
  const auto call = [&](const Json& arguments) {
    const Json calls = Json::array(
        {{{"id", "call00001"}, {"type", "function"}, {"function", {{"name", "tool7"}, {"arguments", arguments}}}}});
    return rendered(
        Json::array({user,
                     {{"role", "assistant"}, {"content", ""}, {"tool_calls", calls}},
                     {{"role", "tool"}, {"tool_call_id", "call00001"}, {"name", "tool7"}, {"content", "result"}},
                     {{"role", "assistant"}, {"content", "a"}},
                     user}),
        tools);
  };
  // Text that is taken for an object is missing, escaped or cut into characters; an object that is taken for text is an
  // error or is written with single quotes.
  const std::string from_object = call({{"key7", "value7"}});
  const std::string from_text = call(R"({"key7": "value7"})");
  const bool object_works = has(from_object, "value7") && !has(from_object, "'value7'");
  const bool text_works = has(from_text, "value7") && !has(from_text, "\\\"value7");
  abilities_.tool_calls = object_works || text_works;
  abilities_.argument_objects = object_works;
}

Result<Json> adapt_messages(const Json& messages, const TemplateAbilities& abilities) {
  Json result = messages;
  if (!result.is_array()) return fail(Code::kInvalidArgument, "messages must be a list of objects");
  for (Json& message : result) {
    if (!message.is_object()) continue;
    if (message.contains("content") && message["content"].is_array() && !abilities.content_parts) {
      LONGKV_ASSIGN(std::string text, text_of_parts(message["content"]));
      message["content"] = std::move(text);
    }
    if (!message.contains("tool_calls") || !message["tool_calls"].is_array()) continue;
    for (Json& call : message["tool_calls"]) LONGKV_TRY(adapt_arguments(call, abilities.argument_objects));
  }
  return result;
}

}  // namespace longkv
