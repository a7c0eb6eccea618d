// A parsed template: nodes in one array, addressed by index. The depth of the tree is bounded by the parser, so walking
// it recursively is safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace longkv::jinja {

constexpr uint32_t kNoNode = UINT32_MAX;

enum class NodeKind : uint8_t {
  // Expressions.
  kNone,
  kTrue,
  kFalse,
  kInteger,  // integer
  kReal,     // real
  kText,     // name = index into strings
  kName,     // name
  kList,     // list
  kTuple,    // list
  kDict,     // list: key, value, key, value ...
  kAdd,      // a, b
  kSubtract,
  kMultiply,
  kDivide,
  kFloorDivide,
  kModulo,
  kPower,
  kConcat,     // list
  kAnd,        // list
  kOr,         // list
  kNot,        // a
  kNegative,   // a
  kPositive,   // a
  kCompare,    // a, list: operand nodes; operators in `operators`, from `extra` on
  kAttribute,  // a, name
  kSubscript,  // a, b
  kSlice,      // a, b, c or kNoNode; only inside kSubscript
  kCall,       // a, extra = index into calls
  kFilter,     // a (kNoNode at the head of a filter block), name, extra = index into calls
  kTest,       // a, name, extra = index into calls
  kCondition,  // a if b else c (kNoNode)
  // Statements.
  kData,         // name = index into strings
  kPrint,        // a
  kFor,          // a = target, b = iterable, c = filter or kNoNode, list = body, extra = block of the else part
  kIf,           // list: condition, block, condition, block ...; c = block of the else part
  kBlock,        // list: statements
  kSet,          // a = target, b = value
  kSetBlock,     // a = target, b = filter chain or kNoNode, list = body
  kMacro,        // extra = index into macros
  kCallBlock,    // a = call, extra = index into macros (its caller)
  kFilterBlock,  // a = filter chain, list = body
  kWith,         // list: body; extra = index into calls (named values)
  kGeneration,   // list: body
  kBreak,
  kContinue,
  // Targets of assignments.
  kMember,  // name of a namespace, extra = name of its attribute
};

enum class Compare : uint8_t { kEqual, kNotEqual, kLess, kLessEqual, kGreater, kGreaterEqual, kIn, kNotIn };

struct Node {
  NodeKind kind = NodeKind::kNone;
  uint16_t depth = 1;  // of the tree below
  uint32_t line = 0;
  uint32_t a = kNoNode, b = kNoNode, c = kNoNode;
  uint32_t first = 0, count = 0;  // the list: children[first .. first + count)
  uint32_t name = 0;              // index into strings
  uint32_t extra = kNoNode;
  union {
    int64_t integer = 0;
    double real;
  };
};

struct CallArguments {
  std::vector<uint32_t> positional;
  std::vector<std::pair<uint32_t, uint32_t>> named;  // name, node
  uint32_t list = kNoNode;                           // *args
  uint32_t dict = kNoNode;                           // **kwargs
};

struct MacroDefinition {
  uint32_t name = 0;
  std::vector<uint32_t> parameters;  // names
  std::vector<uint32_t> defaults;    // nodes, of the last parameters
  uint32_t body = kNoNode;           // a kBlock
  bool uses_caller = false;
  bool uses_varargs = false;
  bool uses_kwargs = false;
};

struct Program {
  std::vector<Node> nodes;
  std::vector<uint32_t> children;
  std::vector<Compare> operators;
  std::vector<std::string> strings;  // names and literals, each once
  std::unordered_map<std::string, uint32_t> ids;
  std::vector<CallArguments> calls;
  std::vector<MacroDefinition> macros;
  uint32_t root = kNoNode;  // a kBlock
  // Well-known names.
  uint32_t loop = 0, caller = 0, varargs = 0, kwargs = 0;
};

}  // namespace longkv::jinja
