// Calls of tools in the text of an answer, as the common families write them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/stop_matcher.h"

namespace longkv::server {

struct ToolCall {
  std::string name;
  std::string arguments;  // an object, as JSON text
};

// Takes an answer as it comes and keeps calls apart from what is said.
//
// Recognised: <tool_call>{"name", "arguments"}</tool_call>, one or more (Qwen, Hermes); [TOOL_CALLS] and a list of such
// objects (Mistral); an answer that is nothing but such an object, with "parameters" or "arguments", after
// <|python_tag|> or not (Llama 3). A call of a tool that the request does not have is text.
class ToolText {
 public:
  explicit ToolText(std::vector<std::string> names);

  // What may be shown of the answer; nothing from the first sign of a call on.
  std::string push(std::string_view text);
  // At the end: the calls, or none and in `rest` the text that was held back for one.
  std::vector<ToolCall> finish(std::string& rest);

 private:
  bool known(const std::string& name) const;
  bool add_call(std::string_view json, std::vector<ToolCall>& calls) const;

  std::vector<std::string> names_;
  StopMatcher markers_;
  std::string blanks_;  // before the first other character
  bool begun_ = false, holding_ = false;
  std::string all_;   // everything that came
  size_t shown_ = 0;  // bytes of it
};

}  // namespace longkv::server
