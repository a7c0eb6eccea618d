#include "chat/jinja/parser.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "chat/jinja/filters.h"
#include "chat/jinja/parser_base.h"
#include "chat/jinja/tests.h"

namespace longkv::jinja {

namespace {

std::string describe(const Token& token) {
  switch (token.kind) {
    case TokenKind::kData: return "text";
    case TokenKind::kPrintBegin: return "'{{'";
    case TokenKind::kPrintEnd: return "'}}'";
    case TokenKind::kBlockBegin: return "'{%'";
    case TokenKind::kBlockEnd: return "'%}'";
    case TokenKind::kString: return "a string";
    case TokenKind::kEnd: return "the end of the template";
    default: return "'" + token.text + "'";
  }
}

}  // namespace

Status Parser::Level::check() const {
  if (p_.level_ <= kMaxNesting) return {};
  return template_error(p_.current().line, fmt::format("nested more than {} levels deep", kMaxNesting));
}

bool Parser::skip_name(std::string_view name) {
  if (!current().name(name)) return false;
  next();
  return true;
}

bool Parser::skip_op(std::string_view op) {
  if (!current().op(op)) return false;
  next();
  return true;
}

Status Parser::unexpected(std::string_view wanted) const {
  return template_error(current().line, fmt::format("expected {}, found {}", wanted, describe(current())));
}

Status Parser::expect_op(std::string_view op) { return skip_op(op) ? Status() : unexpected(fmt::format("'{}'", op)); }

Status Parser::expect(TokenKind kind) {
  if (current().kind != kind) {
    Token wanted;
    wanted.kind = kind;
    return unexpected(describe(wanted));
  }
  next();
  return {};
}

Result<std::string> Parser::expect_name() {
  if (current().kind != TokenKind::kName) return unexpected("a name");
  std::string name = current().text;
  next();
  return name;
}

uint32_t Parser::intern(const std::string& text) {
  const auto [at, fresh] = program_.ids.emplace(text, uint32_t(program_.strings.size()));
  if (fresh) program_.strings.push_back(text);
  return at->second;
}

void Parser::set_list(Node& node, const std::vector<uint32_t>& list) {
  node.first = uint32_t(program_.children.size());
  node.count = uint32_t(list.size());
  program_.children.insert(program_.children.end(), list.begin(), list.end());
}

Parser::NodeId Parser::add(Node node) {
  int deepest = 0;
  const auto see = [&](uint32_t child) {
    if (child != kNoNode) deepest = std::max(deepest, int(program_.nodes[child].depth));
  };
  for (const uint32_t child : {node.a, node.b, node.c}) see(child);
  for (uint32_t i = 0; i < node.count; ++i) see(program_.children[node.first + i]);
  const NodeKind kind = node.kind;
  if (kind == NodeKind::kFor) see(node.extra);
  if (kind == NodeKind::kCall || kind == NodeKind::kFilter || kind == NodeKind::kTest || kind == NodeKind::kWith) {
    const CallArguments& arguments = program_.calls[node.extra];
    for (const uint32_t child : arguments.positional) see(child);
    for (const auto& [name, child] : arguments.named) see(child);
    see(arguments.list);
    see(arguments.dict);
  }
  if (kind == NodeKind::kMacro || kind == NodeKind::kCallBlock) {
    const MacroDefinition& macro = program_.macros[node.extra];
    for (const uint32_t child : macro.defaults) see(child);
    see(macro.body);
  }
  if (deepest >= kMaxNesting) {
    return template_error(node.line, fmt::format("nested more than {} levels deep", kMaxNesting));
  }
  node.depth = uint16_t(deepest + 1);
  program_.nodes.push_back(node);
  return uint32_t(program_.nodes.size() - 1);
}

Parser::NodeId Parser::add(NodeKind kind, uint32_t line, uint32_t a, uint32_t b, uint32_t c) {
  Node node;
  node.kind = kind;
  node.line = line;
  node.a = a;
  node.b = b;
  node.c = c;
  return add(node);
}

Parser::NodeId Parser::add_list(NodeKind kind, uint32_t line, const std::vector<uint32_t>& list) {
  Node node;
  node.kind = kind;
  node.line = line;
  set_list(node, list);
  return add(node);
}

Result<Program> Parser::run() {
  program_.loop = intern("loop");
  program_.caller = intern("caller");
  program_.varargs = intern("varargs");
  program_.kwargs = intern("kwargs");
  LONGKV_ASSIGN(program_.root, statements({}));
  LONGKV_TRY(check_names(program_.root, false));
  return std::move(program_);
}

Parser::NodeId Parser::statements(std::initializer_list<std::string_view> ends) {
  const Level level(*this);
  LONGKV_TRY(level.check());
  std::vector<uint32_t> list;
  const uint32_t line = current().line;
  for (;;) {
    const Token& token = current();
    if (token.kind == TokenKind::kEnd) {
      if (ends.size() == 0) break;
      return unexpected(fmt::format("'{}' for the block that begins before line {}", *(ends.end() - 1), line));
    }
    if (token.kind == TokenKind::kData) {
      Node node;
      node.kind = NodeKind::kData;
      node.line = token.line;
      node.name = intern(token.text);
      next();
      LONGKV_ASSIGN(const uint32_t id, add(node));
      list.push_back(id);
    } else if (token.kind == TokenKind::kPrintBegin) {
      next();
      LONGKV_ASSIGN(const uint32_t value, tuple(false, true, "", false, false));
      LONGKV_TRY(expect(TokenKind::kPrintEnd));
      LONGKV_ASSIGN(const uint32_t id, add(NodeKind::kPrint, program_.nodes[value].line, value));
      list.push_back(id);
    } else {
      LONGKV_TRY(expect(TokenKind::kBlockBegin));
      if (std::any_of(ends.begin(), ends.end(), [&](std::string_view end) { return current().name(end); })) break;
      LONGKV_ASSIGN(const uint32_t id, statement());
      list.push_back(id);
      LONGKV_TRY(expect(TokenKind::kBlockEnd));
    }
  }
  return add_list(NodeKind::kBlock, line, list);
}

Parser::NodeId Parser::body(std::initializer_list<std::string_view> ends) {
  skip_op(":");
  LONGKV_TRY(expect(TokenKind::kBlockEnd));
  return statements(ends);
}

Parser::NodeId Parser::statement() {
  const uint32_t line = current().line;
  if (current().kind != TokenKind::kName) return unexpected("the name of a statement");
  const std::string name = current().text;
  next();
  if (name == "for") return for_statement(line);
  if (name == "if") return if_statement(line);
  if (name == "set") return set_statement(line);
  if (name == "macro") return macro_statement(line);
  if (name == "call") return call_statement(line);
  if (name == "filter") return filter_statement(line);
  if (name == "with") return with_statement(line);
  if (name == "generation") return generation_statement(line);
  if (name == "print") {
    std::vector<uint32_t> prints;
    while (current().kind != TokenKind::kBlockEnd) {
      if (!prints.empty()) LONGKV_TRY(expect_op(","));
      LONGKV_ASSIGN(const uint32_t value, expression());
      LONGKV_ASSIGN(const uint32_t print, add(NodeKind::kPrint, line, value));
      prints.push_back(print);
    }
    return add_list(NodeKind::kBlock, line, prints);
  }
  if (name == "break" || name == "continue") {
    if (loops_ == 0) return template_error(line, fmt::format("'{}' outside of a loop", name));
    return add(name == "break" ? NodeKind::kBreak : NodeKind::kContinue, line, kNoNode);
  }
  for (const std::string_view other : {"include", "import", "from", "extends", "block", "autoescape"}) {
    if (name == other) {
      return template_error(line, fmt::format("the statement '{}' is not supported in chat templates", name));
    }
  }
  return template_error(line, fmt::format("Encountered unknown tag '{}'.", name));
}

Parser::NodeId Parser::for_statement(uint32_t line) {
  Node node;
  node.kind = NodeKind::kFor;
  node.line = line;
  LONGKV_ASSIGN(node.a, target(true, false, "in"));
  if (!skip_name("in")) return unexpected("'in'");
  LONGKV_ASSIGN(node.b, tuple(false, false, "recursive", false, false));
  if (skip_name("if")) {
    LONGKV_ASSIGN(node.c, expression());
  }
  if (current().name("recursive")) {
    return template_error(line, "recursive loops are not supported; use a macro that calls itself");
  }
  ++loops_;
  LONGKV_ASSIGN(const uint32_t inside, body({"else", "endfor"}));
  --loops_;
  set_list(node, {inside});
  if (skip_name("else")) {
    LONGKV_ASSIGN(node.extra, body({"endfor"}));
  }
  next();
  return add(node);
}

Parser::NodeId Parser::if_statement(uint32_t line) {
  std::vector<uint32_t> list;
  Node node;
  node.kind = NodeKind::kIf;
  node.line = line;
  for (;;) {
    LONGKV_ASSIGN(const uint32_t test, tuple(false, false, "", false, false));
    list.push_back(test);
    LONGKV_ASSIGN(const uint32_t inside, body({"elif", "else", "endif"}));
    list.push_back(inside);
    if (skip_name("elif")) continue;
    if (skip_name("else")) {
      LONGKV_ASSIGN(node.c, body({"endif"}));
    }
    break;
  }
  next();
  set_list(node, list);
  return add(node);
}

Status Parser::check_target(uint32_t id) const {
  const Node& node = program_.nodes[id];
  if (node.kind == NodeKind::kTuple || node.kind == NodeKind::kList) {
    for (uint32_t i = 0; i < node.count; ++i) LONGKV_TRY(check_target(program_.children[node.first + i]));
    return {};
  }
  if (node.kind == NodeKind::kName || node.kind == NodeKind::kMember) return {};
  return template_error(node.line, "can't assign to this expression; a name was expected");
}

Parser::NodeId Parser::target(bool with_tuple, bool with_member, std::string_view end_name) {
  LONGKV_ASSIGN(const uint32_t id, with_tuple ? tuple(true, true, end_name, false, with_member) : primary(with_member));
  LONGKV_TRY(check_target(id));
  return id;
}

Parser::NodeId Parser::set_statement(uint32_t line) {
  Node node;
  node.line = line;
  LONGKV_ASSIGN(node.a, target(true, true, ""));
  if (skip_op("=")) {
    node.kind = NodeKind::kSet;
    LONGKV_ASSIGN(node.b, tuple(false, true, "", false, false));
    return add(node);
  }
  node.kind = NodeKind::kSetBlock;
  if (current().op("|")) {
    LONGKV_ASSIGN(node.b, filter(kNoNode));
  }
  const int loops = std::exchange(loops_, 0);
  LONGKV_ASSIGN(const uint32_t inside, body({"endset"}));
  loops_ = loops;
  next();
  set_list(node, {inside});
  return add(node);
}

Status Parser::signature(MacroDefinition& macro) {
  LONGKV_TRY(expect_op("("));
  while (!current().op(")")) {
    if (!macro.parameters.empty()) LONGKV_TRY(expect_op(","));
    const uint32_t line = current().line;
    LONGKV_ASSIGN(const std::string name, expect_name());
    macro.parameters.push_back(intern(name));
    if (skip_op("=")) {
      LONGKV_ASSIGN(const uint32_t value, expression());
      macro.defaults.push_back(value);
    } else if (!macro.defaults.empty()) {
      return template_error(line, "non-default argument follows default argument");
    }
  }
  return expect_op(")");
}

Parser::NodeId Parser::macro_body(MacroDefinition macro, std::string_view end, uint32_t& index) {
  mentions_.emplace_back();
  const int loops = std::exchange(loops_, 0);
  LONGKV_ASSIGN(macro.body, body({end}));
  loops_ = loops;
  next();
  const Mentions seen = mentions_.back();
  mentions_.pop_back();
  macro.uses_caller = seen.caller;
  macro.uses_varargs = seen.varargs;
  macro.uses_kwargs = seen.kwargs;
  index = uint32_t(program_.macros.size());
  program_.macros.push_back(std::move(macro));
  return index;
}

Parser::NodeId Parser::macro_statement(uint32_t line) {
  MacroDefinition macro;
  LONGKV_ASSIGN(const std::string name, expect_name());
  macro.name = intern(name);
  LONGKV_TRY(signature(macro));
  Node node;
  node.kind = NodeKind::kMacro;
  node.line = line;
  node.name = macro.name;
  LONGKV_TRY(macro_body(std::move(macro), "endmacro", node.extra).status());
  return add(node);
}

Parser::NodeId Parser::call_statement(uint32_t line) {
  MacroDefinition macro;
  macro.name = program_.caller;
  if (current().op("(")) LONGKV_TRY(signature(macro));
  Node node;
  node.kind = NodeKind::kCallBlock;
  node.line = line;
  LONGKV_ASSIGN(node.a, expression());
  if (program_.nodes[node.a].kind != NodeKind::kCall) return template_error(line, "expected call");
  LONGKV_TRY(macro_body(std::move(macro), "endcall", node.extra).status());
  return add(node);
}

Parser::NodeId Parser::filter_statement(uint32_t line) {
  Node node;
  node.kind = NodeKind::kFilterBlock;
  node.line = line;
  LONGKV_ASSIGN(node.a, filter(kNoNode));
  const int loops = std::exchange(loops_, 0);
  LONGKV_ASSIGN(const uint32_t inside, body({"endfilter"}));
  loops_ = loops;
  next();
  set_list(node, {inside});
  return add(node);
}

Parser::NodeId Parser::with_statement(uint32_t line) {
  CallArguments values;
  while (current().kind != TokenKind::kBlockEnd) {
    if (!values.named.empty()) LONGKV_TRY(expect_op(","));
    LONGKV_ASSIGN(const std::string name, expect_name());
    LONGKV_TRY(expect_op("="));
    LONGKV_ASSIGN(const uint32_t value, expression());
    values.named.emplace_back(intern(name), value);
  }
  Node node;
  node.kind = NodeKind::kWith;
  node.line = line;
  LONGKV_ASSIGN(const uint32_t inside, body({"endwith"}));
  next();
  node.extra = uint32_t(program_.calls.size());
  program_.calls.push_back(std::move(values));
  set_list(node, {inside});
  return add(node);
}

Parser::NodeId Parser::generation_statement(uint32_t line) {
  const int loops = std::exchange(loops_, 0);
  LONGKV_ASSIGN(const uint32_t inside, body({"endgeneration"}));
  loops_ = loops;
  next();
  return add_list(NodeKind::kGeneration, line, {inside});
}

Status Parser::check_calls(const CallArguments& arguments, bool conditional) const {
  for (const uint32_t child : arguments.positional) LONGKV_TRY(check_names(child, conditional));
  for (const auto& [name, child] : arguments.named) LONGKV_TRY(check_names(child, conditional));
  LONGKV_TRY(check_names(arguments.list, conditional));
  return check_names(arguments.dict, conditional);
}

Status Parser::check_names(uint32_t id, bool conditional) const {
  if (id == kNoNode) return {};
  const Node& node = program_.nodes[id];
  bool inside = conditional;
  switch (node.kind) {
    case NodeKind::kFilter:
    case NodeKind::kTest: {
      const bool is_filter = node.kind == NodeKind::kFilter;
      const std::string& name = program_.strings[node.name];
      if (!conditional && !(is_filter ? known_filter(name) : known_test(name))) {
        return template_error(node.line, fmt::format("No {} named '{}'.", is_filter ? "filter" : "test", name));
      }
      LONGKV_TRY(check_calls(program_.calls[node.extra], conditional));
      break;
    }
    case NodeKind::kCall:
    case NodeKind::kWith: LONGKV_TRY(check_calls(program_.calls[node.extra], conditional)); break;
    case NodeKind::kIf:
    case NodeKind::kCondition: inside = true; break;
    case NodeKind::kFor: {
      LONGKV_TRY(check_names(node.extra, false));
      inside = false;
      break;
    }
    case NodeKind::kMacro:
    case NodeKind::kCallBlock: {
      const MacroDefinition& macro = program_.macros[node.extra];
      for (const uint32_t child : macro.defaults) LONGKV_TRY(check_names(child, false));
      LONGKV_TRY(check_names(macro.body, false));
      break;
    }
    case NodeKind::kSetBlock:
    case NodeKind::kFilterBlock: inside = false; break;
    default: break;
  }
  for (const uint32_t child : {node.a, node.b, node.c}) LONGKV_TRY(check_names(child, inside));
  for (uint32_t i = 0; i < node.count; ++i) LONGKV_TRY(check_names(program_.children[node.first + i], inside));
  return {};
}

Result<Program> parse_template(std::string_view source) {
  LONGKV_ASSIGN(std::vector<Token> tokens, tokenize_template(source));
  return Parser(std::move(tokens)).run();
}

}  // namespace longkv::jinja
