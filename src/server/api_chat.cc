// The conversation of a chat request: messages with text, calls and results of tools.
#include <fmt/format.h>

#include <set>
#include <string>
#include <utility>

#include "server/api_request.h"
#include "server/json_grammar.h"

namespace longkv::server {

namespace {

using json = nlohmann::ordered_json;

constexpr size_t kMaxMessages = 100000;
constexpr size_t kMaxTools = 128;

// What is wrong with a message; empty: nothing.
std::string wrong_content(const json& m, const std::string& role) {
  const auto content = m.find("content");
  if (content == m.end() || content->is_null()) {
    const bool calls = role == "assistant" && m.contains("tool_calls") && m["tool_calls"].is_array();
    return calls ? "" : "'content' is missing";
  }
  if (content->is_string()) return "";
  if (!content->is_array()) return "'content' must be a string or a list of text parts";
  for (const json& part : *content) {
    if (!part.is_object() || part.value("type", json()) != "text" || !part.contains("text") ||
        !part["text"].is_string())
      return "'content': only parts of type 'text' are supported";
  }
  return "";
}

std::string wrong_calls(const json& m) {
  const auto calls = m.find("tool_calls");
  if (calls == m.end() || calls->is_null()) return "";
  if (!calls->is_array()) return "'tool_calls' must be a list";
  for (const json& call : *calls) {
    const json* function = call.is_object() && call.contains("function") ? &call["function"] : nullptr;
    if (function == nullptr || !function->is_object() || !function->value("name", json()).is_string() ||
        !function->contains("arguments"))
      return "'tool_calls' must have objects with 'function.name' and 'function.arguments'";
  }
  return "";
}

// The tools that an answer must call one of; empty: it need not, or the choice is wrong.
std::vector<const json*> demanded(Fields& fields, const json* choice, const json& tools) {
  std::vector<const json*> functions;
  if (choice == nullptr || *choice == "auto" || *choice == "none") return functions;
  const bool any = *choice == "required";
  const json* named = choice->is_object() && choice->value("type", json()) == "function" && choice->contains("function")
                          ? &(*choice)["function"]
                          : nullptr;
  const bool one = named != nullptr && named->is_object() && named->value("name", json()).is_string();
  if (!any && !one) {
    fields.fail("tool_choice",
                "'tool_choice' must be auto, none, required or an object of type 'function' with 'function.name'");
    return functions;
  }
  for (const json& tool : tools) {
    if (any || tool["function"]["name"] == (*named)["name"]) functions.push_back(&tool["function"]);
  }
  if (functions.empty()) {
    fields.contradicts("tool_choice", any ? "'tool_choice' is required, but there are no 'tools'"
                                          : fmt::format("'tool_choice' names '{}', which is not among 'tools'",
                                                        (*named)["name"].get<std::string>().substr(0, 64)));
  }
  return functions;
}

void check_tools(Fields& fields, const json& tools) {
  if (!tools.is_array() || tools.size() > kMaxTools)
    return fields.fail("tools", fmt::format("'tools' must be a list of at most {} tools", kMaxTools));
  std::set<std::string> names;
  for (const json& tool : tools) {
    const json* function = tool.is_object() && tool.contains("function") ? &tool["function"] : nullptr;
    if (function == nullptr || tool.value("type", json()) != "function" || !function->is_object() ||
        !function->value("name", json()).is_string())
      return fields.fail("tools", "'tools' must have objects of type 'function' with 'function.name'");
    const auto name = (*function)["name"].get<std::string>();
    if (name.empty()) return fields.fail("tools", "'tools': a 'function.name' is empty, so nothing could call it");
    if (!names.insert(name).second) {
      return fields.contradicts(
          "tools",
          fmt::format("'tools' has two functions of the name '{}': a call could mean either", name.substr(0, 64)));
    }
  }
}

void read_tools(const Service& service, Fields& fields, Conversation& out) {
  const json* tools = fields.any("tools");
  const json* choice = fields.any("tool_choice");
  fields.ignore({"parallel_tool_calls"});
  if (tools != nullptr) check_tools(fields, *tools);
  if (fields.failed()) return;
  const bool none = tools == nullptr || tools->empty();
  if (none || (choice != nullptr && *choice == "none")) return void(demanded(fields, choice, json::array()));
  if (!service.takes_tools()) return fields.fail("tools", "tools are not supported with this model's chat format");
  out.input.tools = *tools;
  std::vector<JsonSchema::Function> functions;
  const std::vector<const json*> asked = demanded(fields, choice, *tools);
  if (asked.size() > JsonSchema::kMaxProperties) {
    return fields.contradicts("tools", fmt::format("a call can be demanded of {} tools at most; found {}",
                                                   JsonSchema::kMaxProperties, asked.size()));
  }
  for (const json* f : asked) {
    const auto given = f->find("parameters");
    const bool none_given = given == f->end() || given->is_null();
    functions.push_back({(*f)["name"].get<std::string>(),
                         none_given ? nullptr : std::make_shared<const nlohmann::json>(nlohmann::json(*given))});
  }
  if (functions.empty()) return;
  const Service::CallForm form = service.call_form();
  auto call = JsonSchema::call_of(functions, form.arguments);
  if (!call.ok()) {
    const std::string& message = call.status().message();
    return call.status().code() == Code::kCorrupt ? fields.contradicts("tools", message)
                                                  : fields.fail("tools", message);
  }
  out.call = std::move(call).value();
  out.input.answer_begins = form.opening;
}

}  // namespace

std::vector<std::string> tool_names(const json& tools) {
  std::vector<std::string> names;
  for (const json& tool : tools.is_array() ? tools : json::array())
    names.push_back(tool["function"]["name"].get<std::string>());
  return names;
}

Conversation read_conversation(const Service& service, Fields& fields) {
  Conversation out;
  const json* messages = fields.any("messages");
  const json* variables = fields.any("chat_template_kwargs");
  out.input.generation_prompt = fields.boolean("add_generation_prompt").value_or(true);
  read_tools(service, fields, out);
  if (variables != nullptr) {
    if (!variables->is_object()) fields.fail("chat_template_kwargs", "'chat_template_kwargs' must be an object");
    out.input.variables = *variables;
  }
  const auto wrong = [&](const std::string& message) { fields.fail("messages", message); };
  if (messages == nullptr) return wrong("'messages' is missing"), out;
  if (!messages->is_array() || messages->empty() || messages->size() > kMaxMessages) {
    return wrong(fmt::format("'messages' must be a list of 1 to {} messages", kMaxMessages)), out;
  }
  for (size_t i = 0; i < messages->size(); ++i) {
    const json& m = (*messages)[i];
    if (!m.is_object() || !m.contains("role") || !m["role"].is_string())
      return wrong(fmt::format("'messages[{}]' must be an object with a 'role'", i)), out;
    const auto& role = m["role"].get_ref<const std::string&>();
    if (role != "system" && role != "developer" && role != "user" && role != "assistant" && role != "tool")
      return wrong(fmt::format("'messages[{}].role' must be system, developer, user, assistant or tool", i)), out;
    std::string what = wrong_content(m, role);
    if (what.empty()) what = wrong_calls(m);
    if (!what.empty()) return wrong(fmt::format("messages[{}]: {}", i, what)), out;
  }
  out.input.messages = *messages;
  for (json& m : out.input.messages) {
    if (m["role"] == "developer") m["role"] = "system";
  }
  return out;
}

}  // namespace longkv::server
