// The interpreter's half for statements, and its limits.
#include <algorithm>

#include "base/error.h"
#include "chat/jinja/interpreter.h"
#include "chat/jinja/lexer.h"
#include "chat/jinja/text.h"

namespace longkv::jinja {

Interpreter::Interpreter(const Program& program, const Limits& limits, std::time_t now)
    : program_(program),
      limits_(limits),
      now_(now),
      literals_(program.strings.size()),
      undefined_(program.strings.size()) {
  scope_ = heap_.scope(nullptr);
  for (const char* function : {"range", "dict", "namespace", "strftime_now", "raise_exception", "cycler", "joiner"}) {
    Value v = Value::with(Kind::kFunction);
    v.function = function;
    define(function, v);
  }
  scope_ = heap_.scope(scope_);  // of the caller's values
}

void Interpreter::define(std::string_view name, const Value& value) {
  const auto id = program_.ids.find(std::string(name));
  if (id != program_.ids.end()) scope_->set(id->second, value);
}

Status Interpreter::tick(uint64_t steps) {
  steps_ += steps;
  if (steps_ > limits_.steps) return value_error(fmt::format("the template needs more than {} steps", limits_.steps));
  if (heap_.bytes() > limits_.memory) {
    return value_error(fmt::format("the template needs more than {} bytes of memory", limits_.memory));
  }
  return {};
}

Value Interpreter::list(std::vector<Value> items, Kind kind) {
  List* l = heap_.list();
  heap_.charge(items.size() * sizeof(Value));
  l->items = std::move(items);
  return Value::of(kind, l);
}

Status Interpreter::run(TextBuilder& out) {
  scope_ = heap_.scope(scope_);
  const auto flow = execute(program_.root, out);
  return flow.ok() ? Status() : template_error(line_, flow.status().message());
}

Result<Interpreter::Flow> Interpreter::execute(uint32_t id, TextBuilder& out) {
  const Deeper deeper(*this);
  if (depth_ > limits_.depth) {
    return value_error(fmt::format("more than {} evaluations inside one another", limits_.depth));
  }
  LONGKV_TRY(tick());
  if (out.size() > limits_.output) {
    return value_error(fmt::format("the template writes more than {} bytes", limits_.output));
  }
  return execute_node(node(id), out);
}

Result<Interpreter::Flow> Interpreter::execute_block(const Node& n, TextBuilder& out) {
  for (uint32_t i = 0; i < n.count; ++i) {
    LONGKV_ASSIGN(const Flow flow, execute(child(n, i), out));
    if (flow != Flow::kNext) return flow;
  }
  return Flow::kNext;
}

Result<Interpreter::Flow> Interpreter::execute_node(const Node& n, TextBuilder& out) {
  if (n.kind != NodeKind::kBlock) line_ = n.line;
  switch (n.kind) {
    case NodeKind::kBlock: return execute_block(n, out);
    case NodeKind::kIf: return execute_if(n, out);
    case NodeKind::kFor: return execute_for(n, out);
    case NodeKind::kBreak: return Flow::kBreak;
    case NodeKind::kContinue: return Flow::kContinue;
    case NodeKind::kData: out.add(name(n.name), Origin::kTemplate); return Flow::kNext;
    case NodeKind::kPrint: {
      LONGKV_ASSIGN(const Value v, evaluate(n.a));
      const size_t before = out.size();
      LONGKV_TRY(append_text(out, v));
      LONGKV_TRY(tick_bytes(out.size() - before));
      return Flow::kNext;
    }
    case NodeKind::kSet: LONGKV_TRY(execute_set(n)); return Flow::kNext;
    case NodeKind::kSetBlock:
    case NodeKind::kFilterBlock: LONGKV_TRY(execute_captured(n, out)); return Flow::kNext;
    case NodeKind::kMacro: scope_->set(n.name, heap_.macro(n.extra, scope_)); return Flow::kNext;
    case NodeKind::kCallBlock: LONGKV_TRY(execute_call_block(n, out)); return Flow::kNext;
    case NodeKind::kGeneration: return execute_inner(n, out, heap_.scope(scope_));
    case NodeKind::kWith: {
      Scope* inner = heap_.scope(scope_);
      for (const auto& [id, value] : program_.calls[n.extra].named) {
        LONGKV_ASSIGN(const Value v, evaluate(value));
        inner->set(id, v);
      }
      return execute_inner(n, out, inner);
    }
    default: return value_error("an expression stands where a statement should");
  }
}

// `inner` belongs to the block and ends with it.
Result<Interpreter::Flow> Interpreter::execute_inner(const Node& n, TextBuilder& out, Scope* inner) {
  Scope* const outer = scope_;
  scope_ = inner;
  Result<Flow> flow = execute(child(n, 0), out);
  scope_ = outer;
  heap_.release(inner);
  return flow;
}

Result<Interpreter::Flow> Interpreter::execute_if(const Node& n, TextBuilder& out) {
  for (uint32_t i = 0; i + 1 < n.count; i += 2) {
    line_ = node(child(n, i)).line;
    LONGKV_ASSIGN(const Value test, evaluate(child(n, i)));
    if (truthy(test)) return execute(child(n, i + 1), out);
  }
  return n.c != kNoNode ? execute(n.c, out) : Flow::kNext;
}

// The items that pass the filter of a for block, each looked at in a scope of its own.
Result<std::vector<Value>> Interpreter::filtered(const Node& n, const std::vector<Value>& items) {
  std::vector<Value> kept;
  Scope* const outer = scope_;
  for (const Value& item : items) {
    scope_ = heap_.scope(outer);
    const Status status = assign(n.a, item);
    const Result<Value> wanted = status.ok() ? evaluate(n.c) : Result<Value>(status);
    heap_.release(scope_);
    scope_ = outer;
    LONGKV_TRY(wanted.status());
    if (truthy(*wanted)) kept.push_back(item);
  }
  return kept;
}

Result<Interpreter::Flow> Interpreter::execute_for(const Node& n, TextBuilder& out) {
  LONGKV_ASSIGN(const Value iterable, evaluate(n.b));
  // Lists never change, so they need no copy; `loop` may be kept beyond the loop, in a namespace.
  const std::vector<Value>* items = iterable.sequence() || iterable.is(Kind::kView) ? &iterable.list->items : nullptr;
  if (items == nullptr || n.c != kNoNode) {
    List* held = heap_.list();
    if (items == nullptr) {
      LONGKV_ASSIGN(held->items, items_of(heap_, iterable));
      items = &held->items;
    }
    if (n.c != kNoNode) {
      LONGKV_ASSIGN(held->items, filtered(n, *items));
    }
    items = &held->items;
  }
  LONGKV_TRY(tick_items(items->size()));
  if (items->empty()) return n.extra != kNoNode ? execute(n.extra, out) : Flow::kNext;
  Loop* loop = heap_.loop();
  loop->items = items;
  Scope* const outer = scope_;
  for (size_t i = 0; i < items->size(); ++i) {
    loop->index = i;
    scope_ = heap_.scope(outer);
    scope_->set(program_.loop, Value::of(loop));
    const Status status = assign(n.a, (*items)[i]);
    Result<Flow> flow = status.ok() ? execute(child(n, 0), out) : Result<Flow>(status);
    heap_.release(scope_);
    scope_ = outer;
    LONGKV_TRY(flow.status());
    if (*flow == Flow::kBreak) break;
  }
  return Flow::kNext;
}

Status Interpreter::assign(uint32_t target, const Value& value) {
  const Node& n = node(target);
  if (n.kind == NodeKind::kName) {
    scope_->set(n.name, value);
    return {};
  }
  if (n.kind == NodeKind::kMember) {
    const Value object = lookup(n.name);
    if (object.undefined()) return undefined_error(object);
    if (!object.is(Kind::kNamespace)) return value_error("cannot assign attribute on non-namespace object");
    const std::string& attribute = name(n.extra);
    if (attribute.starts_with('_')) {
      return value_error(
          fmt::format("Chat templates cannot store underscore-prefixed attributes on a namespace, but "
                      "got '{}'. Please rename the attribute.",
                      attribute));
    }
    object.dict->set(literal(attribute), value);
    heap_.charge(2 * sizeof(Value));
    return {};
  }
  LONGKV_ASSIGN(const std::vector<Value> items, items_of(heap_, value));
  if (items.size() != n.count) {
    return items.size() < n.count
               ? value_error(fmt::format("not enough values to unpack (expected {}, got {})", n.count, items.size()))
               : value_error(fmt::format("too many values to unpack (expected {})", n.count));
  }
  for (uint32_t i = 0; i < n.count; ++i) LONGKV_TRY(assign(child(n, i), items[i]));
  return {};
}

Status Interpreter::execute_set(const Node& n) {
  LONGKV_ASSIGN(const Value v, evaluate(n.b));
  return assign(n.a, v);
}

Status Interpreter::execute_captured(const Node& n, TextBuilder& out) {
  TextBuilder inside;
  LONGKV_TRY(execute_inner(n, inside, heap_.scope(scope_)).status());
  Value v = make(inside);
  const uint32_t filters = n.kind == NodeKind::kSetBlock ? n.b : n.a;
  if (filters != kNoNode) {
    block_text_ = v;
    LONGKV_ASSIGN(v, evaluate(filters));
  }
  return n.kind == NodeKind::kSetBlock ? assign(n.a, v) : append_text(out, v);
}

Status Interpreter::execute_call_block(const Node& n, TextBuilder& out) {
  const Node& call_node = node(n.a);
  LONGKV_ASSIGN(const Value callee, evaluate(call_node.a));
  Arguments arguments;
  LONGKV_TRY(arguments_of(program_.calls[call_node.extra], arguments));
  arguments.named.emplace_back("caller", heap_.macro(n.extra, scope_));
  LONGKV_ASSIGN(const Value v, call(callee, arguments));
  return append_text(out, v);
}

}  // namespace longkv::jinja
