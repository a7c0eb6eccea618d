// The parser's half for expressions, one function per level of precedence.
#include <algorithm>

#include "base/error.h"
#include "chat/jinja/parser_base.h"

namespace longkv::jinja {

Parser::NodeId Parser::expression(bool with_condition) {
  const Level level(*this);
  LONGKV_TRY(level.check());
  return with_condition ? condition() : logical(true);
}

Parser::NodeId Parser::condition() {
  uint32_t line = current().line;
  LONGKV_ASSIGN(uint32_t value, logical(true));
  while (skip_name("if")) {
    LONGKV_ASSIGN(const uint32_t test, logical(true));
    uint32_t otherwise = kNoNode;
    if (skip_name("else")) {
      LONGKV_ASSIGN(otherwise, expression());
    }
    LONGKV_ASSIGN(value, add(NodeKind::kCondition, line, value, test, otherwise));
    line = current().line;
  }
  return value;
}

Parser::NodeId Parser::logical(bool is_or) {
  const uint32_t line = current().line;
  std::vector<uint32_t> list;
  do {
    LONGKV_ASSIGN(const uint32_t part, is_or ? logical(false) : negation());
    list.push_back(part);
  } while (skip_name(is_or ? "or" : "and"));
  if (list.size() == 1) return list[0];
  return add_list(is_or ? NodeKind::kOr : NodeKind::kAnd, line, list);
}

Parser::NodeId Parser::negation() {
  const uint32_t line = current().line;
  size_t times = 0;
  while (skip_name("not")) ++times;
  LONGKV_ASSIGN(uint32_t value, comparison());
  for (size_t i = 0; i < times; ++i) {
    LONGKV_ASSIGN(value, add(NodeKind::kNot, line, value));
  }
  return value;
}

Parser::NodeId Parser::comparison() {
  const uint32_t line = current().line;
  LONGKV_ASSIGN(const uint32_t first, sum());
  std::vector<uint32_t> operands;
  std::vector<Compare> operators;
  for (;;) {
    constexpr std::pair<std::string_view, Compare> kOperators[] = {
        {"==", Compare::kEqual},     {"!=", Compare::kNotEqual}, {"<", Compare::kLess},
        {"<=", Compare::kLessEqual}, {">", Compare::kGreater},   {">=", Compare::kGreaterEqual}};
    const auto* found = std::find_if(std::begin(kOperators), std::end(kOperators),
                                     [&](const auto& op) { return current().op(op.first); });
    if (found != std::end(kOperators)) {
      operators.push_back(found->second);
      next();
    } else if (skip_name("in")) {
      operators.push_back(Compare::kIn);
    } else if (current().name("not") && look().name("in")) {
      next();
      next();
      operators.push_back(Compare::kNotIn);
    } else {
      break;
    }
    LONGKV_ASSIGN(const uint32_t operand, sum());
    operands.push_back(operand);
  }
  if (operands.empty()) return first;
  Node node;
  node.kind = NodeKind::kCompare;
  node.line = line;
  node.a = first;
  node.extra = uint32_t(program_.operators.size());
  program_.operators.insert(program_.operators.end(), operators.begin(), operators.end());
  set_list(node, operands);
  return add(node);
}

Parser::NodeId Parser::sum() {
  uint32_t line = current().line;
  LONGKV_ASSIGN(uint32_t left, concatenation());
  while (current().op("+") || current().op("-")) {
    const NodeKind kind = current().op("+") ? NodeKind::kAdd : NodeKind::kSubtract;
    next();
    LONGKV_ASSIGN(const uint32_t right, concatenation());
    LONGKV_ASSIGN(left, add(kind, line, left, right));
    line = current().line;
  }
  return left;
}

Parser::NodeId Parser::concatenation() {
  const uint32_t line = current().line;
  std::vector<uint32_t> list;
  do {
    LONGKV_ASSIGN(const uint32_t part, product());
    list.push_back(part);
  } while (skip_op("~"));
  if (list.size() == 1) return list[0];
  return add_list(NodeKind::kConcat, line, list);
}

Parser::NodeId Parser::product() {
  uint32_t line = current().line;
  LONGKV_ASSIGN(uint32_t left, power());
  for (;;) {
    NodeKind kind = NodeKind::kNone;
    if (current().op("*")) kind = NodeKind::kMultiply;
    if (current().op("/")) kind = NodeKind::kDivide;
    if (current().op("//")) kind = NodeKind::kFloorDivide;
    if (current().op("%")) kind = NodeKind::kModulo;
    if (kind == NodeKind::kNone) return left;
    next();
    LONGKV_ASSIGN(const uint32_t right, power());
    LONGKV_ASSIGN(left, add(kind, line, left, right));
    line = current().line;
  }
}

Parser::NodeId Parser::power() {
  uint32_t line = current().line;
  LONGKV_ASSIGN(uint32_t left, unary(true));
  while (skip_op("**")) {
    LONGKV_ASSIGN(const uint32_t right, unary(true));
    LONGKV_ASSIGN(left, add(NodeKind::kPower, line, left, right));
    line = current().line;
  }
  return left;
}

Parser::NodeId Parser::unary(bool with_filter) {
  const Level level(*this);
  LONGKV_TRY(level.check());
  const uint32_t line = current().line;
  uint32_t node = kNoNode;
  if (current().op("-") || current().op("+")) {
    const NodeKind kind = current().op("-") ? NodeKind::kNegative : NodeKind::kPositive;
    next();
    LONGKV_ASSIGN(const uint32_t value, unary(false));
    LONGKV_ASSIGN(node, add(kind, line, value));
  } else {
    LONGKV_ASSIGN(node, primary(false));
  }
  LONGKV_ASSIGN(node, postfix(node));
  return with_filter ? filters_and_tests(node) : NodeId(node);
}

Parser::NodeId Parser::primary(bool with_member) {
  const Token& token = current();
  Node node;
  node.line = token.line;
  switch (token.kind) {
    case TokenKind::kName: return name_or_constant(with_member);
    case TokenKind::kString: return literal_text();
    case TokenKind::kInteger:
      node.kind = NodeKind::kInteger;
      node.integer = token.integer;
      next();
      return add(node);
    case TokenKind::kReal:
      node.kind = NodeKind::kReal;
      node.real = token.real;
      next();
      return add(node);
    default: break;
  }
  if (skip_op("(")) {
    LONGKV_ASSIGN(const uint32_t inside, tuple(false, true, "", true, false));
    LONGKV_TRY(expect_op(")"));
    return inside;
  }
  if (token.op("[")) return list_literal();
  if (token.op("{")) return dict_literal();
  return unexpected("an expression");
}

Parser::NodeId Parser::name_or_constant(bool with_member) {
  Node node;
  node.line = current().line;
  const std::string name = current().text;
  next();
  if (name == "true" || name == "True") {
    node.kind = NodeKind::kTrue;
  } else if (name == "false" || name == "False") {
    node.kind = NodeKind::kFalse;
  } else if (name == "none" || name == "None") {
    node.kind = NodeKind::kNone;
  } else if (with_member && skip_op(".")) {
    node.kind = NodeKind::kMember;
    node.name = intern(name);
    LONGKV_ASSIGN(const std::string attribute, expect_name());
    node.extra = intern(attribute);
    return add(node);
  } else {
    node.kind = NodeKind::kName;
    node.name = intern(name);
    for (Mentions& m : mentions_) {
      m.caller |= name == "caller";
      m.varargs |= name == "varargs";
      m.kwargs |= name == "kwargs";
    }
  }
  return add(node);
}

Parser::NodeId Parser::literal_text() {
  Node node;
  node.kind = NodeKind::kText;
  node.line = current().line;
  std::string text;
  while (current().kind == TokenKind::kString) {
    text += current().text;
    next();
  }
  node.name = intern(text);
  return add(node);
}

Parser::NodeId Parser::list_literal() {
  const Level level(*this);
  LONGKV_TRY(level.check());
  const uint32_t line = current().line;
  next();
  std::vector<uint32_t> list;
  while (!current().op("]")) {
    if (!list.empty()) {
      LONGKV_TRY(expect_op(","));
      if (current().op("]")) break;
    }
    LONGKV_ASSIGN(const uint32_t item, expression());
    list.push_back(item);
  }
  next();
  return add_list(NodeKind::kList, line, list);
}

Parser::NodeId Parser::dict_literal() {
  const Level level(*this);
  LONGKV_TRY(level.check());
  const uint32_t line = current().line;
  next();
  std::vector<uint32_t> list;
  while (!current().op("}")) {
    if (!list.empty()) {
      LONGKV_TRY(expect_op(","));
      if (current().op("}")) break;
    }
    LONGKV_ASSIGN(const uint32_t key, expression());
    LONGKV_TRY(expect_op(":"));
    LONGKV_ASSIGN(const uint32_t value, expression());
    list.push_back(key);
    list.push_back(value);
  }
  next();
  return add_list(NodeKind::kDict, line, list);
}

Parser::NodeId Parser::postfix(uint32_t node) {
  for (;;) {
    if (current().op(".") || current().op("[")) {
      LONGKV_ASSIGN(node, subscript(node));
    } else if (current().op("(")) {
      LONGKV_ASSIGN(node, call(node));
    } else {
      return node;
    }
  }
}

Parser::NodeId Parser::filters_and_tests(uint32_t node) {
  for (;;) {
    if (current().op("|")) {
      LONGKV_ASSIGN(node, filter(node));
    } else if (current().name("is")) {
      LONGKV_ASSIGN(node, test(node));
    } else if (current().op("(")) {
      LONGKV_ASSIGN(node, call(node));
    } else {
      return node;
    }
  }
}

Parser::NodeId Parser::subscript(uint32_t object) {
  Node node;
  node.line = current().line;
  node.a = object;
  if (skip_op(".")) {
    if (current().kind == TokenKind::kName) {
      node.kind = NodeKind::kAttribute;
      node.name = intern(current().text);
      next();
      return add(node);
    }
    if (current().kind != TokenKind::kInteger) return unexpected("a name or a number");
    node.kind = NodeKind::kSubscript;
    LONGKV_ASSIGN(node.b, primary(false));
    return add(node);
  }
  const Level level(*this);
  LONGKV_TRY(level.check());
  next();
  std::vector<uint32_t> list;
  while (!current().op("]")) {
    if (!list.empty()) LONGKV_TRY(expect_op(","));
    LONGKV_ASSIGN(const uint32_t item, subscribed());
    list.push_back(item);
  }
  next();
  node.kind = NodeKind::kSubscript;
  if (list.size() == 1) {
    node.b = list[0];
  } else {
    LONGKV_ASSIGN(node.b, add_list(NodeKind::kTuple, node.line, list));
  }
  return add(node);
}

Parser::NodeId Parser::subscribed() {
  const uint32_t line = current().line;
  uint32_t parts[3] = {kNoNode, kNoNode, kNoNode};
  if (!current().op(":")) {
    LONGKV_ASSIGN(parts[0], expression());
    if (!current().op(":")) return parts[0];
  }
  for (int i = 1; i < 3 && skip_op(":"); ++i) {
    if (current().op(":") || current().op("]") || current().op(",")) continue;
    LONGKV_ASSIGN(parts[i], expression());
  }
  return add(NodeKind::kSlice, line, parts[0], parts[1], parts[2]);
}

Status Parser::call_arguments(CallArguments& arguments) {
  const Level level(*this);
  LONGKV_TRY(level.check());
  const uint32_t line = current().line;
  Status bad = template_error(line, "invalid syntax for function call expression");
  next();
  bool comma = false;
  while (!current().op(")")) {
    if (comma) {
      LONGKV_TRY(expect_op(","));
      if (current().op(")")) break;
    }
    comma = true;
    if (skip_op("*")) {
      if (arguments.list != kNoNode || arguments.dict != kNoNode) return bad;
      LONGKV_ASSIGN(arguments.list, expression());
    } else if (skip_op("**")) {
      if (arguments.dict != kNoNode) return bad;
      LONGKV_ASSIGN(arguments.dict, expression());
    } else if (current().kind == TokenKind::kName && look().op("=")) {
      if (arguments.dict != kNoNode) return bad;
      const uint32_t name = intern(current().text);
      next();
      next();
      LONGKV_ASSIGN(const uint32_t value, expression());
      arguments.named.emplace_back(name, value);
    } else {
      if (arguments.list != kNoNode || arguments.dict != kNoNode || !arguments.named.empty()) return bad;
      LONGKV_ASSIGN(const uint32_t value, expression());
      arguments.positional.push_back(value);
    }
  }
  next();
  return {};
}

Parser::NodeId Parser::call(uint32_t callee) {
  Node node;
  node.kind = NodeKind::kCall;
  node.line = current().line;
  node.a = callee;
  CallArguments arguments;
  LONGKV_TRY(call_arguments(arguments));
  node.extra = uint32_t(program_.calls.size());
  program_.calls.push_back(std::move(arguments));
  return add(node);
}

// A chain of filters. In front of the first "|" stands `input`; after "{% filter" there is no bar before the first.
Parser::NodeId Parser::filter(uint32_t input) {
  uint32_t value = input;
  bool first = input == kNoNode && !current().op("|");
  while (first || skip_op("|")) {
    first = false;
    Node node;
    node.kind = NodeKind::kFilter;
    node.line = current().line;
    node.a = value;
    LONGKV_ASSIGN(std::string name, expect_name());
    while (skip_op(".")) {
      LONGKV_ASSIGN(const std::string more, expect_name());
      name += "." + more;
    }
    node.name = intern(name);
    CallArguments arguments;
    if (current().op("(")) LONGKV_TRY(call_arguments(arguments));
    node.extra = uint32_t(program_.calls.size());
    program_.calls.push_back(std::move(arguments));
    LONGKV_ASSIGN(value, add(node));
  }
  return value;
}

Parser::NodeId Parser::test(uint32_t input) {
  Node node;
  node.kind = NodeKind::kTest;
  node.line = current().line;
  node.a = input;
  next();
  const bool negated = skip_name("not");
  LONGKV_ASSIGN(std::string name, expect_name());
  while (skip_op(".")) {
    LONGKV_ASSIGN(const std::string more, expect_name());
    name += "." + more;
  }
  node.name = intern(name);
  CallArguments arguments;
  const Token& token = current();
  const bool value = token.kind == TokenKind::kString || token.kind == TokenKind::kInteger ||
                     token.kind == TokenKind::kReal || token.op("[") || token.op("{") ||
                     (token.kind == TokenKind::kName && !token.name("else") && !token.name("or") && !token.name("and"));
  if (token.op("(")) {
    LONGKV_TRY(call_arguments(arguments));
  } else if (value) {
    if (token.name("is")) return template_error(token.line, "You cannot chain multiple tests with is");
    LONGKV_ASSIGN(uint32_t argument, primary(false));
    LONGKV_ASSIGN(argument, postfix(argument));
    arguments.positional.push_back(argument);
  }
  node.extra = uint32_t(program_.calls.size());
  program_.calls.push_back(std::move(arguments));
  LONGKV_ASSIGN(const uint32_t id, add(node));
  return negated ? add(NodeKind::kNot, node.line, id) : NodeId(id);
}

Parser::NodeId Parser::tuple(bool simple, bool with_condition, std::string_view end_name, bool parenthesised,
                             bool with_member) {
  const Level level(*this);
  LONGKV_TRY(level.check());
  const uint32_t line = current().line;
  std::vector<uint32_t> list;
  bool is_tuple = false;
  for (;;) {
    if (!list.empty()) LONGKV_TRY(expect_op(","));
    const TokenKind kind = current().kind;
    if (kind == TokenKind::kPrintEnd || kind == TokenKind::kBlockEnd || current().op(")") ||
        (!end_name.empty() && current().name(end_name))) {
      break;
    }
    LONGKV_ASSIGN(const uint32_t item, simple ? primary(with_member) : expression(with_condition));
    list.push_back(item);
    if (!current().op(",")) break;
    is_tuple = true;
  }
  if (!is_tuple) {
    if (!list.empty()) return list[0];
    if (!parenthesised) return unexpected("an expression");
  }
  return add_list(NodeKind::kTuple, line, list);
}

}  // namespace longkv::jinja
