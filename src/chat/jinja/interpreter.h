// Runs a parsed template. One object per rendering; not shared between threads.
#pragma once

#include <cstdint>
#include <ctime>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "chat/jinja/ast.h"
#include "chat/jinja/operators.h"
#include "chat/jinja/value.h"
#include "longkv/status.h"

namespace longkv::jinja {

// Bounds of one rendering. A template that passes one is an error that names it.
struct Limits {
  uint64_t steps = 50'000'000;            // nodes evaluated, items visited, 64-byte pieces of text made
  int depth = 2'000;                      // nested evaluations
  int macros = 200;                       // macros that call one another
  uint64_t output = uint64_t{256} << 20;  // bytes of the result
  uint64_t memory = uint64_t{512} << 20;  // bytes of everything made on the way
};

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string_view, Value>> named;
  Origin names = Origin::kTemplate;  // kUser when a user's dict was unpacked into them
};

// Arguments matched with a function's parameters.
class Parameters {
 public:
  // Errors: too many arguments, unknown names, a parameter given twice, one of the first `required` missing.
  static Result<Parameters> match(std::string_view function, const Arguments& arguments,
                                  std::initializer_list<std::string_view> names, size_t required = 0);
  bool has(size_t i) const { return given_[i]; }
  const Value& operator[](size_t i) const { return values_[i]; }
  // Errors: the parameter is given and has another type.
  Result<int64_t> integer(size_t i, int64_t fallback) const;
  Result<const Str*> text(size_t i, const Str* fallback) const;
  bool flag(size_t i, bool fallback) const { return has(i) ? truthy(values_[i]) : fallback; }

 private:
  std::string_view function_;
  std::vector<std::string_view> names_;
  std::vector<Value> values_;
  std::vector<bool> given_;
};

class Interpreter {
 public:
  Interpreter(const Program& program, const Limits& limits, std::time_t now);
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  Heap& heap() { return heap_; }
  void define(std::string_view name, const Value& value);

  // Renders. Errors: kInvalidArgument "line N: reason".
  Status run(TextBuilder& out);

  // What functions, filters, tests and methods use.
  // Counts work; fails when a limit is passed.
  Status tick(uint64_t steps = 1);
  Status tick_items(size_t n) { return tick(1 + n / 4); }
  Status tick_bytes(size_t n) { return tick(1 + n / 64); }
  Result<Value> attribute(const Value& object, std::string_view name);
  Result<Value> item(const Value& object, const Value& key);
  Result<Value> call(const Value& callee, const Arguments& arguments);
  Result<Value> filter(std::string_view name, const Value& input, const Arguments& arguments);
  Result<bool> test(std::string_view name, const Value& input, const Arguments& arguments);
  Result<const Str*> text(const Value& value) { return text_of(heap_, value); }
  Value make(TextBuilder& out) { return Value::of(out.finish(heap_)); }
  Value literal(std::string_view text) { return heap_.text(text); }
  Value list(std::vector<Value> items, Kind kind = Kind::kList);
  std::time_t now() const { return now_; }

 private:
  enum class Flow { kNext, kBreak, kContinue };

  class Deeper {
   public:
    explicit Deeper(Interpreter& in) : in_(in) { ++in_.depth_; }
    ~Deeper() { --in_.depth_; }
    Deeper(const Deeper&) = delete;
    Deeper& operator=(const Deeper&) = delete;

   private:
    Interpreter& in_;
  };

  const Node& node(uint32_t id) const { return program_.nodes[id]; }
  const std::string& name(uint32_t id) const { return program_.strings[id]; }
  uint32_t child(const Node& n, uint32_t i) const { return program_.children[n.first + i]; }

  // Expressions (evaluate.cc).
  Result<Value> evaluate(uint32_t id);
  Result<Value> evaluate_node(const Node& n);
  Result<Value> evaluate_list(const Node& n, Kind kind);
  Result<Value> evaluate_dict(const Node& n);
  Result<Value> evaluate_compare(const Node& n);
  Result<Value> evaluate_concat(const Node& n);
  Result<Value> evaluate_subscript(const Node& n);
  Result<Value> evaluate_filter(const Node& n);
  Result<Value> slice(const Value& object, const Node& n);
  Status arguments_of(const CallArguments& call, Arguments& out);
  Value lookup(uint32_t id);

  // Calls (call.cc).
  Result<Value> call_macro(const Macro& macro, const Arguments& arguments);
  Status bind_macro(const MacroDefinition& definition, const Arguments& arguments, Scope& scope);
  Result<Value> call_function(std::string_view function, const Arguments& arguments);
  Result<Value> call_loop_method(const Bound& bound, const Arguments& arguments);
  Result<Value> loop_attribute(const Value& object, std::string_view name);

  // Statements (execute.cc).
  Result<Flow> execute(uint32_t id, TextBuilder& out);
  Result<Flow> execute_node(const Node& n, TextBuilder& out);
  Result<Flow> execute_block(const Node& n, TextBuilder& out);
  Result<Flow> execute_if(const Node& n, TextBuilder& out);
  Result<Flow> execute_for(const Node& n, TextBuilder& out);
  Result<std::vector<Value>> filtered(const Node& n, const std::vector<Value>& items);
  Result<Flow> execute_inner(const Node& n, TextBuilder& out, Scope* scope);
  Status execute_set(const Node& n);
  Status execute_captured(const Node& n, TextBuilder& out);
  Status execute_call_block(const Node& n, TextBuilder& out);
  Status assign(uint32_t target, const Value& value);

  const Program& program_;
  const Limits limits_;
  const std::time_t now_;
  Heap heap_;
  Scope* scope_ = nullptr;
  uint64_t steps_ = 0;
  int depth_ = 0;
  int macros_ = 0;
  Value block_text_;   // input of the filters of a filter or set block
  uint32_t line_ = 1;  // of the statement being run
  // By index into the program's strings, made on first use.
  std::vector<const Str*> literals_;
  std::vector<Value> undefined_;
};

}  // namespace longkv::jinja
