// From the user's document, question and options to prompt tokens.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "chat/chat.h"
#include "longkv/status.h"
#include "model/model.h"
#include "tokenizer/tokenizer.h"

namespace longkv::cli {

struct PromptOptions {
  std::string file;                // document
  std::string text;                // question, or the whole prompt
  std::string system;              // system message of chat formats
  std::string chat_template;       // format by name, or a Jinja template, instead of the file's template
  std::string template_file;       // a Jinja template in a file
  std::string template_variables;  // JSON object: names that the template reads
  bool jinja = true;               // accepted from llama.cpp's users; templates are always run
  bool raw = false;                // no chat format: BOS, document, text, as they are
  bool no_escape = false;          // keep \n and so on in `text` as typed
  bool keep_first = false;         // a document that does not fit: keep its beginning
  bool keep_last = false;          // or its end
};

// Adds --chat-template, --chat-template-file, --chat-template-kwargs and --jinja.
void add_template_options(CLI::App& command, PromptOptions& options);

// Whether a chat format was asked for instead of the file's.
bool template_chosen(const PromptOptions& options);

// The chat format to use: none for --raw or a model without a template. A template that does not parse is an error.
Result<std::optional<Chat>> choose_chat(const PromptOptions& options, const LoadedModel& model,
                                        const Tokenizer& tokenizer);

// Prompt of at most `room` tokens. Never cut unless asked to; a cut is reported with its size.
// Errors: kInvalidArgument (nothing to read, not UTF-8, too long), kIo.
Result<std::vector<int32_t>> build_prompt(const PromptOptions& options, const std::optional<Chat>& chat,
                                          const Tokenizer& tokenizer, int64_t room);

// \n, \t, \r, \\, \', \" and \xHH as in llama.cpp's -p.
std::string unescape(const std::string& text);

}  // namespace longkv::cli
