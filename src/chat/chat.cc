#include "chat/chat.h"

#include <algorithm>

#include "base/error.h"

namespace longkv {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kTemplateKey = "tokenizer.chat_template";
constexpr std::string_view kToolTemplateKey = "tokenizer.chat_template.tool_use";
constexpr std::string_view kHowToChoose =
    "choose a format with --chat-template (chatml, llama3, mistral, gemma, phi3) or give a Jinja template with "
    "--chat-template-file";

bool blank(std::string_view text) { return text.find_first_not_of(" \t\r\n\f\v") == std::string_view::npos; }

Json to_json(std::span<const ChatMessage> messages) {
  Json list = Json::array();
  for (const ChatMessage& m : messages) list.push_back({{"role", m.role}, {"content", m.content}});
  return list;
}

// The pieces of a text from byte `from` on.
std::vector<ChatPiece> pieces_after(std::span<const ChatPiece> pieces, size_t from) {
  std::vector<ChatPiece> rest;
  for (const ChatPiece& piece : pieces) {
    if (from >= piece.text.size()) {
      from -= piece.text.size();
      continue;
    }
    rest.push_back({piece.text.substr(from), piece.literal});
    from = 0;
  }
  return rest;
}

bool begins_with(std::span<const ChatPiece> pieces, std::string_view text) {
  for (const ChatPiece& piece : pieces) {
    const size_t n = std::min(piece.text.size(), text.size());
    if (text.substr(0, n) != std::string_view(piece.text).substr(0, n)) return false;
    text.remove_prefix(n);
    if (text.empty()) return true;
  }
  return text.empty();
}

}  // namespace

std::string joined_text(std::span<const ChatPiece> pieces) {
  std::string text;
  for (const ChatPiece& piece : pieces) text += piece.text;
  return text;
}

Result<Chat> Chat::create(const Metadata& metadata, const Tokenizer& tokenizer, std::string_view name) {
  ChatChoice choice;
  choice.name = name;
  return create(metadata, tokenizer, choice);
}

Result<Chat> Chat::create(const Metadata& metadata, const Tokenizer& tokenizer, const ChatChoice& choice) {
  Chat chat(tokenizer);
  chat.variables_ = choice.variables;
  if (!choice.name.empty() && !choice.template_text.empty()) {
    return fail(Code::kInvalidArgument, "a chat format and a chat template contradict each other; give one of them");
  }
  if (!choice.name.empty()) {
    LONGKV_ASSIGN(ChatFormat format, ChatFormat::from_name(choice.name));
    // The chosen name decides the format; the file's template may still tell its variant.
    if (auto text = metadata.string(kTemplateKey); text.ok()) {
      if (auto of_file = ChatFormat::from_template(*text); of_file.ok() && of_file->style == format.style) {
        format = std::move(of_file).value();
      }
    }
    LONGKV_TRY(chat.use_format(std::move(format)));
    return chat;
  }
  if (!choice.template_text.empty()) {
    chat.own_template_ = true;
    LONGKV_TRY(chat.use_template(choice.template_text, nullptr));
    return chat;
  }
  const Result<std::string_view> text = metadata.string(kTemplateKey);
  if (!metadata.has(kTemplateKey) || (text.ok() && text->empty())) {
    return fail(Code::kUnsupported, "the file has no chat template ({}), so it may be a base model; {}", kTemplateKey,
                kHowToChoose);
  }
  LONGKV_TRY(text.status());
  if (Status s = chat.use_template(*text, &metadata); !s.ok()) {
    return fail(Code::kUnsupported, "the file's template cannot be run: {}; {}", s.message(), kHowToChoose);
  }
  return chat;
}

Status Chat::use_format(ChatFormat format) {
  format_ = std::move(format);
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

Status Chat::use_template(std::string_view text, const Metadata* metadata) {
  LONGKV_ASSIGN(template_, ChatTemplate::parse(text));
  if (metadata != nullptr && metadata->has(kToolTemplateKey)) {
    LONGKV_ASSIGN(const std::string_view with_tools, metadata->string(kToolTemplateKey));
    LONGKV_ASSIGN(tool_template_, ChatTemplate::parse(with_tools));
  }
  add_bos_ = tokenizer_.bos().has_value() && tokenizer_.adds_bos();
  block_markers(*template_);
  if (tool_template_) block_markers(*tool_template_);
  return {};
}

// Many files call their markers user-defined, a kind that text is searched for as well. What the template writes itself
// is a marker, and so is everything in the usual brackets, which templates may put together from parts.
void Chat::block_markers(const ChatTemplate& chat_template) {
  for (int32_t id = 0; id < tokenizer_.vocab_size(); ++id) {
    if (!tokenizer_.is_user_defined(id)) continue;
    const std::string_view piece = tokenizer_.piece(id);
    const bool bracketed = piece.size() > 4 && piece.starts_with("<|") && piece.ends_with("|>");
    if (bracketed || (!blank(piece) && chat_template.literal_contains(piece))) blocked_.push_back(id);
  }
}

std::string Chat::description() const {
  if (!template_) return format_.name();
  return own_template_ ? "given template" : "template of the file";
}

const ChatTemplate* Chat::chat_template(bool with_tools) const {
  if (with_tools && tool_template_) return &*tool_template_;
  return template_ ? &*template_ : nullptr;
}

Result<std::vector<ChatPiece>> Chat::format_pieces(const TemplateInput& input) const {
  if (input.tools != nullptr && input.tools->is_array() && !input.tools->empty()) {
    return fail(Code::kInvalidArgument, "the built-in chat format '{}' has no tools; use the file's template",
                format_.name());
  }
  if (input.messages == nullptr || !input.messages->is_array()) {
    return fail(Code::kInvalidArgument, "messages must be a list of objects");
  }
  std::vector<ChatMessage> messages;
  for (const Json& m : *input.messages) {
    if (!m.is_object() || !m.contains("role") || !m["role"].is_string() || !m.contains("content") ||
        !m["content"].is_string()) {
      return fail(Code::kInvalidArgument, "message {} needs a role and content that are text", messages.size());
    }
    messages.push_back({m["role"], m["content"]});
  }
  return pieces(messages, input.add_generation_prompt);
}

Result<std::vector<ChatPiece>> Chat::pieces(const TemplateInput& input) const {
  if (!template_) return format_pieces(input);
  TemplateInput filled = input;
  if (!filled.bos_token && tokenizer_.bos()) filled.bos_token = std::string(tokenizer_.piece(*tokenizer_.bos()));
  if (!filled.eos_token && tokenizer_.eos()) filled.eos_token = std::string(tokenizer_.piece(*tokenizer_.eos()));
  Json variables = variables_;
  if (input.variables != nullptr && input.variables->is_object()) {
    variables.update(*input.variables);
    filled.variables = &variables;
  } else if (input.variables == nullptr || input.variables->is_null()) {
    filled.variables = &variables;
  }
  const bool with_tools = input.tools != nullptr && input.tools->is_array() && !input.tools->empty();
  return chat_template(with_tools)->render(filled);
}

Result<std::vector<ChatPiece>> Chat::pieces(std::span<const ChatMessage> messages, bool generation_prompt) const {
  if (template_) {
    const Json list = to_json(messages);
    TemplateInput input;
    input.messages = &list;
    input.add_generation_prompt = generation_prompt;
    LONGKV_ASSIGN(std::vector<ChatPiece> written, pieces(input));
    const bool said = std::any_of(messages.begin(), messages.end(), [](const auto& m) { return !blank(m.content); });
    const bool heard = std::any_of(written.begin(), written.end(),
                                   [](const ChatPiece& piece) { return !piece.literal && !blank(piece.text); });
    if (said && !heard) {
      return fail(Code::kInvalidArgument,
                  "the chat template leaves out everything that was said; choose a format with --chat-template");
    }
    return written;
  }
  std::vector<ChatPiece> result;
  LONGKV_TRY(format_.append(messages, result));
  if (generation_prompt) format_.append_generation_prompt(result);
  return result;
}

Result<std::vector<int32_t>> Chat::encode_pieces(std::span<const ChatPiece> pieces) const {
  std::vector<TextPart> parts;
  for (const ChatPiece& piece : pieces) parts.push_back({piece.text, piece.literal});
  LONGKV_ASSIGN(std::vector<int32_t> ids, tokenizer_.encode_parts(parts, /*add_special=*/false, blocked_));
  if (add_bos_ && (ids.empty() || ids.front() != *tokenizer_.bos())) ids.insert(ids.begin(), *tokenizer_.bos());
  return ids;
}

std::string Chat::text_of(std::span<const ChatPiece> pieces) const {
  std::string text = joined_text(pieces);
  if (!add_bos_) return text;
  const std::string bos(tokenizer_.piece(*tokenizer_.bos()));
  const bool written = !pieces.empty() && pieces.front().literal && pieces.front().text.starts_with(bos);
  return written ? text : bos + text;
}

Result<std::string> Chat::render(std::span<const ChatMessage> messages, bool generation_prompt) const {
  LONGKV_ASSIGN(const std::vector<ChatPiece> all, pieces(messages, generation_prompt));
  return text_of(all);
}

Result<std::vector<int32_t>> Chat::encode(std::span<const ChatMessage> messages, bool generation_prompt) const {
  LONGKV_ASSIGN(const std::vector<ChatPiece> all, pieces(messages, generation_prompt));
  return encode_pieces(all);
}

Result<ChatContinuation> Chat::follow(std::span<const int32_t> held, std::string_view held_text,
                                      std::span<const ChatPiece> pieces) const {
  ChatContinuation next;
  if (!held.empty() && !held_text.empty() && begins_with(pieces, held_text)) {
    const std::vector<ChatPiece> rest = pieces_after(pieces, held_text.size());
    std::vector<TextPart> parts;
    for (const ChatPiece& piece : rest) parts.push_back({piece.text, piece.literal});
    LONGKV_ASSIGN(next.ids, tokenizer_.encode_parts(parts, /*add_special=*/false, blocked_));
    // A special token parts the text, so that tokens before and after it are those of the whole. Without one the
    // whole must be looked at.
    if (!next.ids.empty() && (tokenizer_.is_control(next.ids[0]) || tokenizer_.is_user_defined(next.ids[0]))) {
      // An answer may have brought the end of its turn along.
      if (next.ids.size() > 1 && held.back() == next.ids[0] && tokenizer_.is_eog(held.back()))
        next.ids.erase(next.ids.begin());
      next.keep = int64_t(held.size());
      return next;
    }
  }
  LONGKV_ASSIGN(std::vector<int32_t> ids, encode_pieces(pieces));
  if (ids.empty()) return fail(Code::kInvalidArgument, "the chat template wrote no text");
  const size_t shared = size_t(std::mismatch(held.begin(), held.end(), ids.begin(), ids.end()).second - ids.begin());
  next.keep = int64_t(std::min(shared, ids.size() - 1));
  next.ids.assign(ids.begin() + next.keep, ids.end());
  return next;
}

}  // namespace longkv
