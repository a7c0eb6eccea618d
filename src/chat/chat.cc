#include "chat/chat.h"

#include "base/error.h"

namespace longkv {

Result<Chat> Chat::create(const Metadata& metadata, const Tokenizer& tokenizer, std::string_view name) {
  ChatFormat format;
  if (!name.empty()) {
    LONGKV_ASSIGN(format, ChatFormat::from_name(name));
    // The chosen name decides the format; the file's template may still tell its variant.
    if (auto text = metadata.string("tokenizer.chat_template"); text.ok()) {
      if (auto of_file = ChatFormat::from_template(*text); of_file.ok() && of_file->style == format.style) {
        format = std::move(of_file).value();
      }
    }
  } else if (metadata.has("tokenizer.chat_template")) {
    LONGKV_ASSIGN(const std::string_view text, metadata.string("tokenizer.chat_template"));
    LONGKV_ASSIGN(format, ChatFormat::from_template(text));
  } else {
    return fail(Code::kUnsupported,
                "the file has no chat template (tokenizer.chat_template), so it may be a base model; choose a format "
                "with --chat-template: chatml, llama3, mistral, gemma, phi3");
  }
  Chat chat(tokenizer, std::move(format));
  LONGKV_TRY(chat.resolve_markers());
  return chat;
}

Status Chat::resolve_markers() {
  add_bos_ = tokenizer_.bos().has_value() && (format_.writes_bos || tokenizer_.adds_bos());
  if (format_.style == ChatStyle::kMistral) {
    if (!tokenizer_.eos()) return fail(Code::kUnsupported, "the chat format 'mistral' needs an EOS token");
    format_.turn_end = tokenizer_.piece(*tokenizer_.eos());
  }
  for (const std::string_view marker : format_.markers()) {
    const auto id = tokenizer_.find(marker);
    if (!id || !(tokenizer_.is_control(*id) || tokenizer_.is_user_defined(*id))) {
      return fail(Code::kUnsupported, "the chat format '{}' needs the special token '{}', which the vocabulary lacks",
                  format_.name(), marker);
    }
    if (tokenizer_.is_user_defined(*id)) blocked_.push_back(*id);
  }
  for (const std::string_view optional : {"[INST]", "[/INST]", "<|system|>"}) {
    if (const auto id = tokenizer_.find(optional); id && tokenizer_.is_user_defined(*id)) blocked_.push_back(*id);
  }
  end_of_turn_ = *tokenizer_.find(format_.end_of_turn());
  return {};
}

Result<std::string> Chat::render(std::span<const ChatMessage> messages, bool generation_prompt) const {
  std::vector<ChatPiece> pieces;
  LONGKV_TRY(format_.append(messages, true, pieces));
  if (generation_prompt) format_.append_generation_prompt(pieces);
  std::string text;
  if (add_bos_) text = tokenizer_.piece(*tokenizer_.bos());
  for (const ChatPiece& piece : pieces) text += piece.text;
  return text;
}

Result<std::vector<int32_t>> Chat::encode_pieces(const std::vector<ChatPiece>& pieces) const {
  std::vector<TextPart> parts;
  for (const ChatPiece& piece : pieces) parts.push_back({piece.text, piece.literal});
  return tokenizer_.encode_parts(parts, false, blocked_);
}

Result<std::vector<int32_t>> Chat::encode(std::span<const ChatMessage> messages, bool generation_prompt) const {
  std::vector<ChatPiece> pieces;
  LONGKV_TRY(format_.append(messages, true, pieces));
  if (generation_prompt) format_.append_generation_prompt(pieces);
  LONGKV_ASSIGN(std::vector<int32_t> ids, encode_pieces(pieces));
  if (add_bos_) ids.insert(ids.begin(), *tokenizer_.bos());
  return ids;
}

Result<std::vector<int32_t>> Chat::encode_next(int32_t last_cached, std::span<const ChatMessage> messages) const {
  std::vector<ChatPiece> pieces;
  pieces.push_back({std::string(format_.end_of_turn()) + std::string(format_.after_turn()), true});
  LONGKV_TRY(format_.append(messages, false, pieces));
  format_.append_generation_prompt(pieces);
  LONGKV_ASSIGN(std::vector<int32_t> ids, encode_pieces(pieces));
  if (last_cached == end_of_turn_) ids.erase(ids.begin());
  return ids;
}

}  // namespace longkv
