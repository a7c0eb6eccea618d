// The chat formats that longkv writes, and how a file's template chooses among their variants.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "longkv/status.h"

namespace longkv {

struct ChatMessage;

enum class ChatStyle { kChatml, kLlama3, kMistral, kGemma, kPhi3 };

// A run of a rendered prompt: the format's own words, or somebody's content.
struct ChatPiece {
  std::string text;
  bool literal = false;
};

struct ChatFormat {
  ChatStyle style = ChatStyle::kChatml;
  std::string default_system;               // used when no system message is given; empty for none
  bool writes_bos = false;                  // the template puts BOS first
  bool refuses_system = false;              // the template raises an error on a system message
  std::string system_preamble;              // Llama 3.1+: dates before the system text, always present
  std::string open_instruction = "[INST]";  // Mistral's versions differ in blanks
  std::string close_instruction = "[/INST]";
  std::string before_answer;
  std::string turn_end;  // Mistral: the vocabulary's EOS text

  const char* name() const;
  // The text of the end-of-turn token, and the tokens that must exist for this format.
  std::string_view end_of_turn() const;
  std::vector<std::string_view> markers() const;

  // Appends a conversation.
  Status append(std::span<const ChatMessage> messages, std::vector<ChatPiece>& pieces) const;
  // Appends what opens an answer, and what follows the end-of-turn token of a finished one.
  void append_generation_prompt(std::vector<ChatPiece>& pieces) const;
  std::string_view after_turn() const;

  // By name: chatml, llama3, mistral, gemma, phi3. Errors: kInvalidArgument with the list.
  static Result<ChatFormat> from_name(std::string_view name);
  // By the markers in a template's text. Errors: kUnsupported.
  static Result<ChatFormat> from_template(std::string_view text);
};

}  // namespace longkv
