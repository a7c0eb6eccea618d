#include "server/tool_calls.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/trim.h"

namespace longkv::server {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kOpen = "<tool_call>", kClose = "</tool_call>", kList = "[TOOL_CALLS]",
                           kPython = "<|python_tag|>";
constexpr size_t kMaxCalls = 128;

// Where the JSON value at the beginning of `text` ends; 0 where there is none. Brackets outside of strings decide.
size_t value_end(std::string_view text) {
  int depth = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        quoted = false;
      }
      continue;
    }
    if (c == '"') quoted = true;
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    if (depth > 64 || depth < 0) return 0;
    if (depth == 0 && (c == '}' || c == ']')) return i + 1;
  }
  return 0;
}

}  // namespace

ToolText::ToolText(std::vector<std::string> names)
    : names_(std::move(names)), markers_({std::string(kOpen), std::string(kList), std::string(kPython)}) {}

bool ToolText::known(const std::string& name) const {
  return std::find(names_.begin(), names_.end(), name) != names_.end();
}

std::string ToolText::push(std::string_view text) {
  all_ += text;
  if (holding_) return {};
  std::string out;
  if (!begun_) {
    blanks_ += text;
    const size_t first = blanks_.find_first_not_of(" \t\r\n");
    if (first == std::string::npos) return {};
    begun_ = true;
    if (blanks_[first] == '{') {
      holding_ = true;
      return {};
    }
    out = markers_.push(std::exchange(blanks_, {}));
  } else {
    out = markers_.push(text);
  }
  holding_ = markers_.stopped();
  shown_ += out.size();
  return out;
}

bool ToolText::add_call(std::string_view text, std::vector<ToolCall>& calls) const {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object() || calls.size() == kMaxCalls) return false;
  const auto name = json.find("name");
  if (name == json.end() || !name->is_string() || !known(name->get<std::string>())) return false;
  for (const char* key : {"arguments", "parameters"}) {
    const auto arguments = json.find(key);
    if (arguments == json.end()) continue;
    // Some write the object as text.
    const Json value = arguments->is_string() ? Json::parse(arguments->get<std::string>(), nullptr, false) : *arguments;
    if (!value.is_object()) return false;
    calls.push_back({name->get<std::string>(), value.dump(-1, ' ', false, Json::error_handler_t::replace)});
    return true;
  }
  calls.push_back({name->get<std::string>(), "{}"});
  return true;
}

std::vector<ToolCall> ToolText::finish(std::string& rest) {
  std::string_view text = std::string_view(all_).substr(shown_);
  rest = text;
  std::vector<ToolCall> calls;
  std::string_view left = trim(text);
  const auto failed = [] { return std::vector<ToolCall>(); };
  if (left.starts_with(kList)) {
    left = trim(left.substr(kList.size()));
    if (value_end(left) != left.size()) return failed();
    const Json list = Json::parse(left, nullptr, false);
    if (!list.is_array()) return failed();
    for (const Json& call : list) {
      if (!add_call(call.dump(-1, ' ', false, Json::error_handler_t::replace), calls)) return failed();
    }
  } else {
    // One or more objects, each in its brackets or, without them, divided by blanks and semicolons.
    if (left.starts_with(kPython)) left = trim(left.substr(kPython.size()));
    while (!left.empty()) {
      const bool marked = left.starts_with(kOpen);
      if (marked) left = trim(left.substr(kOpen.size()));
      const size_t end = left.starts_with('{') ? value_end(left) : 0;
      if (end == 0 || !add_call(left.substr(0, end), calls)) return failed();
      left = trim(left.substr(end));
      if (marked && left.starts_with(kClose)) left = trim(left.substr(kClose.size()));
      if (!marked && left.starts_with(';')) left = trim(left.substr(1));
    }
  }
  if (!calls.empty()) rest.clear();
  return calls;
}

}  // namespace longkv::server
