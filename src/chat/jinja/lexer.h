// Template text to tokens, with Jinja's control of white space as Transformers sets it: the line break after a block is
// dropped (trim_blocks), and so are blanks before a block that begins its line (lstrip_blocks).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "longkv/status.h"

namespace longkv::jinja {

enum class TokenKind : uint8_t {
  kData,
  kPrintBegin,
  kPrintEnd,
  kBlockBegin,
  kBlockEnd,
  kName,
  kString,
  kInteger,
  kReal,
  kOperator,  // text holds it
  kEnd,
};

struct Token {
  TokenKind kind = TokenKind::kEnd;
  uint32_t line = 0;
  std::string text;
  int64_t integer = 0;
  double real = 0;

  bool op(std::string_view s) const { return kind == TokenKind::kOperator && text == s; }
  bool name(std::string_view s) const { return kind == TokenKind::kName && text == s; }
};

// Errors: kInvalidArgument with the line. The last token is kEnd.
Result<std::vector<Token>> tokenize_template(std::string_view source);

// "line 3: reason" as every error of a template is written.
Status template_error(uint32_t line, std::string_view reason);

}  // namespace longkv::jinja
