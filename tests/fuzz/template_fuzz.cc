// Chat templates: whatever the text, parsing and rendering return within their bounds, and what a user wrote never
// counts as written by the template.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "chat/template.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace longkv;
  using Json = nlohmann::ordered_json;
  if (size > 1 << 16) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const Result<ChatTemplate> parsed = ChatTemplate::parse(text);
  if (!parsed.ok()) return 0;
  // A character of a private area, which the template can only have from the user unless it spells it itself.
  constexpr std::string_view kMark = "\xEE\x80\x80";
  static const Json messages = Json::parse(
      "[{\"role\": \"system\", \"content\": \"\xEE\x80\x80s\"},"
      " {\"role\": \"user\", \"content\": \" \xEE\x80\x80 a, b\\n\xEE\x80\x80\\u00e9<x> \"},"
      " {\"role\": \"assistant\", \"content\": \"\", \"tool_calls\": [{\"id\": \"call00001\", \"type\": \"function\","
      "  \"function\": {\"name\": \"\xEE\x80\x80\", \"arguments\": {\"\xEE\x80\x80\": [1, 2.5, null, true]}}}]},"
      " {\"role\": \"tool\", \"content\": \"\xEE\x80\x80\", \"name\": \"\xEE\x80\x80\"},"
      " {\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"\xEE\x80\x80\"}]}]");
  static const Json tools = Json::parse(
      "[{\"type\": \"function\", \"function\": {\"name\": \"\xEE\x80\x80\", \"description\": \"\xEE\x80\x80\","
      " \"parameters\": {\"type\": \"object\", \"properties\": {\"\xEE\x80\x80\": {\"type\": \"string\"}}}}}]");
  TemplateInput input;
  input.messages = &messages;
  input.tools = &tools;
  input.add_generation_prompt = true;
  input.bos_token = "<s>";
  input.now = 1'700'000'000;
  input.limits.steps = 200'000;
  input.limits.output = 1 << 20;
  input.limits.memory = 64 << 20;
  const auto pieces = parsed->render(input);
  const bool may_spell = text.find('\\') != std::string_view::npos || text.find(kMark) != std::string_view::npos;
  if (!pieces.ok() || may_spell) return 0;
  for (const ChatPiece& piece : *pieces) {
    if (piece.literal && piece.text.find(kMark) != std::string::npos) std::abort();
  }
  return 0;
}
