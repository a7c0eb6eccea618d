// Answers that must be JSON: which bytes may come next. Everything is bounded: depth, size of a schema, blanks in a
// row.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "longkv/status.h"

namespace longkv::server {

// A part of JSON Schema: type (one or several), properties, required, additionalProperties (true, false or a schema),
// items, minItems, maxItems, minLength, maxLength, enum, const. Annotations (title, description, default, examples,
// $schema, format...) are allowed and change nothing. Other words are refused by name, never ignored. What nothing can
// satisfy is taken out: a type whose bounds contradict each other, a member that has no value, a value of another type.
class JsonSchema {
 public:
  static constexpr int kMaxDepth = 48;
  static constexpr size_t kMaxNodes = 4096;
  static constexpr size_t kMaxProperties = 64;  // of one object, and values of one enum

  // Any object: OpenAI's "json_object".
  static std::shared_ptr<const JsonSchema> any_object();
  // Errors: kInvalidArgument naming the path in the schema; kCorrupt where it contradicts itself, so that nothing is
  // left that could satisfy it.
  static Result<std::shared_ptr<const JsonSchema>> compile(const nlohmann::json& schema);

  // A call of one of these functions: {"name": "weather", "arguments": {...}}, written with these blanks, the last
  // member under the name `arguments`.
  struct Function {
    std::string name;
    std::shared_ptr<const nlohmann::json> parameters;  // their schema; null: there are none
  };
  // Errors: as compile(), naming the function; more of them than kMaxProperties.
  static Result<std::shared_ptr<const JsonSchema>> call_of(const std::vector<Function>& functions,
                                                           const std::string& arguments);

  enum Type : uint8_t { kObject = 1, kArray = 2, kString = 4, kNumber = 8, kInteger = 16, kBoolean = 32, kNull = 64 };
  static constexpr uint8_t kAnyType = 127;

  struct Node {
    uint8_t types = kAnyType;
    std::vector<std::string> literals;  // enum and const, as JSON text; not empty: nothing else is allowed
    bool call = false;                  // a call: `names` are its beginnings, `children` what follows them
    std::vector<std::string> names;     // of properties, as JSON text with quotes
    std::vector<int> children;          // their nodes
    uint64_t required = 0;              // bits of `names`
    uint64_t forbidden = 0;             // ... that may not come
    int additional = 0;                 // node of other properties; -1: none
    int items = 0;
    int64_t min_items = 0, max_items = -1;
    int64_t min_length = 0, max_length = -1;  // characters of a string
  };
  // Node 0 allows anything; root() is where an answer starts.
  const Node& node(int i) const { return nodes_[size_t(i)]; }
  int root() const { return root_; }

 private:
  JsonSchema() : nodes_(1) {}
  Result<int> add(const nlohmann::json& schema, const std::string& path, int depth);
  Status add_members(const nlohmann::json& schema, const std::string& path, int depth, Node& node);
  Status add_literals(const nlohmann::json& schema, const std::string& path, int id);
  bool never(int id) const { return node(id).types == 0 && node(id).literals.empty(); }
  bool allows(const nlohmann::json& value, int id) const;

  std::vector<Node> nodes_;
  int root_ = 0;
};

// Follows one answer byte by byte. Copied freely, so that a token can be tried.
class JsonAcceptor {
 public:
  explicit JsonAcceptor(const JsonSchema& schema);
  JsonAcceptor(const JsonAcceptor& other) { *this = other; }
  JsonAcceptor& operator=(const JsonAcceptor& other);

  // Takes all bytes or, where one is not allowed, none.
  bool push(std::string_view bytes);
  // The value may end here.
  bool complete() const;
  // It has ended: nothing can follow.
  bool closed() const { return depth_ == 0; }

 private:
  enum class State : uint8_t {
    kValue,      // a value must begin
    kFirstItem,  // after '[': a value or ']'
    kAfterItem,  // ',' or ']'
    kFirstKey,   // after '{': a key or '}'
    kKey,        // after ',': a key
    kInKey,
    kAfterKey,   // ':'
    kCallEnd,    // '}' after the arguments of a call
    kAfterPair,  // ',' or '}'
    kInString,
    kLiteral,   // inside of true, false, null or a value of an enum
    kCallHead,  // inside of what a call begins with
    kMinus,
    kZero,
    kDigits,
    kDot,
    kFraction,
    kExponent,
    kExponentSign,
    kExponentDigits,
  };
  // A value under way.
  struct Frame {
    State state = State::kValue;
    uint8_t escape = 0;                         // strings: where in an escape, see in_string()
    uint8_t utf8 = 0;                           // strings: bytes of the character still to come
    uint8_t utf8_low = 0x80, utf8_high = 0xbf;  // limits of the next of them
    uint8_t blanks = 0;                         // in a row
    int8_t key = -1;                            // property of the pair under way; -1: none of the named ones
    int32_t node = 0;
    int32_t at = 0;     // bytes of a literal or key so far, digits of a number
    int64_t count = 0;  // items, or characters of a string
    uint64_t seen = 0;  // properties that came
    uint64_t may = 0;   // literals or names that begin with what came so far
  };

  bool step(unsigned char c);
  bool begin_value(int node, unsigned char c);
  bool in_string(Frame& f, unsigned char c, bool& ended);
  bool in_number(Frame& f, unsigned char c, bool& again);
  bool in_literal(Frame& f, unsigned char c);
  bool in_call_head(Frame& f, unsigned char c);
  bool in_key(Frame& f, unsigned char c);
  bool in_object(Frame& f, unsigned char c);
  bool in_array(Frame& f, unsigned char c);
  const std::string& literal(const Frame& f, int i) const;

  const JsonSchema* schema_;
  int depth_ = 0;
  std::array<Frame, JsonSchema::kMaxDepth + 1> frames_;
};

}  // namespace longkv::server
