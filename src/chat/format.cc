#include "chat/format.h"

#include <array>
#include <utility>

#include "base/error.h"
#include "base/trim.h"
#include "chat/chat.h"

namespace longkv {

namespace {

constexpr std::array<std::pair<ChatStyle, const char*>, 5> kNames = {{{ChatStyle::kChatml, "chatml"},
                                                                      {ChatStyle::kLlama3, "llama3"},
                                                                      {ChatStyle::kMistral, "mistral"},
                                                                      {ChatStyle::kGemma, "gemma"},
                                                                      {ChatStyle::kPhi3, "phi3"}}};
constexpr const char* kNameList = "chatml, llama3, mistral, gemma, phi3";

bool has(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

// The system text that a ChatML template writes itself: what stands between the opening and the closing marker inside
// one string literal. A line break is written as backslash-n in the template.
std::string chatml_default_system(std::string_view text) {
  constexpr std::string_view kOpen = "<|im_start|>system";
  for (size_t at = text.find(kOpen); at != std::string_view::npos; at = text.find(kOpen, at + 1)) {
    std::string_view rest = text.substr(at + kOpen.size());
    if (rest.starts_with("\\n")) {
      rest.remove_prefix(2);
    } else if (rest.starts_with("\n")) {
      rest.remove_prefix(1);
    } else {
      continue;
    }
    const std::string_view literal = rest.substr(0, rest.find("<|im_end|>"));
    if (literal.size() == rest.size() || literal.empty() || has(literal, "'") || has(literal, "\"") ||
        has(literal, "{{") || has(literal, "\\n")) {
      continue;
    }
    return std::string(literal);
  }
  return {};
}

// Blanks around Mistral's instruction marks, as the template spells them.
void read_mistral_spacing(std::string_view text, ChatFormat& format) {
  if (has(text, "[INST] ")) format.open_instruction = "[INST] ";
  if (has(text, " [/INST]")) format.close_instruction = " [/INST]";
  if (has(text, "\" \" + message[\"content\"]") || has(text, "' ' + message['content']")) format.before_answer = " ";
}

}  // namespace

const char* ChatFormat::name() const {
  for (const auto& [candidate, text] : kNames) {
    if (candidate == style) return text;
  }
  return "";
}

Result<ChatFormat> ChatFormat::from_name(std::string_view name) {
  for (const auto& [style, text] : kNames) {
    if (name != text) continue;
    ChatFormat format;
    format.style = style;
    format.writes_bos = style == ChatStyle::kLlama3 || style == ChatStyle::kGemma || style == ChatStyle::kMistral;
    return format;
  }
  return fail(Code::kInvalidArgument, "--chat-template '{}' is not known; choose one of {}", name, kNameList);
}

Result<ChatFormat> ChatFormat::from_template(std::string_view text) {
  ChatFormat format;
  // Templates are Jinja; files with another dialect (such as Go's) carry the same markers but are not what they seem.
  const bool jinja = has(text, "{%") && has(text, "messages");
  if (jinja && has(text, "<|im_start|>")) {
    format.style = ChatStyle::kChatml;
    format.default_system = chatml_default_system(text);
  } else if (jinja && has(text, "<|start_header_id|>")) {
    format.style = ChatStyle::kLlama3;
    if (has(text, "Cutting Knowledge Date")) {
      format.system_preamble = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n";
    }
  } else if (jinja && has(text, "<start_of_turn>")) {
    format.style = ChatStyle::kGemma;
    format.refuses_system = has(text, "System role not supported");
  } else if (jinja && has(text, "<|user|>") && has(text, "<|assistant|>") && has(text, "<|end|>")) {
    format.style = ChatStyle::kPhi3;
  } else if (jinja && has(text, "[INST]") && !has(text, "<<SYS>>") && !has(text, "[SYSTEM_PROMPT]")) {
    format.style = ChatStyle::kMistral;
    read_mistral_spacing(text, format);
  } else {
    return fail(Code::kUnsupported,
                "the chat template of the file is not one that longkv knows; choose a format with --chat-template: {}",
                kNameList);
  }
  format.writes_bos = has(text, "bos_token") || has(text, "<|begin_of_text|>");
  return format;
}

std::string_view ChatFormat::end_of_turn() const {
  switch (style) {
    case ChatStyle::kChatml: return "<|im_end|>";
    case ChatStyle::kLlama3: return "<|eot_id|>";
    case ChatStyle::kGemma: return "<end_of_turn>";
    case ChatStyle::kPhi3: return "<|end|>";
    case ChatStyle::kMistral: return turn_end;
  }
  return {};
}

std::vector<std::string_view> ChatFormat::markers() const {
  switch (style) {
    case ChatStyle::kChatml: return {"<|im_start|>", "<|im_end|>"};
    case ChatStyle::kLlama3: return {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"};
    case ChatStyle::kGemma: return {"<start_of_turn>", "<end_of_turn>"};
    case ChatStyle::kPhi3: return {"<|user|>", "<|assistant|>", "<|end|>"};
    case ChatStyle::kMistral: return {turn_end};  // early vocabularies spell [INST] with ordinary tokens
  }
  return {};
}

std::string_view ChatFormat::after_turn() const {
  return style == ChatStyle::kLlama3 || style == ChatStyle::kMistral ? std::string_view() : std::string_view("\n");
}

void ChatFormat::append_generation_prompt(std::vector<ChatPiece>& pieces) const {
  switch (style) {
    case ChatStyle::kChatml: pieces.push_back({"<|im_start|>assistant\n", true}); break;
    case ChatStyle::kLlama3: pieces.push_back({"<|start_header_id|>assistant<|end_header_id|>\n\n", true}); break;
    case ChatStyle::kGemma: pieces.push_back({"<start_of_turn>model\n", true}); break;
    case ChatStyle::kPhi3: pieces.push_back({"<|assistant|>\n", true}); break;
    case ChatStyle::kMistral: break;  // the end of the instruction opens the answer
  }
}

Status ChatFormat::append(std::span<const ChatMessage> messages, std::vector<ChatPiece>& pieces) const {
  const bool pairs = style == ChatStyle::kGemma || style == ChatStyle::kMistral;
  std::string system = default_system;
  size_t begin = 0;
  if (!messages.empty() && messages[0].role == "system") {
    if (refuses_system) {
      return fail(Code::kInvalidArgument,
                  "this model's chat template has no system role; put the text in a user message");
    }
    system = messages[0].content;
    begin = 1;
  }
  const auto literal = [&](std::string text) { pieces.push_back({std::move(text), true}); };
  const auto content = [&](std::string_view text) { pieces.push_back({std::string(text), false}); };
  const bool trims = style == ChatStyle::kLlama3 || style == ChatStyle::kGemma;
  const auto opening = [&](const std::string& role) -> std::string {
    switch (style) {
      case ChatStyle::kChatml: return "<|im_start|>" + role + "\n";
      case ChatStyle::kLlama3: return "<|start_header_id|>" + role + "<|end_header_id|>\n\n";
      case ChatStyle::kGemma: return "<start_of_turn>" + std::string(role == "assistant" ? "model" : role) + "\n";
      case ChatStyle::kPhi3: return "<|" + role + "|>\n";
      case ChatStyle::kMistral: return role == "user" ? open_instruction : before_answer;
    }
    return {};
  };
  const std::string closing = std::string(end_of_turn()) + std::string(after_turn());

  const bool system_given = begin == 1 || !system.empty();
  const bool system_in_user = pairs;  // these formats have no system turn of their own
  if (!system_in_user &&
      ((system_given && (style != ChatStyle::kPhi3 || !system.empty())) || !system_preamble.empty())) {
    literal(opening("system") + system_preamble);
    content(trims ? trim(system) : std::string_view(system));
    literal(closing);
  }
  for (size_t i = begin; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    const bool user = message.role == "user";
    if (!user && message.role != "assistant") {
      return fail(Code::kInvalidArgument,
                  "message {} has role '{}'; expected user or assistant, or system as the first", i, message.role);
    }
    if (pairs && user != ((i - begin) % 2 == 0)) {
      return fail(Code::kInvalidArgument,
                  "message {} has role '{}', but in the format '{}' user and assistant must alternate, user first", i,
                  message.role, name());
    }
    literal(opening(message.role));
    if (system_in_user && user && i == begin && !system.empty()) content(system + "\n\n");
    content(trims ? trim(message.content) : std::string_view(message.content));
    literal(style == ChatStyle::kMistral && user ? close_instruction : closing);
  }
  return {};
}

}  // namespace longkv
