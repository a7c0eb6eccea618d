#include "prompt.h"

#include <cctype>

#include "base/error.h"
#include "base/log.h"
#include "common.h"
#include "help.h"

namespace longkv::cli {

namespace {

Result<std::vector<int32_t>> encode(const PromptOptions& o, const std::optional<Chat>& chat, const Tokenizer& tokenizer,
                                    const std::string& document, const std::string& text) {
  if (!chat) return tokenizer.encode(document + text, /*add_special=*/true, /*parse_special=*/false);
  std::vector<ChatMessage> messages;
  if (!o.system.empty()) messages.push_back({"system", o.system});
  const bool both = !document.empty() && !text.empty();
  messages.push_back({"user", document + (both ? "\n\n" : "") + text});
  return chat->encode(messages, /*generation_prompt=*/true);
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  const char lower = char(std::tolower(static_cast<unsigned char>(c)));
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

}  // namespace

std::string unescape(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\' || i + 1 == text.size()) {
      out += text[i];
      continue;
    }
    const char c = text[++i];
    switch (c) {
      case 'n': out += '\n'; break;
      case 't': out += '\t'; break;
      case 'r': out += '\r'; break;
      case '\\':
      case '\'':
      case '"': out += c; break;
      case 'x':
        if (i + 2 < text.size() && hex_digit(text[i + 1]) >= 0 && hex_digit(text[i + 2]) >= 0) {
          out += char(hex_digit(text[i + 1]) * 16 + hex_digit(text[i + 2]));
          i += 2;
          break;
        }
        [[fallthrough]];
      default: out += '\\', out += c;
    }
  }
  return out;
}

void add_template_options(CLI::App& command, PromptOptions& options) {
  command.add_option("--chat-template", options.chat_template, "chatml, llama3, mistral, gemma, phi3, or Jinja");
  command.add_option("--chat-template-file", options.template_file, "A Jinja template from a file");
  command
      .add_option("--chat-template-kwargs", options.template_variables,
                  "JSON object with further names for the template, such as {\"enable_thinking\": false}")
      ->group(kMore);
  command.add_flag("--jinja", options.jinja, "Accepted: templates of files are always run as Jinja")->group(kMore);
}

bool template_chosen(const PromptOptions& o) { return !o.chat_template.empty() || !o.template_file.empty(); }

Result<std::optional<Chat>> choose_chat(const PromptOptions& o, const LoadedModel& model, const Tokenizer& tokenizer) {
  const Metadata& m = model.file().metadata();
  if (o.raw && template_chosen(o))
    return fail(Code::kInvalidArgument, "--raw and --chat-template contradict each other");
  if (o.raw && !o.template_variables.empty())
    return fail(Code::kInvalidArgument, "--raw has no template that --chat-template-kwargs could change");
  if (o.raw && !o.system.empty()) return fail(Code::kInvalidArgument, "--raw has no place for a system message");
  if (o.raw || (!template_chosen(o) && !m.has("tokenizer.chat_template"))) {
    if (!o.system.empty()) {
      return fail(Code::kInvalidArgument,
                  "the model file has no chat template; a system message needs --chat-template NAME");
    }
    return std::optional<Chat>();
  }
  if (!o.chat_template.empty() && !o.template_file.empty())
    return fail(Code::kInvalidArgument, "--chat-template and --chat-template-file contradict each other");
  ChatChoice choice;
  // As in llama.cpp, the option takes a name or the template itself.
  const bool jinja = o.chat_template.find("{{") != std::string::npos || o.chat_template.find("{%") != std::string::npos;
  (jinja ? choice.template_text : choice.name) = o.chat_template;
  if (!o.template_file.empty()) {
    LONGKV_ASSIGN(choice.template_text, read_text_file(o.template_file));
  }
  if (!o.template_variables.empty()) {
    choice.variables = nlohmann::ordered_json::parse(o.template_variables, nullptr, /*allow_exceptions=*/false);
    if (!choice.variables.is_object())
      return fail(Code::kInvalidArgument,
                  "--chat-template-kwargs needs a JSON object such as {{\"enable_thinking\": false}}");
  }
  LONGKV_ASSIGN(Chat chat, Chat::create(m, tokenizer, choice));
  return std::optional<Chat>(std::move(chat));
}

Result<std::vector<int32_t>> build_prompt(const PromptOptions& o, const std::optional<Chat>& chat,
                                          const Tokenizer& tokenizer, int64_t room) {
  if (o.keep_first && o.keep_last)
    return fail(Code::kInvalidArgument, "--keep-first and --keep-last contradict each other");
  if ((o.keep_first || o.keep_last) && o.file.empty())
    return fail(Code::kInvalidArgument, "--keep-first and --keep-last cut a document; there is none without -f FILE");
  const std::string text = o.no_escape ? o.text : unescape(o.text);
  std::string document;
  if (!o.file.empty()) {
    LONGKV_ASSIGN(document, read_text_file(o.file));
  }
  LONGKV_TRY(check_utf8(text, "-p"));
  if (document.empty() && text.empty())
    return fail(Code::kInvalidArgument, "nothing to read: give -f FILE, -p TEXT or both");

  LONGKV_ASSIGN(std::vector<int32_t> ids, encode(o, chat, tokenizer, document, text));
  if (int64_t(ids.size()) <= room) return ids;
  if (!o.keep_first && !o.keep_last) {
    return fail(
        Code::kInvalidArgument, "the prompt has {} tokens and {} fit beside the answer; use a larger -c{}", ids.size(),
        room,
        document.empty() ? " or a smaller -n" : ", a smaller -n, or --keep-first or --keep-last to cut the document");
  }
  // Cut the document to what is left beside everything else, in whole tokens of its own.
  LONGKV_ASSIGN(const std::vector<int32_t> rest, encode(o, chat, tokenizer, "", text));
  LONGKV_ASSIGN(const std::vector<int32_t> all,
                tokenizer.encode(document, /*add_special=*/false, /*parse_special=*/false));
  const int64_t total = int64_t(all.size());
  int64_t keep = std::min(total, room - int64_t(rest.size()));
  // Joining text may change a few tokens at the seams, so step down until the whole fits.
  for (; keep > 0; keep -= 8) {
    const std::span<const int32_t> kept =
        o.keep_first ? std::span(all).subspan(0, size_t(keep)) : std::span(all).subspan(size_t(total - keep));
    std::string part = tokenizer.decode(kept);
    // A cut can split a character; drop the broken bytes at the seam.
    while (!part.empty() && !check_utf8(part, "").ok()) o.keep_first ? part.pop_back() : void(part.erase(0, 1));
    LONGKV_ASSIGN(ids, encode(o, chat, tokenizer, part, text));
    if (int64_t(ids.size()) > room) continue;
    log_info("cut: kept the {} {} of {} document tokens, as asked", o.keep_first ? "first" : "last", keep, total);
    return ids;
  }
  return fail(Code::kInvalidArgument,
              "{} tokens fit beside the answer and everything but the document already takes {}; use a larger -c or a "
              "smaller -n",
              room, rest.size());
}

}  // namespace longkv::cli
