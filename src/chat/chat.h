// Conversations to token ids, in the format that a model was trained on.
//
// A model file's template (tokenizer.chat_template) is recognised by its markers, not executed. What a user writes
// never becomes a control token: only the format's own literals may. There is one owner of BOS: it is put first exactly
// once when the template or the vocabulary asks for it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chat/format.h"
#include "gguf/metadata.h"
#include "longkv/status.h"
#include "tokenizer/tokenizer.h"

namespace longkv {

struct ChatMessage {
  std::string role;  // system (first only), user, assistant
  std::string content;
};

class Chat {
 public:
  // `name` (from --chat-template) chooses a format instead of the file's template unless empty.
  // Errors: kInvalidArgument for an unknown `name`; kUnsupported when the file has no template or one that is not
  // recognised, or when the vocabulary lacks the format's tokens.
  static Result<Chat> create(const Metadata& metadata, const Tokenizer& tokenizer, std::string_view name = {});

  const ChatFormat& format() const { return format_; }

  // The prompt as text, with BOS written as its token's text; for display.
  Result<std::string> render(std::span<const ChatMessage> messages, bool generation_prompt) const;

  // Ids of a whole conversation. `generation_prompt` opens the assistant's next answer.
  // Errors: kInvalidArgument for an unknown role or an order of roles that the format cannot express.
  Result<std::vector<int32_t>> encode(std::span<const ChatMessage> messages, bool generation_prompt) const;

  // Ids to append when an answer already lies in the cache: the end of that answer (unless `last_cached` is its
  // end-of-turn token), `messages`, and the opening of the next answer. The cached ids stay valid as they are.
  Result<std::vector<int32_t>> encode_next(int32_t last_cached, std::span<const ChatMessage> messages) const;

  // The token that ends a turn in this format.
  int32_t end_of_turn() const { return end_of_turn_; }

 private:
  Chat(const Tokenizer& tokenizer, ChatFormat format) : tokenizer_(tokenizer), format_(std::move(format)) {}
  Status resolve_markers();
  Result<std::vector<int32_t>> encode_pieces(const std::vector<ChatPiece>& pieces) const;

  Tokenizer tokenizer_;
  ChatFormat format_;
  int32_t end_of_turn_ = -1;
  bool add_bos_ = false;
  std::vector<int32_t> blocked_;  // markers that the file calls user-defined: never cut out of content
};

}  // namespace longkv
