// What the two halves of the parser share: the token stream, node making, bounds on depth.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "chat/jinja/ast.h"
#include "chat/jinja/lexer.h"
#include "chat/jinja/parser.h"
#include "longkv/status.h"

namespace longkv::jinja {

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}
  Result<Program> run();

 private:
  using NodeId = Result<uint32_t>;

  // Holds one level of nesting while it lives.
  class Level {
   public:
    explicit Level(Parser& p) : p_(p) { ++p_.level_; }
    ~Level() { --p_.level_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;
    Status check() const;

   private:
    Parser& p_;
  };

  // The stream.
  const Token& current() const { return tokens_[at_]; }
  const Token& look() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  void next() { at_ += at_ + 1 < tokens_.size() ? 1 : 0; }
  bool skip_name(std::string_view name);
  bool skip_op(std::string_view op);
  Status expect_op(std::string_view op);
  Status expect(TokenKind kind);
  Result<std::string> expect_name();
  Status unexpected(std::string_view wanted) const;

  // Nodes.
  uint32_t intern(const std::string& text);
  NodeId add(Node node);
  NodeId add(NodeKind kind, uint32_t line, uint32_t a, uint32_t b = kNoNode, uint32_t c = kNoNode);
  NodeId add_list(NodeKind kind, uint32_t line, const std::vector<uint32_t>& list);
  void set_list(Node& node, const std::vector<uint32_t>& list);

  // Expressions (parser_expression.cc).
  NodeId expression(bool with_condition = true);
  NodeId condition();
  NodeId logical(bool is_or);
  NodeId negation();
  NodeId comparison();
  NodeId sum();
  NodeId concatenation();
  NodeId product();
  NodeId power();
  NodeId unary(bool with_filter);
  NodeId primary(bool with_member);
  NodeId name_or_constant(bool with_member);
  NodeId literal_text();
  NodeId list_literal();
  NodeId dict_literal();
  NodeId postfix(uint32_t node);
  NodeId filters_and_tests(uint32_t node);
  NodeId subscript(uint32_t node);
  NodeId subscribed();
  NodeId call(uint32_t callee);
  NodeId filter(uint32_t input);
  NodeId test(uint32_t input);
  NodeId tuple(bool simple, bool with_condition, std::string_view end_name, bool parenthesised, bool with_member);
  Status call_arguments(CallArguments& arguments);

  // Statements (parser.cc).
  NodeId statements(std::initializer_list<std::string_view> ends);  // a kBlock; stops at the end's name
  NodeId body(std::initializer_list<std::string_view> ends);        // the same, after the end of the opening tag
  NodeId statement();
  NodeId for_statement(uint32_t line);
  NodeId if_statement(uint32_t line);
  NodeId set_statement(uint32_t line);
  NodeId macro_statement(uint32_t line);
  NodeId call_statement(uint32_t line);
  NodeId filter_statement(uint32_t line);
  NodeId with_statement(uint32_t line);
  NodeId generation_statement(uint32_t line);
  NodeId target(bool with_tuple, bool with_member, std::string_view end_name);
  Status check_target(uint32_t node) const;
  Status signature(MacroDefinition& macro);
  NodeId macro_body(MacroDefinition macro, std::string_view end, uint32_t& index);
  // An unknown filter or test is an error at once unless a condition may keep it from being reached.
  Status check_names(uint32_t node, bool conditional) const;
  Status check_calls(const CallArguments& arguments, bool conditional) const;

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int level_ = 0;
  int loops_ = 0;  // that break and continue may leave
  Program program_;
  // One entry for every macro being parsed: which of its special names its body mentions.
  struct Mentions {
    bool caller = false, varargs = false, kwargs = false;
  };
  std::vector<Mentions> mentions_;
};

}  // namespace longkv::jinja
