// Conversations to token ids, in the format that a model was trained on.
//
// The template in a model file (tokenizer.chat_template) is run (chat/template.h); a built-in format takes its place
// only when it was asked for by name. What a user writes never becomes a control token: only what the template itself
// writes may. There is one owner of BOS: it is put first exactly once when the template or the vocabulary asks for it.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chat/format.h"
#include "chat/template.h"
#include "gguf/metadata.h"
#include "longkv/status.h"
#include "tokenizer/tokenizer.h"

namespace longkv {

struct ChatMessage {
  std::string role;  // system, user, assistant
  std::string content;
};

// What a caller asked for instead of the file's template; all empty for the file's own.
struct ChatChoice {
  std::string name;                                                     // a built-in format
  std::string template_text;                                            // a Jinja template
  nlohmann::ordered_json variables = nlohmann::ordered_json::object();  // further names for the template
};

// What a cache that holds a conversation must read to hold a longer one.
struct ChatContinuation {
  int64_t keep = 0;          // tokens that stay; fewer than are held when earlier text is written anew
  std::vector<int32_t> ids;  // tokens to read after them, at least one
};

class Chat {
 public:
  // `name` chooses a built-in format.
  // Errors: kInvalidArgument for an unknown name or a given template that does not parse; kUnsupported when the file
  // has no template or one that does not parse, or when the vocabulary lacks the format's tokens.
  static Result<Chat> create(const Metadata& metadata, const Tokenizer& tokenizer, std::string_view name = {});
  static Result<Chat> create(const Metadata& metadata, const Tokenizer& tokenizer, const ChatChoice& choice);

  // "chatml", "template of the file" and the like; for display.
  std::string description() const;
  // The built-in format; of use only where chat_template() is null.
  const ChatFormat& format() const { return format_; }
  // The template that runs for requests with and without tools (files may carry one of their own for tools); null for
  // a built-in format.
  const ChatTemplate* chat_template(bool with_tools = false) const;

  // A whole request, for servers. Fields of `input` that belong to the vocabulary (bos_token, eos_token) are filled in
  // when absent, and the variables of the choice count where the request has none of that name. Built-in formats take
  // system, user and assistant messages with text only. Errors: those of ChatTemplate::render.
  Result<std::vector<ChatPiece>> pieces(const TemplateInput& input) const;
  Result<std::vector<int32_t>> encode_pieces(std::span<const ChatPiece> pieces) const;
  // The pieces as text, with BOS written as its token's text; for display.
  std::string text_of(std::span<const ChatPiece> pieces) const;

  // The same for plain messages. `generation_prompt` opens the assistant's next answer.
  Result<std::vector<ChatPiece>> pieces(std::span<const ChatMessage> messages, bool generation_prompt) const;
  Result<std::string> render(std::span<const ChatMessage> messages, bool generation_prompt) const;
  Result<std::vector<int32_t>> encode(std::span<const ChatMessage> messages, bool generation_prompt) const;

  // What to read when a cache holds the ids `held`. `held_text` is what was rendered for them (the prompt's pieces
  // joined, then the answer); empty when unknown. Where `pieces` only extend it, nothing held is read again.
  Result<ChatContinuation> follow(std::span<const int32_t> held, std::string_view held_text,
                                  std::span<const ChatPiece> pieces) const;

  // The token that ends a turn in a built-in format; -1 for templates.
  int32_t end_of_turn() const { return end_of_turn_; }

 private:
  explicit Chat(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  Status use_format(ChatFormat format);
  Status use_template(std::string_view text, const Metadata* metadata);
  void block_markers(const ChatTemplate& chat_template);
  Result<std::vector<ChatPiece>> format_pieces(const TemplateInput& input) const;

  Tokenizer tokenizer_;
  ChatFormat format_;
  std::optional<ChatTemplate> template_;
  std::optional<ChatTemplate> tool_template_;
  bool own_template_ = false;  // given by the caller, not by the file
  nlohmann::ordered_json variables_;
  int32_t end_of_turn_ = -1;
  bool add_bos_ = false;          // whether an encoding must begin with BOS
  std::vector<int32_t> blocked_;  // markers that the file calls user-defined: never cut out of content
};

// The text of all pieces.
std::string joined_text(std::span<const ChatPiece> pieces);

}  // namespace longkv
