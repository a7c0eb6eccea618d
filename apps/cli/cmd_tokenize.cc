// `longkv tokenize`: the ids of a text, as a model file's vocabulary gives them.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/log.h"
#include "commands.h"
#include "common.h"
#include "gguf/gguf.h"
#include "output.h"
#include "tokenizer/pre_tokenizer.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/unicode.h"

namespace longkv::cli {

namespace {

struct Options {
  GlobalOptions global;
  std::string model;
  std::optional<std::string> file, prompt;
  std::string override_pre;
  bool ids = false;
  bool no_bos = false;
  bool no_parse_special = false;
};

// Printable form of a piece: valid UTF-8, control bytes and invalid bytes as \n, \t or \xAB.
std::string escape(std::string_view piece) {
  std::string out;
  for (size_t pos = 0; pos < piece.size();) {
    const Utf8Char c = decode_utf8(piece.data() + pos, piece.size() - pos);
    if (!c.valid || c.code < 0x20 || c.code == 0x7F) {
      const auto byte = static_cast<uint8_t>(piece[pos]);
      out += byte == '\n' ? "\\n" : byte == '\t' ? "\\t" : fmt::format("\\x{:02X}", byte);
    } else {
      out.append(piece, pos, c.length);
    }
    pos += c.length;
  }
  return out;
}

std::string describe(const Tokenizer& tokenizer, const std::vector<int32_t>& ids, const Options& options) {
  if (options.global.json) {
    nlohmann::ordered_json out;
    out["n_tokens"] = ids.size();
    out["fingerprint"] = fmt::format("{:016x}", tokenizer.fingerprint());
    out["ids"] = ids;
    if (!options.ids) {
      out["pieces"] = nlohmann::json::array();
      for (const int32_t id : ids) out["pieces"].push_back(escape(tokenizer.piece(id)));
    }
    return json_text(out, -1);
  }
  if (options.ids) return fmt::format("{}\n", fmt::join(ids, " "));
  std::string out;
  for (const int32_t id : ids) out += fmt::format("{:8} '{}'\n", id, escape(tokenizer.piece(id)));
  return out;
}

Status run(const Options& options) {
  LONGKV_TRY(apply_global_options(options.global));
  if (options.file.has_value() == options.prompt.has_value())
    return fail(Code::kInvalidArgument, "give the text as -f FILE or as -p TEXT{}",
                options.file ? ", not as both" : "");
  if (!options.override_pre.empty() && find_pre_tokenizer(options.override_pre) == nullptr) {
    return fail(Code::kInvalidArgument, "--override-pre '{}' is not known; known are {}", options.override_pre,
                known_pre_tokenizers());
  }
  LONGKV_ASSIGN(const GgufFile model, GgufFile::open(options.model));
  LONGKV_ASSIGN(const std::string kind, model.metadata().string_or("tokenizer.ggml.model", ""));
  if (!options.override_pre.empty() && kind != "gpt2")
    LONGKV_TRY(notice("--override-pre is ignored: only byte-level BPE has a pre-tokenizer"));
  LONGKV_ASSIGN(const Tokenizer tokenizer, tokenizer_of(model, options.override_pre));
  std::string text = options.prompt.value_or("");
  if (options.file) {
    LONGKV_ASSIGN(text, read_text_file(*options.file, /*may_be_empty=*/true));
  } else {
    LONGKV_TRY(check_utf8(text, "-p"));
  }
  LONGKV_ASSIGN(const auto ids, tokenizer.encode(text, !options.no_bos, !options.no_parse_special));
  return print(describe(tokenizer, ids, options));
}

}  // namespace

void add_tokenize(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("tokenize", "Print the token ids of a text");
  add_global_options(*command, options->global);
  command->add_option("-m,--model", options->model, "GGUF file; its vocabulary suffices")->required();
  command->add_option("-f,--file", options->file, "Text file ('-' = standard input)");
  command->add_option("-p,--prompt", options->prompt, "The text itself");
  command->add_flag("--ids", options->ids, "Only the ids, separated by blanks");
  command->add_flag("--no-bos", options->no_bos, "Add no BOS or EOS token");
  command->add_flag("--no-parse-special", options->no_parse_special, "Read control tokens in the text as plain text");
  command->add_option("--override-pre", options->override_pre, "Pre-tokenizer to use instead of the file's");
  command->callback([options, &exit_code] { exit_code = report(run(*options)); });
}

}  // namespace longkv::cli
